"""The site that `make docs` builds has every page of docs/ and every public name."""

import importlib.util
import inspect
import re
import subprocess
import sys
import zlib

import pytest
from selenium.webdriver.common.by import By
from support import browser
from support.paths import ROOT

import deepcompile_zero3
from deepcompile_zero3 import Zero3Module

DOCS = ROOT / "docs"
MISSING = [
    name
    for name in ("sphinx", "myst_parser", "furo", "sphinx_copybutton")
    if importlib.util.find_spec(name) is None
]
ENTRY = re.compile(r"^\.\. (?:auto)?(\w+):: ([\w.]+)", re.MULTILINE)
TREE = re.compile(r"```\{toctree\}\n(.*?)```|^\.\. toctree::\n(.*)", re.MULTILINE | re.DOTALL)


def test_the_reference_has_each_public_name():
    """Reads the reference's source: no Sphinx is needed."""
    found = set()
    for page in (DOCS / "reference").glob("*.rst"):
        module = ""
        for kind, name in ENTRY.findall(page.read_text()):
            if kind == "currentmodule":
                module = name
            elif module == "deepcompile_zero3" and "." not in name:
                found.add(name)
    public = set(deepcompile_zero3.__all__)
    assert (public - found, found - public) == (set(), set())  # without an entry; not there


def _pages_under(index):
    trees = (part for match in TREE.findall(index.read_text()) for part in match)
    lines = [line.strip() for tree in trees for line in tree.splitlines()]
    return [line for line in lines if line and not line.startswith(":")]


def test_each_page_of_the_documentation_is_in_a_table_of_contents():
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    pages |= {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.rst")}
    listed = {"index", *_pages_under(DOCS / "index.md")}
    listed |= {f"reference/{page}" for page in _pages_under(DOCS / "reference" / "index.rst")}
    assert (pages - listed, listed - pages) == (set(), set())  # not listed; not there


def _objects_of(site):
    """Returns the names in a site's inventory, which follows four lines of a header."""
    *_, packed = (site / "objects.inv").read_bytes().split(b"\n", maxsplit=4)
    lines = zlib.decompress(packed).decode().splitlines()
    return {line.split(" ")[0] for line in lines if " py:" in line}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Returns the folder of the site, which is built without a warning."""
    if MISSING:
        pytest.skip(f"`make docs` installs {', '.join(MISSING)}")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    run = subprocess.run(
        [*command, DOCS, folder], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.more
def test_the_site_lists_each_public_name(site):
    objects = _objects_of(site)
    assert {f"deepcompile_zero3.{name}" for name in deepcompile_zero3.__all__} <= objects
    methods = {name for name, _ in inspect.getmembers(Zero3Module, callable) if name[0] != "_"}
    assert {f"deepcompile_zero3.Zero3Module.{name}" for name in methods} <= objects


BROKEN_IMAGES = """return [...document.images].filter(i => !i.naturalWidth).map(i => i.src)"""
WIDER_THAN_WINDOW = "return document.documentElement.scrollWidth > innerWidth"


@pytest.mark.more
@pytest.mark.skipif(bool(browser.missing()), reason=str(browser.missing()))
@pytest.mark.timeout(180)
def test_pages_of_the_site_show_in_a_browser(site):
    """The front page, one of the reference and a how-to, on a wide and on a narrow screen."""
    *_, last, _ = re.findall(r"^## (.*)", (ROOT / "README.md").read_text(), re.MULTILINE)
    for width in (1400, 500):
        with browser.chromium(width) as driver:
            for page, heading, shown in (
                ("index", "deepcompile_zero3", last),  # the README, but for `Read on`
                ("reference/sharding", "Sharding", "fully_shard("),
                ("hosts", "Several hosts", "torchrun"),
            ):
                driver.get((site / f"{page}.html").as_uri())
                text = driver.find_element(By.TAG_NAME, "article").text
                assert driver.find_element(By.TAG_NAME, "h1").text.startswith(heading)
                assert shown in text
                assert driver.execute_script(BROKEN_IMAGES) == []
                assert not driver.execute_script(WIDER_THAN_WINDOW), (page, width)
                errors = [e for e in driver.get_log("browser") if e["level"] == "SEVERE"]
                assert errors == []
                picture = site / f"{page.replace('/', '-')}-{width}.png"
                assert driver.save_screenshot(str(picture))
