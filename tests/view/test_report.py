"""The report: its figures obey the laws of what they count, and in a real browser it draws them and lets one choose."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resultdirs import BASE, WARMUP, sweep_folder

from pdvsim.bench.results import load, records
from pdvsim.bench.stats import interval, paired_differences
from pdvsim.cli import main
from pdvsim.sim.core import KINDS
from pdvsim.sim.hardware.profile import builtin
from pdvsim.sim.records import LANES
from pdvsim.view import report
from pdvsim.view.figure import new_figure
from pdvsim.view.report import embedded, page
from pdvsim.view.report.document import build
from pdvsim.view.report.series import Steps, busy, bytes_per_s, in_flight, over_time, queue, waiting
from pdvsim.view.report.sheet import Highlight, Sheet, printed
from pdvsim.view.table import TextTable

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ARCHS = ("pd", "pdv", "colocated")
HOSTILE = 'measured </script><img src=x onerror="document.title=1">&amp;'
PATIENCE_MS = 600_000  # with a browser on a busy machine
CHARTS = ("throughput-chart", "latency-chart", "histogram-chart", "breakdown-chart", "timeline-chart")
COUNTED = BASE.traffic.num_prompts - WARMUP


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of three architectures; pdv is labelled overloaded at the higher load, the foundation is no friend."""
    target = sweep_folder(tmp_path_factory.mktemp("report") / "sweep", ARCHS, num_points=15)
    points = pd.read_parquet(target / "summary.parquet")
    points["stability"] = np.where((points["arch"] == "pdv") & (points["load"] == 400.0), "overloaded", "stable")
    points.assign(foundation=HOSTILE).to_parquet(target / "summary.parquet", index=False)
    return target


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    return build(load([folder]))


@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(-3, 3)), min_size=1, max_size=8), st.integers(1, 7), st.floats(1, 12)
)
def test_step_functions_are_averaged_by_area(changes: list[tuple[float, float]], bins: int, end_s: float) -> None:
    steps = Steps.summed(*(np.array(column) for column in zip(*changes, strict=True)))
    edges = np.linspace(0.0, end_s, bins + 1)
    for low, high, mean in zip(edges, edges[1:], steps.mean(edges), strict=False):
        area = sum(change * max(0.0, high - max(low, time)) for time, change in changes)
        assert mean == pytest.approx(area / (high - low), abs=1e-6)


def test_series_obey_the_laws_of_what_they_count(folder: Path) -> None:
    results = load([folder])
    for _, row in results.points.iterrows():
        saved = records(row)
        requests, launches = saved.requests, saved.launches
        for steps in (waiting(requests), in_flight(requests)):
            assert steps.values.min() >= 0
            assert steps.values[-1] == 0
        bandwidth, *_ = bandwidths = results.bandwidths_bytes_per_s(row)
        series = over_time(saved, bandwidths, bins=50)
        span_s = 50 * series["bin_s"]
        # Little's law: the mean number in the system is what the requests spent in it, over the time
        spent_s = (requests["finish_s"] - requests["arrival_s"]).sum()
        assert series["in_flight"].mean() * span_s == pytest.approx(spent_s)
        for code in np.unique(launches["lane"]):
            lane, mine = LANES[code], {k: v[launches["lane"] == code] for k, v in launches.items()}
            assert queue(mine).values.min() >= 0
            assert queue(mine).values[-1] == busy(mine).values[-1] == 0
            assert bytes_per_s(mine).values[-1] == pytest.approx(0, abs=1e-3 * bandwidth)
            assert 0 <= series["busy"][lane].min() <= series["busy"][lane].max() <= 1 + 1e-9
            # a lane is a stream, one launch at a time: nothing is lost or counted twice
            assert series["busy"][lane].sum() * series["bin_s"] == pytest.approx(
                (mine["end_s"] - mine["start_s"]).sum()
            )
            assert 0 <= series["bandwidth"][lane].min() <= series["bandwidth"][lane].max() <= 1 + 1e-9
            assert series["bandwidth"][lane].sum() * series["bin_s"] * bandwidth == pytest.approx(mine["bytes"].sum())
        drafted = launches["steps"][launches["kind"] == KINDS.index("draft")]
        assert np.nanmin(series["draft_length"]) >= drafted.min()
        assert np.nanmax(series["draft_length"]) <= drafted.max()


def test_bandwidth_over_time_is_that_of_the_run_on_unlike_cards(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    argv = ["run", "--arch", "pdv", "--place", "prefill=1", "verify=1", "--cards", "l4", "h200", "--no-band"]
    argv += ["--dataset-name", "random", "--num-prompts", "20", "--input-len", "64", "--output-len", "32"]
    assert main([*argv, "-o", str(path), "--save-detailed"]) == 0
    results = load([path])
    [(_, row)] = results.points.iterrows()
    saved, bandwidths = records(row), results.bandwidths_bytes_per_s(row)
    assert bandwidths == [builtin(card).gpu.bandwidth_bytes_per_s for card in ("l4", "h200")]
    assert saved is not None
    series = over_time(saved, bandwidths, bins=50)
    span_s = 50 * series["bin_s"]
    for lane in ("prefill", "decode", "verify"):
        moved = row[f"lanes_{lane}_bandwidth_share"] * row["duration"]
        assert series["bandwidth"][lane].mean() * span_s == pytest.approx(moved)


def test_histograms_hold_every_counted_request(document: dict[str, Any]) -> None:
    histograms = [h for h in document["histograms"] if h["metric"] in ("ttft", "tpot", "e2el")]
    assert len(histograms) == 3 * 2
    for histogram in histograms:
        assert set(histogram["counts"]) == set(ARCHS)
        assert {sum(counts) for counts in histogram["counts"].values()} == {2 * COUNTED}  # two replications
        assert np.all(np.diff(histogram["edges"]) > 0)


def test_entries_are_intervals_over_replications_and_pairs(folder: Path, document: dict[str, Any]) -> None:
    points = pd.read_parquet(folder / "summary.parquet")
    assert len(document["entries"]) == len(ARCHS) * 2
    for entry in document["entries"]:
        mine = points[(points["arch"] == entry["arch"]) & (points["load"] == float(entry["load"][1]))]
        for metric in ("output_throughput", "p99_ttft_ms", "mean_e2el_ms"):
            within = mine[f"{metric}_se"].tolist() if metric.startswith("p") else ()
            expected = interval(mine[metric].tolist(), within=within)
            close = [pytest.approx(v, rel=1e-4) for v in (expected.mean, expected.half_width)]
            assert entry["values"][metric] == [*close, 2]
        assert sum(entry["steps"].values()) == pytest.approx(entry["values"]["mean_e2el_ms"][0], rel=1e-3)
        assert entry["grew"] is (entry["arch"] == "pdv" and entry["load"][1] == "400")
    for against in ARCHS:
        for d in paired_differences(points, "p99_tpot_ms", against):
            [entry] = [e for e in document["entries"] if (e["arch"], float(e["load"][1])) == (d["arch"], d["load"])]
            shown = entry["against"][against]["p99_tpot_ms"]
            assert shown == [pytest.approx(v, rel=1e-4) for v in (d["relative"].mean, d["relative"].half_width)] + [2]


def test_nothing_from_a_file_can_end_the_data(document: dict[str, Any]) -> None:
    assert document["entries"][0]["foundation"] == HOSTILE
    assert not set("<>&") & set(embedded(document))


def test_nothing_is_loaded_from_elsewhere(document: dict[str, Any]) -> None:
    from plotly.offline import get_plotlyjs

    text = page(document).replace(get_plotlyjs(), "").replace(embedded(document), "")
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|\bimport\s*\(|src\s*=|@import|url\(", text)


def test_without_records_the_page_says_so(browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = sweep_folder(tmp_path / "bare", ("pd",), (20.0,), 1, detailed=False)
    assert main(["report", str(bare), "-o", str(tmp_path / "r.html")]) == 0
    assert "without --save-detailed" in capsys.readouterr().err
    opened = browser.new_page()
    opened.goto((tmp_path / "r.html").as_uri())
    opened.wait_for_selector("#breakdown-chart .bars")
    boxes = opened.locator("section:visible h2").all_inner_texts()
    assert boxes == ["Output throughput", "Latency", "At one load", "Where a request's time goes", "Provenance"]
    assert "--save-detailed" in opened.locator("#unrecorded").inner_text()
    assert opened.locator(".facts:visible").count() == 0  # folded until somebody asks
    document = build(load([bare]))
    assert document["histograms"] == []
    assert document["entries"][0]["series"] is None
    assert document["sources"][0]["provenance"]["host"] == "assumed"  # of the roofline, by the name of the profile


@pytest.fixture(scope="module")
def shown(browser: Browser, folder: Path) -> Page:
    """The page as `pdvsim report` writes it, opened from disk; whatever the browser complains of is kept."""
    path = folder.parent / "report.html"
    assert main(["report", str(folder), "-o", str(path)]) == 0
    opened = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    opened.set_default_timeout(PATIENCE_MS)
    opened.complaints = []  # type: ignore[attr-defined]
    opened.asked = []  # type: ignore[attr-defined]
    opened.on("console", lambda message: opened.complaints.append(f"{message.type}: {message.text}"))  # type: ignore[attr-defined]
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))  # type: ignore[attr-defined]
    opened.on("request", lambda request: opened.asked.append(request.url))  # type: ignore[attr-defined]
    opened.goto(path.as_uri())
    opened.wait_for_selector("#timeline-chart .scatterlayer .trace path")
    return opened


def traces(shown: Page, chart: str) -> list[dict[str, Any]]:
    """What a chart shows, as plotly holds it."""
    fields = "({name, x, y, customdata, marker}) => ({name, x, y, customdata, symbol: marker && marker.symbol})"
    drawn_traces: list[dict[str, Any]] = shown.evaluate(f"id => document.getElementById(id).data.map({fields})", chart)
    return drawn_traces


def cells(shown: Page) -> list[list[str]]:
    rows = shown.query_selector_all("#comparison tbody tr")
    return [[cell.inner_text().strip() for cell in row.query_selector_all("td")] for row in rows]


def test_the_page_opens_without_complaint_and_draws(shown: Page, document: dict[str, Any]) -> None:
    for chart in CHARTS:
        marks = shown.query_selector_all(f"#{chart} .scatterlayer .trace path, #{chart} .barlayer .point path")
        boxes = [box for mark in marks if (box := mark.bounding_box())]
        assert sum(box["width"] + box["height"] > 5 for box in boxes) >= 3, chart
    by_arch = {trace["name"]: trace["y"] for trace in traces(shown, "throughput-chart")}
    for arch in ARCHS:
        values = [e["values"]["output_throughput"][0] for e in document["entries"] if e["arch"] == arch]
        assert by_arch[arch] == values
    names = {trace["name"] for trace in traces(shown, "timeline-chart")}
    assert {"requests", "not admitted", "draft", "verify", "prefill", "decode"} <= names
    assert shown.complaints == []  # type: ignore[attr-defined]
    assert [url.partition(":")[0] for url in shown.asked if not url.startswith("data:")] == ["file"]  # type: ignore[attr-defined]


def test_what_comes_from_files_stays_text(shown: Page) -> None:
    assert shown.query_selector_all("img") == []
    assert shown.title() == "pdvsim report"
    assert HOSTILE in shown.inner_text("#lead")
    assert HOSTILE in shown.inner_text("#throughput-note")


def test_overloaded_points_are_marked(shown: Page) -> None:
    shown.select_option("#load", label="rate req/s 400")
    symbols = {trace["name"]: trace["symbol"] for trace in traces(shown, "latency-chart")}
    assert symbols == {"pd": ["circle"] * 2, "pdv": ["circle", "circle-open"], "colocated": ["circle"] * 2}
    assert [label.inner_text() for label in shown.query_selector_all(".label.grew")] == ["overloaded"]
    assert "1 of 6 points overloaded" in shown.inner_text("#latency-note")
    assert "2 replications" in shown.inner_text("#latency-note")


def test_a_sweep_that_lacks_points_says_so(shown: Page) -> None:
    assert "sweep: 12 of 15 points" in shown.inner_text("#incomplete")


def test_no_whisker_reaches_below_zero(shown: Page, document: dict[str, Any]) -> None:
    wide = [e["values"]["p99_ttft_ms"] for e in document["entries"]]
    assert any(half > mean for mean, half, _ in wide)  # two replications
    down = shown.evaluate("() => document.getElementById('latency-chart').data.map(t => [t.y, t.error_y.arrayminus])")
    assert all(minus <= mean for means, below in down for mean, minus in zip(means, below, strict=True))


def test_the_toolbar_hides_no_legend(shown: Page) -> None:
    for chart in CHARTS:
        shown.hover(f"#{chart}")
        lowest = max(box["y"] + box["height"] for box in boxes(shown, f"#{chart} .modebar-btn"))
        assert all(box["y"] >= lowest for box in boxes(shown, f"#{chart} .legend .traces")), chart


def boxes(shown: Page, selector: str) -> list[Any]:
    return [box for element in shown.query_selector_all(selector) if (box := element.bounding_box())]


def test_controls_change_what_is_shown(shown: Page) -> None:
    shown.select_option("#load", label="rate req/s 20")
    before = cells(shown)
    assert [row[0] for row in before] == list(ARCHS)
    assert all(sum(t["customdata"]) == 2 * COUNTED for t in traces(shown, "histogram-chart"))
    slow = traces(shown, "histogram-chart")
    shown.select_option("#load", label="rate req/s 400")
    assert cells(shown) != before
    assert traces(shown, "histogram-chart") != slow

    shown.uncheck("input[value=pdv]")
    assert [row[0] for row in cells(shown)] == ["pd", "colocated"]
    for chart in ("throughput-chart", "latency-chart", "histogram-chart"):
        assert {trace["name"] for trace in traces(shown, chart)} == {"pd", "colocated"}
    shown.check("input[value=pdv]")
    assert len(traces(shown, "throughput-chart")) == 3

    shown.select_option("#latency", "e2el")
    shown.select_option("#mark", "p95")  # not in the summary: from the records
    assert shown.text_content("#latency-chart .ytitle") == "P95 E2EL (ms)"
    assert "p95 E2EL (ms)" in shown.inner_text("#comparison thead")
    shown.select_option("#rate", "request_throughput")
    assert shown.text_content("#throughput-chart .ytitle") == "Request throughput (req/s)"
    assert shown.inner_text("#rate-title") == "Request throughput"

    shown.select_option("#against", "colocated")
    assert "vs colocated" in shown.inner_text("#comparison thead")
    assert [row[3] for row in cells(shown)][2] == "reference"

    shown.select_option("#watched", "colocated")
    assert [trace["name"] for trace in traces(shown, "timeline-chart")].count("main") == 3
    assert shown.complaints == []  # type: ignore[attr-defined]


def test_what_was_unchecked_comes_back(shown: Page) -> None:
    boxes_ = [f"input[value={arch}]" for arch in ARCHS]
    for box in boxes_:
        shown.uncheck(box)
    for chart in ("throughput-chart", "latency-chart", "breakdown-chart"):
        assert "No data" in shown.inner_text(f"#{chart}")
    for box in boxes_:
        shown.check(box)
    for chart in CHARTS:
        assert not re.search("No data|No records", shown.inner_text(f"#{chart}"))
        assert shown.query_selector(f"#{chart} .main-svg")
    assert shown.complaints == []  # type: ignore[attr-defined]


def test_a_narrow_screen_can_be_read(shown: Page) -> None:
    """Charts keep their width, and no text is squeezed to a letter a line."""
    shown.set_viewport_size({"width": 400, "height": 800})
    shown.wait_for_function("() => document.querySelector('#throughput-chart .main-svg').clientWidth < 400")
    for chart in CHARTS:
        wide = "id => document.getElementById(id)._fullLayout._size.w > 200"  # the frame without its margins
        shown.wait_for_function(wide, arg=chart)
    shown.evaluate("() => document.querySelectorAll('details').forEach(d => { d.open = true; })")
    widths = shown.evaluate("() => [...document.querySelectorAll('.facts dd')].map(d => d.clientWidth)")
    assert min(widths) > 250
    assert shown.evaluate("() => document.documentElement.scrollWidth") <= 400
    shown.set_viewport_size({"width": 1280, "height": 900})


def test_axes_have_ticks(shown: Page) -> None:
    """More than one on a logarithmic axis, and none on another."""
    shown.select_option("#latency", "ttft")
    shown.select_option("#mark", "p99")
    for chart, ticks in (("latency-chart", ".ytick text"), ("histogram-chart", ".xtick text")):
        placed = sorted((box["x"], box["y"], box["width"], box["height"]) for box in boxes(shown, f"#{chart} {ticks}"))
        assert len(placed) >= 2
        apart = (a[0] + a[2] <= b[0] or abs(a[1] - b[1]) >= 0.8 * min(a[3], b[3]) for a, b in pairwise(placed))
        assert all(apart), chart


def test_levels_error_bars_and_the_setting_are_in_the_document(folder: Path) -> None:
    results = load([folder])
    points = results.points.assign(output_throughput_low=1.0, output_throughput_high=2.0)
    config = results.sources[0].config.model_copy(deep=True)
    config.scoring["goodput"] = ["ttft:200", "tpot:30"]
    document = build(replace(results, points=points, sources=(replace(results.sources[0], config=config),)))
    assert document["levels"] == {"ttft": [200.0], "tpot": [30.0]}
    assert all(entry["bands"]["output_throughput"] == [1.0, 2.0] for entry in document["entries"])
    assert all(entry["drafts"] for entry in document["entries"])
    assert str(points["pair"].iloc[0]) in document["lead"]


def test_a_sheet_holds_text_as_text_and_loads_nothing() -> None:
    figure = new_figure(4, 3, "a caption")
    parts = [
        f"one\n\n{HOSTILE}",
        HOSTILE,
        TextTable([{HOSTILE: HOSTILE}]),
        Highlight([HOSTILE, HOSTILE], {HOSTILE: HOSTILE}),
    ]
    facts = {"a": HOSTILE, "b": {HOSTILE: [1, 2]}}
    html = Sheet(HOSTILE, HOSTILE, [(HOSTILE, parts)], {"other": figure}, facts).html()
    assert "default-src 'none'" in html
    assert "<img src=x" not in html
    assert "<script" not in html
    assert not re.search(r"https?://|@import|url\(", html.replace(page_css(), ""))
    assert html.count("data:image/png;base64,") == 1


def test_what_is_printed_keeps_its_columns_and_wraps_its_lines() -> None:
    html = printed("Title\n-----\na long line\n\narch  k\n-------\npdv   2\npd    3\nunder <it>")
    parts = ["<h3>Title</h3>", '<pre class="wrap">a long line</pre>', "<pre>arch  k\n-------\npdv   2\npd    3</pre>"]
    assert html == "".join([*parts, '<pre class="wrap">under &lt;it&gt;</pre>'])


def page_css() -> str:
    return (Path(report.__file__).parent / "page.css").read_text(encoding="utf-8")


def test_a_run_has_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.html"
    argv = ["run", "--arch", "autoregressive", "--num-prompts", "6", "--input-len", "32", "--output-len", "8"]
    assert main([*argv, "--goodput", "ttft:500", "--html", str(path)]) == 0
    html = path.read_text(encoding="utf-8")
    assert "autoregressive: 6 requests served" in html
    assert "no drafts, all sent at time 0, seed 0" in html
    assert "Serving Benchmark Result" in html
    capsys.readouterr()
    assert main([*argv, "--no-detailed", "--html", str(path)]) == 2
    assert "--html need" in capsys.readouterr().err


def test_the_page_follows_a_dark_desktop(shown: Page) -> None:
    ground = (
        "() => getComputedStyle(document.body).backgroundColor + document.querySelector('.main-svg').style.background"
    )
    light = shown.evaluate(ground)
    shown.emulate_media(color_scheme="dark")
    shown.wait_for_function(f"light => ({ground})() !== light", arg=light)
    assert shown.complaints == []  # type: ignore[attr-defined]
