"""The report: its figures obey the laws of what they count, and in a real browser it draws them and lets one choose."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resultdirs import asked, edited_rows, edited_sweep, sweep_folder

from pdvsim.bench.results import load, records
from pdvsim.bench.stats import Interval, interval, paired_differences
from pdvsim.cli import main
from pdvsim.sim.core import KINDS
from pdvsim.sim.prices.profile import builtin
from pdvsim.sim.records import LANES
from pdvsim.view import report
from pdvsim.view.charts import histogram
from pdvsim.view.figure import new_figure
from pdvsim.view.report.document import build, difference
from pdvsim.view.report.sheet import Highlight, Sheet, page
from pdvsim.view.series import Steps, busy, bytes_per_s, in_flight, over_time, parts_of, queue, waiting
from pdvsim.view.table import TextTable

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ARCHS = ("pd", "pdv", "colocated")
HOSTILE = 'measured </script><img src=x onerror="document.title=1">&amp;'
PATIENCE_MS = 600_000  # with a browser on a busy machine
PARTS = ("rates", "latencies", "histogram", "breakdown", "timeline")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of three architectures; pdv is labelled overloaded at the higher load, the foundation is no friend."""
    target = sweep_folder(tmp_path_factory.mktemp("report") / "sweep", ARCHS)
    edited_rows(target, lambda row: row | {"foundation": HOSTILE, "stability": "stable"})
    points = asked(target)["points"]
    for point in points:
        if (point["arch"], point["load"]) == ("pdv", 400.0):
            edited_rows(target, lambda row: row | {"stability": "overloaded"}, point["key"])
    edited_sweep(target, points=points + [point | {"key": "0" * 16} for point in points[:3]])
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
        edges_s = parts_of(saved, 50)
        series = over_time(requests, launches, bandwidths, edges_s)
        bin_s = edges_s[1] - edges_s[0]
        span_s = 50 * bin_s
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
            assert series["busy"][lane].sum() * bin_s == pytest.approx((mine["end_s"] - mine["start_s"]).sum())
            assert 0 <= series["bandwidth"][lane].min() <= series["bandwidth"][lane].max() <= 1 + 1e-9
            assert series["bandwidth"][lane].sum() * bin_s * bandwidth == pytest.approx(mine["bytes"].sum())
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
    edges_s = parts_of(saved, 50)
    series = over_time(saved.requests, saved.launches, bandwidths, edges_s)
    span_s = edges_s[-1] - edges_s[0]
    for lane in ("prefill", "decode", "verify"):
        moved = row[f"lanes_{lane}_bandwidth_share"] * row["duration"]
        assert series["bandwidth"][lane].mean() * span_s == pytest.approx(moved)


def content(document: dict[str, Any], part: str) -> dict[str, Any]:
    """What a part shows, by choice."""
    [one] = [part_ for part_ in document["parts"] if part_["id"] == part]
    return dict(one["content"])


def test_histograms_hold_every_counted_request(document: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = content(document, "histogram")
    assert len(shown) == 4 * 2
    for what in shown.values():
        [chart] = what["charts"]
        assert {trace.name for trace in chart.traces} == set(ARCHS)
        for trace in chart.traces:
            assert sum(trace.y) == pytest.approx(100)
            assert np.all(np.diff(trace.x) > 0)
    [trace] = histogram("ttft", {"": ("", np.array([0.0, 1.0, 3.0, 4.0]))}, 2).traces
    assert list(trace.x) == pytest.approx([1.0, 2.0, 4.0])
    assert list(trace.y) == [50, 50, 0]  # what is beyond counts at the edge


def test_values_are_intervals_over_replications_and_pairs(folder: Path, document: dict[str, Any]) -> None:
    points = load([folder]).points
    for part, key, metric in (
        ("rates", "0|output_throughput", "output_throughput"),
        ("latencies", "0|ttft|p99", "p99_ttft_ms"),
    ):
        [chart] = content(document, part)[key]["charts"]
        for trace in chart.traces:
            for at, rate in enumerate((20.0, 400.0)):
                mine = points[(points["arch"] == trace.name) & (points["load"] == rate)]
                within = mine[f"{metric}_se"].tolist() if metric.startswith("p") else ()
                expected = interval(mine[metric].tolist(), within=within)
                assert [trace.y[at], trace.half[at]] == pytest.approx([expected.mean, expected.half_width])
                assert trace.hollow[at] is (trace.name == "pdv" and rate == 400.0)
    for key, what in content(document, "breakdown").items():
        ends = {bar.row: bar.end for bar in what["charts"][0].bars}
        for row, arch in enumerate(ARCHS):
            mine = points[(points["arch"] == arch) & (points["load"] == float(key.split()[-1]))]
            assert ends[row] == pytest.approx(mine["mean_e2el_ms"].mean())
    for against in ARCHS:
        for d in paired_differences(points, "p99_tpot_ms", against):
            table = content(document, "comparison")[f"0|request_rate {d['load']:g}|{against}"]["table"]
            [cells_] = [cells for name, _, cells in table["rows"] if name == "P99 TPOT (ms)"]
            _, text, kind = cells_[[name for name, _ in table["heads"]].index(d["arch"])]
            assert text == difference(d["relative"], -1, kind == "unsure")[0]
            assert text.startswith(f"{100 * d['relative'].mean:+.1f}%")


@pytest.mark.parametrize(
    ("relative", "shown"),
    [
        (Interval(0.1, 0.05, 3), ("+10.0% ±5.0", "better")),
        (Interval(-0.1, 0.05, 3), ("-10.0% ±5.0", "worse")),
        (Interval(0.1, 0.2, 3), ("+10.0% ±20.0", "unsure")),
        (Interval(0.1, math.nan, 1), ("+10.0%", "unsure")),
        (Interval(9.5, 1.0, 3), ("10.5×", "better")),
        (None, ("", "")),
    ],
)
def test_a_difference_counts_if_its_interval_excludes_nothing(relative: Interval, shown: tuple[str, str]) -> None:
    assert difference(relative, 1, False) == shown


def test_nothing_from_a_file_can_end_the_data_or_is_loaded_from_elsewhere(document: dict[str, Any]) -> None:
    text = page(document)
    head, _, rest = text.partition('<script type="application/json" id="data">')
    data = rest.partition("</script>")[0]
    assert "measured" in data
    assert not set("<>&") & set(data)
    assert "default-src 'none'" in head
    assert not re.search(r"https?://|\bimport\s*\(|<[^>]*\bsrc\s*=|@import|url\(", text.replace(data, ""))


def opened(browser: Browser, path: Path, mark: str = "#breakdown rect") -> Page:
    """A page opened from disk; whatever the browser complains of is kept."""
    shown = browser.new_page(viewport={"width": 1280, "height": 3000}, color_scheme="light")
    shown.set_default_timeout(PATIENCE_MS)
    shown.complaints = []  # type: ignore[attr-defined]
    shown.asked = []  # type: ignore[attr-defined]
    shown.on("console", lambda message: shown.complaints.append(f"{message.type}: {message.text}"))  # type: ignore[attr-defined]
    shown.on("pageerror", lambda error: shown.complaints.append(str(error)))  # type: ignore[attr-defined]
    shown.on("request", lambda request: shown.asked.append(request.url))  # type: ignore[attr-defined]
    shown.goto(path.as_uri())
    shown.wait_for_selector(mark)
    return shown


def test_without_records_nothing_of_them_is_shown(browser: Browser, tmp_path: Path) -> None:
    bare = sweep_folder(tmp_path / "bare", ("pd",), (20.0,), 1, detailed=False)
    assert main(["report", str(bare), "-o", str(tmp_path / "r.html")]) == 0
    shown = opened(browser, tmp_path / "r.html")
    boxes = shown.locator("section:visible h2").all_inner_texts()
    assert boxes == ["Rate", "Latency", "At one load", "Where a request's time goes", "Provenance"]
    assert "--save-detailed" in shown.locator("#provenance .note").inner_text()


@pytest.fixture(scope="module")
def shown(browser: Browser, folder: Path) -> Page:
    """The page as `pdvsim report` writes it."""
    path = folder.parent / "report.html"
    assert main(["report", str(folder), "-o", str(path)]) == 0
    return opened(browser, path)


def names(shown: Page, part: str) -> set[str]:
    return set(shown.locator(f"#{part} .legend > span").all_inner_texts()) | set(
        shown.locator(f"#{part} th").all_inner_texts()[1:]
    )


def test_the_page_opens_without_complaint_and_draws(shown: Page) -> None:
    for part in PARTS:
        marks = shown.locator(f"#{part} polyline, #{part} rect[data-text]")
        assert marks.count() >= 3, part
    assert {"not admitted", "draft", "verify", "prefill", "decode"} <= {n.strip() for n in names(shown, "timeline")}
    assert shown.complaints == []  # type: ignore[attr-defined]
    assert [url.partition(":")[0] for url in shown.asked if not url.startswith("data:")] == ["file"]  # type: ignore[attr-defined]


def test_what_comes_from_files_stays_text(shown: Page) -> None:
    assert shown.query_selector_all("img") == []
    assert HOSTILE in shown.inner_text("#rates .note")


def test_overloaded_points_are_marked_and_missing_ones_named(shown: Page) -> None:
    shown.select_option("#load", label="rate req/s 400")
    assert shown.locator("#latencies circle").count() == 6
    assert shown.locator("#latencies circle.hollow").count() == 1
    assert shown.locator("#comparison td.grew").all_inner_texts() == ["overloaded"]
    assert "queue kept growing" in shown.inner_text("#latencies .note")
    assert "sweep: 12 of 15 points" in shown.inner_text("#warning")


def test_controls_change_what_is_shown(shown: Page) -> None:
    before = shown.inner_html("#histogram .body"), shown.inner_text("#comparison tbody")
    shown.select_option("#load", label="rate req/s 20")
    assert shown.inner_html("#histogram .body") != before[0]
    assert shown.inner_text("#comparison tbody") != before[1]
    shown.uncheck("input[value=pdv]")
    for part in ("rates", "latencies", "histogram", "comparison"):
        assert {name.strip() for name in names(shown, part)} == {"pd", "colocated"}
    for arch in ARCHS:
        shown.uncheck(f"input[value={arch}]")
    for arch in ARCHS:
        shown.check(f"input[value={arch}]")  # what was unchecked comes back
    assert shown.locator("#rates polyline").count() == 3
    shown.select_option("#latency", "e2el")
    shown.select_option("#mark", "p95")  # not in the summary: from the records
    assert shown.inner_text("#latencies h3") == "P95 E2EL (ms)"
    shown.select_option("#rate", "request_throughput")
    assert shown.inner_text("#rates h3") == "Request throughput (req/s)"
    shown.locator("[data-group='more latencies']").dispatch_event("pointerdown")
    shown.get_by_text("P95 ITL (ms)").wait_for()
    shown.select_option("#watched", "colocated")
    assert "main" in {name.strip() for name in names(shown, "timeline")}
    assert shown.complaints == []  # type: ignore[attr-defined]


def test_a_curve_says_its_values_and_a_drag_zooms_all_of_a_part(shown: Page) -> None:
    box = shown.locator("#rates svg.plot").bounding_box()
    shown.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    assert all(arch in shown.inner_text("#tip") for arch in ARCHS)
    assert "2 replications" in shown.inner_text("#tip")
    charts = shown.locator("#timeline svg.plot")
    before = charts.all_text_contents()
    box = charts.nth(0).bounding_box()
    shown.mouse.move(box["x"] + 200, box["y"] + 60)
    shown.mouse.down()
    shown.mouse.move(box["x"] + 300, box["y"] + 60)
    shown.mouse.up()
    assert all(a != b for a, b in zip(before, charts.all_text_contents(), strict=True))
    charts.nth(0).dblclick()
    assert charts.all_text_contents() == before


def test_a_narrow_screen_can_be_read_and_a_dark_one_is_dark(shown: Page) -> None:
    """Charts keep their width, and no text is squeezed to a letter a line."""
    shown.set_viewport_size({"width": 400, "height": 3000})
    shown.wait_for_function(
        "() => [...document.querySelectorAll('svg.plot')].every(s => s.clientWidth > 250 && s.clientWidth < 400)"
    )
    assert shown.evaluate("() => document.documentElement.scrollWidth") <= 400
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = shown.evaluate(ground)
    shown.emulate_media(color_scheme="dark")
    assert shown.evaluate(ground) != light
    assert shown.complaints == []  # type: ignore[attr-defined]


def test_what_is_off_the_screen_is_not_drawn(browser: Browser, folder: Path, shown: Page) -> None:
    """Until it comes there."""
    shown.set_viewport_size({"width": 1280, "height": 300})
    shown.reload()
    shown.wait_for_selector("#rates polyline")
    assert shown.locator("#timeline polyline").count() == 0
    shown.locator("#timeline").scroll_into_view_if_needed()
    shown.wait_for_selector("#timeline polyline")


def test_levels_error_bars_and_the_setting_are_in_the_document(folder: Path) -> None:
    results = load([folder])
    points = results.points.assign(output_throughput_low=1.0, output_throughput_high=2.0)
    config = results.sources[0].config
    config = config | {"scoring": config["scoring"] | {"goodput": ("ttft:200", "tpot:30")}}
    document = build(replace(results, points=points, sources=(replace(results.sources[0], config=config),)))
    assert list(content(document, "latencies")["0|ttft|p99"]["charts"][0].levels) == [200.0]
    for trace in content(document, "rates")["0|output_throughput"]["charts"][0].traces:
        assert (list(trace.low), list(trace.high)) == ([1.0, 1.0], [2.0, 2.0])
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
    assert html.count("<script") == 2  # the page's own, and data without any
    assert not re.search(r"https?://|@import|url\(", html.replace(page_css(), ""))
    assert html.count("data:image/png;base64,") == 1


def page_css() -> str:
    return (Path(report.__file__).parent / "page.css").read_text(encoding="utf-8")


def test_a_run_has_the_same_page(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    argv = ["run", "--arch", "autoregressive", "--num-prompts", "6", "--input-len", "32", "--output-len", "8"]
    assert main([*argv, "--html", str(path)]) == 0
    page = opened(browser, path, "rect[data-text]")
    assert page.locator("polyline").count() >= 4  # two latencies, requests in the system and not admitted
    assert "Serving Benchmark Result" in page.inner_text("main")
    assert page.complaints == []  # type: ignore[attr-defined]
    assert main([*argv, "--no-detailed", "--html", str(path)]) == 2
