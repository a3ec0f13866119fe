"""Frontiers of a sweep: the points that nothing beats, against brute force; who is dominated is so beyond doubt."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.bench.results import load
from pdvsim.cli import main
from pdvsim.decide.error import lead_error
from pdvsim.decide.frontier import Frontier, find_frontier, frontier_figure, leads, pareto
from pdvsim.decide.race import exceeds
from pdvsim.sim.config import Experiment

coordinates = st.integers(0, 6).map(float) | st.floats(0, 10)


def swept(folder: Path, *flags: str) -> Path:
    small = "--dataset-name random --num-prompts 20 --input-len 600 --output-len 8 --jobs 1"
    argv = ["sweep", *small.split(), "--vary", "max-num-batched-tokens=128,1024", *flags, "-o", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdvsim.view.plots.sweep_png", lambda points, base: b"")  # tested elsewhere
        assert main(argv) == 0
    return folder


@pytest.fixture(scope="module")
def frontier(tmp_path_factory: pytest.TempPathFactory) -> Frontier:
    flags = ("--arch", "autoregressive,pd", "--request-rate", "4", "--num-runs", "5", "--goodput", "ttft:30")
    return find_frontier(load([str(swept(tmp_path_factory.mktemp("sweeps") / "chunks", *flags))]).points)


@given(st.lists(st.tuples(coordinates, coordinates), max_size=30))
def test_the_set_is_that_of_brute_force(points: list[tuple[float, float]]) -> None:
    free = {
        at for at, (x, y) in enumerate(points) if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    }
    best = pareto(points)
    assert set(best) == free
    assert len(best) == len(free)
    stair = [points[at] for at in best]
    assert stair == sorted(stair)
    assert [y for _, y in stair] == sorted((y for _, y in stair), reverse=True)


def test_the_better_in_both_beyond_the_errors_dominates() -> None:
    def dominates(*both: tuple[list[float], list[float]]) -> bool:
        return all(map(exceeds, leads(*both, 0.95), (0.18, 0.036)))

    x, y = [100.0, 110, 90, 105, 95], [10.0, 11, 9, 10.5, 9.5]
    far = [0.5 * figure for figure in x], [0.9 * figure for figure in y]
    assert [lead.mean for lead in leads(far, (x, y), 0.95)] == pytest.approx([0.5, 0.1])
    assert dominates(far, (x, y))
    assert not dominates((far[0], [0.97 * figure for figure in y]), (x, y))
    assert not dominates((far[0][:4], far[1][:4]), (x[:4], y[:4]))
    torn = ([50.0, 50, 50, 50, 50], [1.0, 30, 1, 30, 1])  # the mean is lower by far, but the seeds disagree
    assert not dominates(torn, ([100.0] * 5, [20.0] * 5))


def test_figures_and_verdicts_are_those_of_the_runs(frontier: Frontier) -> None:
    means = frontier.runs.groupby(["arch", "max_num_batched_tokens"])[[frontier.x, frontier.y]].mean()
    figures = {point: tuple(means.loc[(point.arch, *point.values)]) for point in frontier.points}
    assert len(figures) == 4
    for point, (x, y) in figures.items():
        assert (point.x.mean, point.y.mean) == pytest.approx((x, y))
        beaten = any(a <= x and b <= y and (a, b) != (x, y) for a, b in figures.values())
        assert (point.verdict == "frontier") != beaten
        if point.by:
            a, b = next(mine for other, mine in figures.items() if other.name == point.by)
            assert a < (1 - lead_error(Experiment(), frontier.x)) * x
            assert b < (1 - lead_error(Experiment(), frontier.y)) * y
    assert [p.x.mean for p in frontier.points] == sorted(p.x.mean for p in frontier.points)


def test_the_picture_has_a_marker_a_point_and_the_level(frontier: Frontier) -> None:
    config = {"traffic": {}, "server": {}, "acceptance": {}, "scoring": {"goodput": ["ttft:30"]}}
    figure = frontier_figure(frontier, [config])
    (axes,) = figure.axes
    assert len(axes.containers) == len(frontier.points)
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["frontier", *(point.name for point in frontier.shown)]
    assert [line for line in axes.lines if line.get_linestyle() == "--" and set(line.get_xdata()) == {30.0}]


def test_the_command_prints_and_draws_who_keeps_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server of one row that is overrun has no point on the frontier, and two seeds would dominate nothing."""
    flags = ("--arch", "pd", "--request-rate", "300", "--num-runs", "2", "--max-num-seqs", "1")
    folder = swept(tmp_path / "few", *flags)
    assert main(["plot", str(folder), "--frontier", "--var-y", "p99-itl-ms"]) == 0
    out = capsys.readouterr().out
    assert "none keeps up" in out
    assert "at least 5" in out
    assert (folder / "plots" / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(folder), "--frontier", "--var-y", "p7-itl-ms"]) == 2
    assert "p7_itl_ms" in capsys.readouterr().err
    assert main(["plot", str(folder), "--frontier", "--row-by", "arch"]) == 2
    both = swept(tmp_path / "loads", "--arch", "pd", "--concurrency", "1,2")
    assert main(["plot", str(both), "--frontier"]) == 2
    assert "one load" in capsys.readouterr().err
