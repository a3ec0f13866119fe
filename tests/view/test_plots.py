"""Pictures: their figures are those of the statistics, and no insignificant difference is shown as significant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from resultdirs import sweep_folder

from pdvsim.bench.results import GROUPS, Results, Source
from pdvsim.bench.stats import over_replications, paired_differences
from pdvsim.cli import main
from pdvsim.sim.policies import ARCHS
from pdvsim.view.differences import forest_figure, gains_of, improvement_figure
from pdvsim.view.plots import THROUGHPUT, Layout, custom_figure, latency_rows, metrics_figure, standing, sweep_figure
from pdvsim.view.style import ARCH_COLOURS, ARCH_MARKERS, KIND_COLOURS, LANE_COLOURS, STEP_COLOURS, tail

SOURCE = Source("made-up", Path("."), "", "0", {group: {} for group in GROUPS}, (), None)


def made_up(
    pairs: tuple[str, ...] = ("a:b",),
    seeds: int = 3,
    gain: float = 0.1,
    noise: float = 0.0,
    stability: str = "stable",
) -> Results:
    """pdv is `gain` better than pd, but for noise that differs from seed to seed; colocated is the same as pd."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        for load in (1.0, 2.0, 4.0):
            for seed in range(seeds):
                base = 100 * load * (1 + 0.3 * rng.standard_normal())
                for arch, more in (("pd", 0.0), ("pdv", gain), ("colocated", 0.0)):
                    row = {"source": 0, "arch": arch, "pair": pair, "load_kind": "concurrency", "load": load}
                    row |= {"run": seed, "seed": seed, "profile": "p", "foundation": "made up"}
                    value = base * (1 + more + (noise * rng.standard_normal() if arch != "pd" else 0.0))
                    row |= {"output_throughput": value, "request_throughput": value / 10, "stability": stability}
                    row |= {f"{m}_{t}_ms": 1000 / value for m in ("mean", "p99") for t in ("ttft", "tpot", "e2el")}
                    rows.append(row)
    return Results(pd.DataFrame(rows), (SOURCE,), ("pair",) if len(pairs) > 1 else ())


@pytest.mark.parametrize("pairs", [("a:b",), ("a:b", "c:d")])
def test_the_heatmap_shows_paired_differences_and_hatches_what_proves_nothing(pairs: tuple[str, ...]) -> None:
    results = made_up(pairs, noise=0.05)
    gains = gains_of(results, "output_throughput", "pd")
    assert len(gains) == len(pairs) * 3 * 2
    for setting, points in results.settings():
        for d in paired_differences(points, "output_throughput", "pd"):
            of = (setting.get("pair", ""), d["arch"], d["load"])
            [cell] = [c for c in gains if (c.setting, c.arch, c.load) == of]
            low, high = d["relative"].ends
            assert cell.relative == d["relative"]
            assert cell.significant is (low > 0 or high < 0)
    unsure = [cell for cell in gains if not cell.significant]
    assert 0 < len(unsure) < len(gains)
    figure = improvement_figure(results, "output_throughput", "pd")
    panels = figure.axes
    assert len(panels) == len(pairs)
    assert sorted(t.get_text() for axes in panels for t in axes.texts) == sorted(cell.text for cell in gains)
    assert sum(patch.get_hatch() is not None for axes in panels for patch in axes.patches) == len(unsure)
    assert "interval includes 0" in figure.get_supxlabel().replace("\n", " ")


def test_every_kind_of_load_has_its_own_heatmap() -> None:
    """A concurrency and a rate of the same number are no column in common."""
    one = made_up()
    rates = one.points.assign(load_kind="request_rate", load=2 * one.points["load"])
    results = Results(pd.concat([one.points, rates], ignore_index=True), one.sources, ())
    heatmaps = {name: figure for name, figure in standing(results, "output_throughput", "pd") if "improve" in name}
    names = {name: figure.axes[0].get_xlabel() for name, figure in heatmaps.items()}
    assert names == {
        "improvement-output-throughput-by-concurrency": "Concurrent requests",
        "improvement-output-throughput-by-request-rate": "Request rate (req/s)",
    }
    ticks = [[t.get_text() for t in figure.axes[0].get_xticklabels()] for figure in heatmaps.values()]
    assert ticks == [["1", "2", "4"], ["2", "4", "8"]]


def test_one_replication_claims_nothing() -> None:
    results = made_up(seeds=1, gain=5.0)
    assert not any(cell.significant for cell in gains_of(results, "output_throughput", "pd"))
    figure = improvement_figure(results, "output_throughput", "pd")
    assert "no significance" in figure.get_supxlabel().replace("\n", " ")
    curves = metrics_figure(results.points, THROUGHPUT)
    assert not any(axes.collections for axes in curves.axes)  # no band
    assert "no significance" in curves.get_supxlabel().replace("\n", " ")


def test_the_error_bars_of_predicted_times_are_within_the_frame() -> None:
    points = made_up().points.assign(forward_error_bar=0.5)
    for metric in ("output_throughput", "mean_tpot_ms"):
        points = points.assign(**{f"{metric}_low": points[metric] / 2, f"{metric}_high": points[metric] * 2})
    for axes in sweep_figure(points).axes:
        highest = max((c.get_datalim(axes.transData).y1 for c in axes.collections if c.get_hatch()), default=0.0)
        assert axes.get_ylim()[1] > highest
        assert bool(highest) is (axes.get_title(loc="left") in ("Output token throughput", "Mean TPOT"))


@pytest.mark.parametrize(("stability", "marked"), [("stable", False), ("overloaded", True), ("inconclusive", False)])
def test_points_whose_queue_grew_are_hollow_with_a_note(stability: str, marked: bool) -> None:
    results = made_up(stability=stability)
    figure = metrics_figure(results.points, latency_rows(results.points))
    markers = [line for axes in figure.axes for line in axes.lines if line.get_marker() not in ("None", "")]
    visible = [line for line in markers if len(line.get_xdata())]
    assert visible
    assert all((line.get_markerfacecolor() == "white") is marked for line in visible)
    assert ("kept growing" in figure.get_supxlabel()) is marked
    assert all(cell.text.endswith("†") is marked for cell in gains_of(results, "mean_ttft_ms", "pd"))


def test_settings_in_one_picture_have_panels_of_their_own() -> None:
    """As in the picture of a sweep: never one line through the points of two models."""
    results = made_up(("a:b", "c:d"))
    figure = sweep_figure(results.points)
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == [
        "pair a:b\nOutput token throughput",
        "pair c:d\nOutput token throughput",
    ]
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_linestyle() == "-"]
        assert len(lines) == 3
        assert all(len(line.get_xdata()) == 3 for line in lines)  # three loads
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"pd", "pdv", "colocated"}
    tops = {axes.get_ylim() for axes in figure.axes[:2]}
    assert len(tops) == 1  # panels of one metric have one scale


def test_settings_of_one_architecture_keep_its_colour() -> None:
    points = made_up(("a:b", "c:d")).points.query("arch == 'pdv'")
    colours = {to_hex(line.get_color()) for line in sweep_figure(points).axes[0].lines}
    assert ARCH_COLOURS["pdv"] in colours
    assert not colours & (set(ARCH_COLOURS.values()) - {ARCH_COLOURS["pdv"]})


def test_acceptance_is_that_of_architectures_with_drafts() -> None:
    points = made_up().points.assign(spec_decode_acceptance_rate=40.0, spec_decode_acceptance_length=2.0)
    points.loc[points["arch"] == "pd", "spec_decode_acceptance_rate"] = np.nan
    [figure] = [f for name, f in standing(Results(points, (SOURCE,), ()), None, "none") if name == "acceptance"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["pdv", "colocated"]
    undrafted = Results(points.assign(spec_decode_acceptance_rate=np.nan), (SOURCE,), ())
    assert "acceptance" not in dict(standing(undrafted, None, "none"))


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=2, max_size=2, unique=True))
def test_no_two_gains_of_a_heatmap_look_alike(steps: list[int]) -> None:
    """Down to a percent, and as far as the scale goes, where one is an eighth more than the other."""
    gains = [0.011 * 1.118**step for step in steps]
    results = made_up(gain=gains[0])
    points = results.points.copy()
    theirs = points["arch"] == "colocated"
    points.loc[theirs, "output_throughput"] *= 1 + gains[1]
    figure = improvement_figure(Results(points, results.sources, ()), "output_throughput", "pd")
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    colours = {rows[round(cell.get_y() + 0.5)]: cell.get_facecolor() for cell in figure.axes[0].patches}
    reds = [colours[arch][0] for arch in ("pdv", "colocated")]  # blue of more, in less white
    assert (reds[0] > reds[1]) is (gains[0] < gains[1])


def test_every_architecture_has_its_own_look() -> None:
    assert set(ARCH_COLOURS) == set(ARCH_MARKERS) == set(ARCHS)
    assert len(set(ARCH_COLOURS.values())) == len(set(ARCH_MARKERS.values())) == len(ARCHS)
    assert tail(pd.DataFrame(columns=["p9_ttft_ms", "p99.9_ttft_ms", "p99_ttft_ms"])) == "p99.9"


def test_no_lane_launch_or_step_looks_like_an_architecture_or_another() -> None:
    """By the distance of colours in CIELAB, where 2 can just be seen."""

    def lab(colour: str) -> np.ndarray:
        rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        rgb = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
        f = np.cbrt(xyz / (0.9505, 1.0, 1.0888))
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    for colours in (LANE_COLOURS, KIND_COLOURS, STEP_COLOURS):
        own = list(colours.values())
        for at, colour in enumerate(own):
            for other in (*ARCH_COLOURS.values(), *own[:at]):
                assert np.linalg.norm(lab(colour) - lab(other)) > 20, (colour, other)
    assert LANE_COLOURS["verify"] == KIND_COLOURS["verify"] == STEP_COLOURS["verify"]


def test_a_picture_of_ones_own() -> None:
    results = made_up(("a:b", "c:d"))
    figure = custom_figure(results, Layout(y="mean_ttft_ms", column="pair"))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["pair a:b\nMean TTFT", "pair c:d\nMean TTFT"]
    over_metric = custom_figure(results, Layout(x="output_throughput", y="mean_ttft_ms", row="pair"))
    xs, ys = over_metric.axes[0].lines[0].get_data()
    mine = results.points.query("arch == 'pd' and pair == 'a:b'").groupby("load")[["output_throughput", "mean_ttft_ms"]]
    assert list(xs) == pytest.approx(mine.mean()["output_throughput"].tolist())
    assert list(ys) == pytest.approx(mine.mean()["mean_ttft_ms"].tolist())


@pytest.mark.parametrize(
    ("axis", "says"),
    [
        (Layout(), "differ in pair"),  # its band would mix two models
        (Layout(x="pair"), "differ in load"),
        (Layout(y="mean_tttt_ms"), "--var-y mean_tttt_ms: no such column; did you mean mean_ttft_ms?"),
        (Layout(curve="output_throughput"), "--curve-by output_throughput: no such column"),
        (Layout(x="output_throughput", y="output_throughput"), "both output_throughput"),
    ],
)
def test_what_would_mix_points_is_refused(axis: Layout, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        custom_figure(made_up(("a:b", "c:d")), axis)


def test_the_command_saves_what_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep_folder(tmp_path / "s", seeds=1, rates=(50.0,), detailed=False)
    assert main(["plot", str(folder), "--format", "svg", "--against", "pdv"]) == 0
    names = sorted(path.name for path in (folder / "plots").iterdir())
    assert names == [
        "acceptance.svg", "improvement-mean-e2el.svg", "latency.svg", "throughput.svg", "utilisation.svg"
    ]  # fmt: skip
    for argv, says in (
        (["--against", "pdx"], "not in the results, which have pd, pdv"),
        (["--metric", "m"], "--metric m"),
    ):
        assert main(["plot", str(folder), *argv, "-o", str(tmp_path / "none")]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("counts", [True, False])
def test_a_forest_draws_paired_differences(counts: bool) -> None:
    """Their intervals are of the differences, a mark is filled where one counts, and what was accepted is named."""
    points = made_up(noise=0.01).points.assign(gpu="g", spec_decode_acceptance_rate=40.0, settings="k=2, batch 128")
    points.loc[points["arch"] == "pd", "spec_decode_acceptance_rate"] = float("nan")  # it drafts nothing
    entries = [entry | {"place": "here"} for entry in over_replications(points)]
    paired = [d | {"place": "here"} for d in paired_differences(points, "output_throughput", "pd")]
    with_errors = [d | {"significant": counts, "error": 0.035} for d in paired]
    axes = forest_figure(entries, with_errors, "").axes[0]
    first = {d["arch"]: d["relative"] for d in paired if d["load"] == 1.0}
    rows = [label.get_text() for label in axes.get_yticklabels()]
    bars = [bar for bar in axes.patches if to_hex(bar.get_facecolor()) in ARCH_COLOURS.values()]
    assert [bar.get_width() for bar in bars] == pytest.approx([100 * first[arch].mean for arch in ("pdv", "colocated")])
    halves = [segments[0][1][0] - segments[0][0][0] for c in axes.collections if (segments := c.get_segments())]
    assert halves == pytest.approx([200 * d.half_width for d in first.values()])
    assert all((bar.get_hatch() is None) is counts for bar in bars)
    assert rows[0] == "here: accepted 40% of drafted"
    assert [row.split()[0] for row in rows[1:]] == ["pd", "pdv", "colocated"]
    assert all(row.endswith(" k=2") for row in rows[1:])
