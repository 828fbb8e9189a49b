"""Blocks of the documents run, their links lead somewhere, and so do errors that name a page."""

import re

import pytest
from support import document_model, documents
from support.job import needs_a_job
from support.paths import CSRC, ROOT

from deepcompile_zero3.guides import Guide

BLOCKS = {page: documents.blocks_of(page) for page in documents.PAGES}
QUICKSTART = "docs/quickstart.md"
LANGUAGES = {"python", "bash", "sh", "diff", "", "{include}", "{toctree}"}  # "": output
ON_FOUR_RANKS = "docs/layouts.md"
WHOLE_SCRIPT = "# train.py: torchrun"  # test_readme.py runs it


def _adapted(code, folder):
    """Returns the code without Inductor, which would take most of the time, and in a folder."""
    code = re.sub(r'(backend="zero3")(?!, options)', r"\1, options={}", code)
    code = code.replace("options={", 'options={"inductor": False, ')
    return code.replace("/scratch", str(folder)).replace("checkpoints/5", f"{folder}/5")


def _is_run(block):
    is_script = block.code.startswith(WHOLE_SCRIPT)
    return block.language == "python" and not block.reason and not is_script


def _run(page, folder):
    for block in BLOCKS[page]:
        if _is_run(block):
            found = document_model.names("fully_shard(" not in block.code, folder)
            exec(compile(_adapted(block.code, folder), f"{page}:{block.line}", "exec"), found)


RUN = [
    page
    for page, blocks in BLOCKS.items()
    if page not in (QUICKSTART, ON_FOUR_RANKS) and any(map(_is_run, blocks))
]


@needs_a_job
@pytest.mark.parametrize("page", RUN)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _run(page, tmp_path)


@pytest.mark.more
def test_blocks_of_meshes_run(run_ranks, tmp_path):
    run_ranks(4, _run, ON_FOUR_RANKS, tmp_path)


def _tutorial(folder):
    code = "".join(block.code for block in BLOCKS[QUICKSTART] if block.language == "python")
    code = re.sub(r"^dist\.(init_process|destroy_process|barrier).*$", "", code, flags=re.MULTILINE)
    code = code.replace("print(", "printed.append(")
    code = code.replace(", flush=True", "")
    found = {"printed": []}
    exec(compile(_adapted(code, folder), QUICKSTART, "exec"), found)
    return [re.search(r"loss ([\d.]+), norm ([\d.]+)", line).groups() for line in found["printed"]]


def test_the_tutorial_is_one_script_that_goes_on_from_its_checkpoint(run_ranks, tmp_path):
    for told in run_ranks(2, _tutorial, tmp_path):
        losses = [float(loss) for loss, _ in told]
        assert len(losses) == 6
        assert losses == sorted(losses, reverse=True)


def test_the_tutorial_is_short():
    assert len((ROOT / QUICKSTART).read_text().splitlines()) <= 150
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


@pytest.mark.parametrize("page", documents.PAGES)
def test_each_block_has_a_language_and_names_the_test_that_runs_it_elsewhere(page):
    for block in BLOCKS[page]:
        assert block.language in LANGUAGES, block
        if block.language == "python":
            compile(block.code, f"{page}:{block.line}", "exec")
        for test in re.findall(r"test_\w+\.py", block.reason or ""):
            assert list((ROOT / "tests").rglob(test)), block.reason


@pytest.mark.parametrize("page", [*documents.PAGES, "CHANGELOG.md"])
def test_links_lead_to_a_file_and_an_anchor(page):
    for link in documents.links_of(page):
        name, _, anchor = link.partition("#")
        path = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert path.exists(), link
        if anchor:
            assert anchor in documents.anchors_of(path.relative_to(ROOT)), link


def _sources():
    python = (ROOT / "deepcompile_zero3").rglob("*.py")
    return [*python, *CSRC.rglob("*.h"), *CSRC.rglob("*.cpp")]


def test_pages_that_errors_name_are_there():
    named = set(Guide)
    for path in _sources():
        named.update(re.findall(r"docs/\w+\.md(?:#[\w-]+)?", path.read_text()))
    for place in named:
        page, _, anchor = place.partition("#")
        assert page in documents.PAGES
        assert not anchor or anchor in documents.anchors_of(page), place


def test_each_guide_is_given():
    text = "".join(path.read_text() for path in _sources() if path.suffix == ".py")
    assert [guide.name for guide in Guide if f"{{Guide.{guide.name}}}" not in text] == []
