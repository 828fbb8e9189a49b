"""Pages of steps: the file, and its display in a browser."""

import html.parser
import json
import random
import sys
import time

import pytest
from plotly.offline import get_plotlyjs
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait
from support import browser

from deepcompile_zero3.tools.document import tables_of
from deepcompile_zero3.tools.page import FOUND, draw, save_page
from deepcompile_zero3.tools.table import Table
from deepcompile_zero3.tools.timeline import LANES, Span, Timeline

in_browser = pytest.mark.timeout(180)
MIB = 2**20
KINDS = ("shards", "gathered", "activations", "gradients")
HARMFUL = (
    "</script><b>harm</b>",
    "<img src=x onerror='document.title = 1'>",
    "<!--<script>",
    "&lt;i&gt; \\u003c",
    "%{x} $title ${text}",
    "<a href='http://localhost'>link</a>",
)


def step_of_transformer(name, blocks=12, operators=40, slower=1.0):
    """Returns a step whose gathers run ahead, but not always far enough."""
    draw = random.Random(name)
    layers = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    parts = [tuple(f"model.layers.{i}.{layer}.weight" for layer in layers) for i in range(blocks)]
    spans, memory = [], []
    now = gathers = reduces = 0.0  # the end of each lane's last span
    gathered = activations = gradients = 0
    for is_forward in (True, False):
        for names in parts if is_forward else parts[::-1]:
            start = max(gathers, now - 1.5e-3)
            gathers = start + slower * draw.uniform(1.0e-3, 2.4e-3)
            spans.append(Span("gather", "all_gather", start, gathers, names, 24 * MIB))
            memory.append((start, (32 * MIB, gathered + 24 * MIB, activations, gradients)))
            if gathers > now:
                spans.append(Span("waiting", "all_gather", now, gathers, names))
                now = gathers
            for _ in range(operators if is_forward else 2 * operators):
                start, now = now, now + slower * draw.expovariate(operators / 3e-3)
                operator = draw.choice(("mm", "mm", "mul", "add", "_softmax", "transpose"))
                spans.append(Span("compute", operator, start, now))
            activations += 6 * MIB if is_forward else -6 * MIB
            if not is_forward:
                gradients += 2 * MIB
                start = max(now, reduces)
                reduces = start + slower * draw.uniform(1.5e-3, 3e-3)
                spans.append(Span("reduce", "reduce_scatter", start, reduces, names, 24 * MIB))
            memory.append((now, (32 * MIB, gathered, activations, gradients)))
    return Timeline(name, tuple(spans), KINDS, tuple(memory))


def table_of(timeline):
    """Returns a table with a row for each gathered or reduced parameter."""
    moved = [span for span in timeline.spans if span.lane in ("gather", "reduce")]
    rows = (
        (span.name, name, span.start * 1e3, (span.end - span.start) * 1e3)
        for span in moved
        for name in span.parameters
    )
    return Table("Collectives", ("collective", "parameter", "starts, ms", "takes, ms"), tuple(rows))


EXAMPLE = (step_of_transformer("predicted"), step_of_transformer("measured", slower=1.1))


def save_example(path):
    save_page(
        path,
        "LlamaForCausalLM: a step of rank 0",
        "LlamaForCausalLM: 48 parameters of 288.0 MiB over 4 ranks, by messages\n"
        "at rest 72.0 MiB of shards; a step gathers 576.0 MiB and reduces 288.0 MiB",
        EXAMPLE,
        [table_of(EXAMPLE[0])],
    )


def save_harmful(path):
    span = Span("gather", HARMFUL[0], 0.0, 1e-3, HARMFUL, 5 * MIB)
    timeline = Timeline(HARMFUL[0], (span,), HARMFUL[:2], ((0.0, (1, 2)),))
    table = Table(HARMFUL[0], HARMFUL, (HARMFUL,))
    save_page(path, "".join(HARMFUL), "".join(HARMFUL), [timeline], [table])


def long_step():
    """Returns a step of 30,000 spans and as many memory samples."""
    draw = random.Random(0)
    spans = []
    now = 0.0
    for _ in range(25_000):
        start, now = now, now + draw.expovariate(1e5)
        spans.append(Span("compute", draw.choice(("mm", "add")), start, now))
    for i in range(5_000):
        start = now * i / 5_000
        names = tuple(f"layers.{i}.{part}.weight" for part in "abc")
        spans.append(Span(("gather", "reduce")[i % 2], "move", start, start + 1e-5, names, MIB))
    memory = tuple((now * i / 30_000, (MIB, draw.randrange(MIB))) for i in range(30_000))
    return Timeline("long", tuple(spans), ("shards", "gathered"), memory)


class _Elements(html.parser.HTMLParser):
    """Parses the tags of a page and the text of each element, by id or tag."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self._last = [], {}, None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._last = dict(attributes).get("id", tag)

    def handle_endtag(self, tag):
        self._last = None

    def handle_data(self, data):
        self.texts[self._last] = self.texts.get(self._last, "") + data


# ---- the file


def test_a_page_needs_nothing_else(tmp_path):
    path = tmp_path / "page.html"
    save_example(path)
    text = path.read_text(encoding="utf-8")
    elements = _Elements(text.replace(get_plotlyjs(), ""))
    assert len(elements.texts["pre"].splitlines()) == 2
    assert "model.layers.11.mlp.down_proj.weight" in elements.texts["td"]
    assert json.loads(elements.texts["drawing"]).keys() == {"data", "layout"}
    for tag, attributes in elements.tags:
        assert tag != "link"
        assert not {"src", "href"} & attributes.keys()
    assert "default-src 'none'" in text


def test_names_are_no_markup(tmp_path):
    path = tmp_path / "page.html"
    save_harmful(path)
    elements = _Elements(path.read_text(encoding="utf-8").replace(get_plotlyjs(), ""))
    tags = [tag for tag, _ in elements.tags]
    assert not {"a", "b", "i", "img"} & set(tags)
    assert tags.count("script") == 3
    assert elements.texts["h1"] == elements.texts["pre"] == "".join(HARMFUL)
    figure = json.loads(elements.texts["drawing"])
    bars, *curves = figure["data"]
    assert bars.pop("customdata") == ["\n".join(HARMFUL)]
    shown = json.dumps([bars, *curves]) + json.dumps(figure["layout"]["annotations"])
    assert "</script>" not in shown  # plotly has its own markup
    assert "&lt;/script&gt;" in shown


def test_without_plotly_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r'pip install "deepcompile_zero3\[report\]"'):
        save_page(tmp_path / "page.html", "", "", [], [])


def test_a_time_that_is_no_number_is_refused(tmp_path):
    path = tmp_path / "page.html"
    timeline = Timeline("", (Span("compute", "mm", 0.0, float("nan")),))
    with pytest.raises(ValueError, match="a number of seconds, got nan"):
        save_page(path, "", "", [timeline], [])
    assert not path.exists()


def test_numbers_stand_on_the_right(tmp_path):
    path = tmp_path / "page.html"
    save_page(path, "", "", [], [Table("sizes", ("fqn", "MiB"), (("a", 1234.5), ("b", 7)))])
    text = path.read_text(encoding="utf-8")
    assert "<th>fqn</th><th class='number'>MiB</th>" in text
    assert "<td>a</td><td class='number'>1,234.500</td>" in text
    assert "<td class='number'>7</td>" in text


def test_a_timeline_has_tables_of_its_collectives_waits_and_operators():
    waits = Span("waiting", "all_gather", 0.25, 0.5, ("a", "b"))
    operators = (Span("compute", "mm", start, start + 0.125) for start in (0.0, 0.125))
    collectives, waited, computed = tables_of(Timeline("", (waits, *operators)))
    assert collectives.rows == []
    assert waited.rows == [("all_gather", "a, b", 0.0, 250.0, 250.0)]
    assert computed.rows == [("mm", 2, 250.0)]


# ---- what is drawn


def test_each_lane_that_has_spans_is_drawn():
    spans = (
        Span("reduce", "reduce_scatter", 2e-3, 5e-3, ("a", "b"), 3 * MIB),
        Span("compute", "mm", 0.0, 2e-3),
        Span("compute", "add", 3e-3, 4e-3),
    )
    figure = draw([Timeline("predicted", spans), Timeline("measured", spans[1:2])])
    drawn = [(bars.y, bars.base, bars.x) for bars in figure.data]
    assert drawn == [
        (("compute", "compute"), (0.0, 3.0), (2.0, 1.0)),
        (("reduce",), (2.0,), (3.0,)),
        (("compute",), (0.0,), (2.0,)),
    ]
    assert figure.data[1].hovertext == (
        "reduce_scatter<br>3.000 ms, from 2.000 ms on<br>3.000 MiB<br>a<br>b",
    )
    assert figure.data[1].customdata == ("reduce_scatter\na\nb",)
    axes = [figure.layout.xaxis, figure.layout.xaxis2]
    assert [axis.range for axis in axes] == [(0, 5.0)] * 2
    assert axes[0].matches == "x2"


def test_memory_is_stacked_to_the_end_of_the_step():
    memory = ((0.0, (MIB, 0)), (1e-3, (MIB, 2 * MIB)))
    span = Span("compute", "mm", 0.0, 4e-3)
    figure = draw([Timeline("predicted", (span,), ("shards", "gathered"), memory)] * 2)
    curves = [trace for trace in figure.data if trace.type == "scatter"]
    first, second = curves[:2]
    assert (first.x, first.y) == ((0.0, 1.0, 4.0), (1.0, 1.0, 1.0))
    assert second.y == (0.0, 2.0, 2.0)
    assert [curve.showlegend for curve in curves] == [True, True, False, False]
    assert figure.layout.annotations[0].text.endswith(": 4.000 ms, at most 3.0 MiB")


def test_nothing_is_drawn_of_nothing():
    assert draw([]).data == draw([Timeline("", ())]).data == ()


def test_many_spans_are_few_bars_which_keep_the_names():
    timeline = long_step()
    lanes = draw([timeline]).data[:-2]
    for bars, lane in zip(lanes, ("compute", "gather", "reduce"), strict=True):
        spans = timeline.of(lane)
        assert len(bars.x) <= 5_000
        assert min(bars.base) == pytest.approx(spans[0].start * 1e3)
        assert bars.base[-1] + bars.x[-1] == pytest.approx(spans[-1].end * 1e3)
    names = {name for span in timeline.spans for name in (span.name, *span.parameters)}
    found = {name for bars in lanes for bar in bars.customdata for name in bar.split("\n")}
    assert found == names
    merged = next(text for text in lanes[0].hovertext if "mm, " in text)
    assert " of " in merged  # the busy part of the bar


def test_a_thinned_curve_keeps_its_peak_and_its_end():
    memory = [(i * 1e-6, (i % 7 * MIB,)) for i in range(30_000)]
    memory[12_345] = (12_345e-6, (100 * MIB,))
    memory[-1] = (1.0, (55 * MIB,))  # the earlier sample lasts most of the step
    (curve,) = draw([Timeline("", (), ("gathered",), tuple(memory))]).data
    assert len(curve.x) <= 5_001
    assert max(curve.y) == 100.0
    assert curve.y[-3:] == ((29_998 % 7), 55.0, 55.0)


def test_a_long_step_is_saved_soon(tmp_path):
    path = tmp_path / "page.html"
    began = time.monotonic()
    rows = tuple((f"layers.{i}.weight", i, i / 3) for i in range(5_000))
    save_page(path, "long", "", [long_step()] * 2, [Table("sizes", ("fqn", "a", "b"), rows)])
    assert time.monotonic() - began < 20
    assert path.stat().st_size - len(get_plotlyjs()) < 6e6


# ---- in a browser


@pytest.fixture(scope="module")
def driver():
    if missing := browser.missing():
        pytest.skip(f"{missing}: no page is opened")
    with browser.chromium() as driver:
        yield driver


@pytest.fixture
def opened(driver, tmp_path):
    """Returns ``opened(save)``, which shows the page of ``save`` in a browser without errors."""

    def open_page(save):
        path = tmp_path / "page.html"
        save(path)
        driver.get(path.as_uri())
        return driver

    yield open_page
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert driver.get_log("browser") == []


def _bars(driver):
    return driver.find_elements(By.CSS_SELECTOR, ".barlayer .point path")


def _colored(driver, color):
    """Returns the number of bars that are visible in a color."""
    script = """
        const style = document.body.appendChild(document.createElement("i")).style;
        style.color = arguments[0];
        return [...document.querySelectorAll(".barlayer .point path")]
          .filter(bar => bar.style.fill === style.color).length
    """
    return driver.execute_script(script, color)


def _hover(driver, element):
    ActionChains(driver).move_to_element(element).perform()
    label = (By.CSS_SELECTOR, ".hoverlayer .hovertext")
    found = WebDriverWait(driver, browser.LIMIT).until(lambda _: driver.find_elements(*label))
    return found[0].text


@pytest.mark.long
@in_browser
def test_a_search_finds_rows_and_bars(opened):
    driver = opened(save_example)
    labels = [label.text for label in driver.find_elements(By.CSS_SELECTOR, "#chart text")]
    assert [labels.count(lane) for lane in LANES] == [2, 2, 2, 2]
    spans = [span for timeline in EXAMPLE for span in timeline.spans]
    everything = f"144 rows, {len(spans):,} bars"
    assert driver.find_element(By.ID, "count").text == everything
    assert _colored(driver, FOUND) == 0
    bars = sum("model.layers.11.mlp.up_proj.weight" in span.parameters for span in spans)
    found = browser.search(driver, "LAYERS.11.mlp.up")
    assert found == f"3 of 144 rows, {bars} of {len(spans):,} bars"
    assert _colored(driver, FOUND) == bars > 0
    rows = driver.find_elements(By.CSS_SELECTOR, "tbody tr")
    shown = [row.text for row in rows if row.is_displayed()]
    assert len(shown) == 3
    assert all("model.layers.11.mlp.up_proj.weight" in row for row in shown)
    assert browser.search(driver, "no such name") == f"0 of 144 rows, 0 of {len(spans):,} bars"
    assert _colored(driver, FOUND) == 0
    assert browser.search(driver, "") == everything


@pytest.mark.more
@in_browser
def test_a_bar_says_what_it_is_and_timelines_zoom_together(opened):
    driver = opened(save_example)
    gather = driver.find_elements(By.CSS_SELECTOR, ".barlayer .trace")[1]
    bar = gather.find_elements(By.CSS_SELECTOR, ".point path")[5]
    text = _hover(driver, bar)
    assert "all_gather" in text
    assert "24.000 MiB" in text
    assert "model.layers.5.self_attn.q_proj.weight" in text
    ActionChains(driver).click_and_hold().move_by_offset(300, 0).release().perform()
    layout = "document.getElementById('chart')._fullLayout"
    script = f"return [{layout}.xaxis.range, {layout}.xaxis3.range]"
    WebDriverWait(driver, browser.LIMIT).until(lambda _: driver.execute_script(script)[0][0] > 0)
    first, second = driver.execute_script(script)
    assert first == second


@in_browser
def test_names_are_shown_as_they_are(opened):
    driver = opened(save_harmful)
    assert driver.title == driver.find_element(By.TAG_NAME, "h1").text == "".join(HARMFUL)
    assert not driver.find_elements(By.CSS_SELECTOR, "b, img, a, td i")
    cells = driver.find_elements(By.TAG_NAME, "td")
    assert tuple(cell.text for cell in cells) == HARMFUL
    text = _hover(driver, _bars(driver)[0])
    assert all(name in text for name in HARMFUL[:5])
    for name in HARMFUL:
        assert browser.search(driver, name) == "1 row, 1 bar"


@pytest.mark.more
@in_browser
def test_a_browser_copes_with_a_long_step(opened):
    rows = tuple((f"layers.{i}.a.weight", i) for i in range(5_000))

    def save(path):
        save_page(path, "long", "", [long_step()], [Table("sizes", ("fqn", "MiB"), rows)])

    driver = opened(save)
    began = time.monotonic()
    assert browser.search(driver, "layers.123.a").startswith("1 of 5,000 rows, 1 of ")
    assert time.monotonic() - began < 20
    assert _colored(driver, FOUND) == 1


@in_browser
def test_a_page_may_have_tables_only(opened):
    table = Table("sizes", ("fqn",), (("a",), ("b",)))
    driver = opened(lambda path: save_page(path, "t", "", [], [table]))
    assert driver.find_element(By.ID, "count").text == "2 rows"
    assert browser.search(driver, "b") == "1 of 2 rows"
