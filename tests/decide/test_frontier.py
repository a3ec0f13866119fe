"""Frontiers: the points that nothing beats, against brute force; who is dominated must be so beyond all doubt."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdvsim
from pdvsim.cli import main
from pdvsim.cli.build import build
from pdvsim.cli.frontier import FrontierOptions
from pdvsim.decide import runs as runs_module
from pdvsim.decide.contest import exceeds
from pdvsim.decide.error import lead_error
from pdvsim.decide.formula import Formula
from pdvsim.decide.frontier import Frontier, FrontierQuestion, draw_frontier, leads, pareto
from pdvsim.decide.frontier_figure import frontier_figure
from pdvsim.decide.runs import Bench
from pdvsim.sim.config import Experiment
from pdvsim.study.sweep import SweepInterrupted

SMALL = {
    "arch": ("autoregressive", "pd"), "dataset_name": "random", "num_prompts": 20, "input_len": 600, "output_len": 8,
    "max_num_batched_tokens": (128, 1024), "jobs": 1,
}  # fmt: skip
FLAGS = [
    f"--{name.replace('_', '-')}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for name, v in SMALL.items()
]
Figures = tuple[list[float], list[float]]
COMMAND = ["frontier", *FLAGS, "--request-rate", "4", "--num-runs", "2"]


def asked(**more: object) -> FrontierQuestion:
    return build(FrontierOptions, SMALL | {"request_rate": 4.0} | more).question()


def drawn(**more: object) -> Frontier:
    return draw_frontier(asked(**more), Bench(1))


# ---- the set ---------------------------------------------------------------------------------------------------------

coordinates = st.integers(0, 6).map(float) | st.floats(0, 10)


@given(st.lists(st.tuples(coordinates, coordinates), max_size=30))
def test_the_set_is_that_of_brute_force(points: list[tuple[float, float]]) -> None:
    free = {
        at for at, (x, y) in enumerate(points) if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    }
    found = pareto(points)
    assert set(found) == free
    assert len(found) == len(free)
    stair = [points[at] for at in found]
    assert stair == sorted(stair)
    assert [y for _, y in stair] == sorted((y for _, y in stair), reverse=True)


def dominates(mine: Figures, theirs: Figures) -> bool:
    return all(map(exceeds, leads(mine, theirs, 0.95), (0.18, 0.036)))


def test_the_better_in_both_beyond_the_errors_dominates() -> None:
    x, y = [100.0, 110, 90, 105, 95], [10.0, 11, 9, 10.5, 9.5]
    far = [0.5 * figure for figure in x], [0.9 * figure for figure in y]
    assert [lead.mean for lead in leads(far, (x, y), 0.95)] == pytest.approx([0.5, 0.1])
    assert dominates(far, (x, y))
    assert not dominates((far[0], [0.97 * figure for figure in y]), (x, y))
    assert not dominates((far[0][:4], far[1][:4]), (x[:4], y[:4]))
    torn = ([50.0, 50, 50, 50, 50], [1.0, 30, 1, 30, 1])  # the mean is lower by far, but the seeds disagree
    assert not dominates(torn, ([100.0] * 5, [20.0] * 5))


# ---- points ----------------------------------------------------------------------------------------------------------


def test_every_architecture_runs_every_chunk_at_the_draft_length_of_the_formula() -> None:
    question = asked(arch=("colocated", "pd"))
    candidates = question.candidates
    assert [(c.arch, c.server.max_num_batched_tokens) for c in candidates] == [
        ("colocated", 128), ("colocated", 1024), ("pd", 128), ("pd", 1024),
    ]  # fmt: skip
    for candidate in candidates:
        assert candidate.server.num_speculative_tokens == Formula(candidate).ranked(range(9))[0].k
    assert {c.server.num_speculative_tokens for c in asked(num_speculative_tokens=3).candidates} == {3}


def test_the_figures_and_verdicts_are_those_of_the_runs() -> None:
    found = drawn(num_runs=5, x="p99_ttft", y="p99_itl", goodput=["ttft:40", "tpot:9"])
    means = found.runs.groupby(["arch", "max_num_batched_tokens"])[["p99_ttft_ms", "p99_itl_ms"]].mean()
    assert len(means) == len(found.points) == 4
    figures = {p: tuple(means.loc[(p.candidate.arch, p.chunk)]) for p in found.points}
    for point, (x, y) in figures.items():
        assert (point.x.mean, point.y.mean) == pytest.approx((x, y))
        beaten = any(a <= x and b <= y and (a, b) != (x, y) for a, b in figures.values())
        assert (point.verdict == "frontier") != beaten
        if point.by is not None:
            a, b = means.loc[(point.by.arch, point.by.server.max_num_batched_tokens)]
            assert a < (1 - lead_error(Experiment(), "p99_ttft_ms")) * x
            assert b < (1 - lead_error(Experiment(), "p99_itl_ms")) * y
    assert [p.x.mean for p in found.points] == sorted(p.x.mean for p in found.points)
    counts = [f"{lead_error(Experiment(), f'p99_{name}_ms'):.1%} of P99 {name.upper()}" for name in ("ttft", "itl")]
    assert ", ".join(counts) in str(found)


def test_a_small_chunk_trades_the_first_token_for_the_others() -> None:
    """Plain decoding waits for a prompt at most as long as one part of it takes."""
    found = drawn(arch=("autoregressive",), request_rate=12.0, num_prompts=60, output_len=24)
    small, large = sorted(found.points, key=lambda point: point.chunk)
    assert small.x.mean > large.x.mean
    assert small.y.mean < large.y.mean
    assert {small.verdict, large.verdict} == {"frontier"}


def test_who_does_not_keep_up_is_named_and_left_out() -> None:
    found = drawn(request_rate=500.0, num_prompts=100, max_num_seqs=1, num_runs=2)
    assert {point.verdict for point in found.points} == {"does not keep up"}
    assert str(found).startswith("nobody keeps up")
    assert not frontier_figure(found).axes[0].containers


def test_four_seeds_dominate_nothing() -> None:
    found = drawn(num_runs=4)
    assert not found.those("dominated")
    assert "4 seeds tell nothing apart: give at least 5" in str(found)


def test_the_figure_of_the_other_tokens_follows_the_levels() -> None:
    assert asked().y == "p99_itl"
    assert asked(goodput=["ttft:40"]).y == "p99_itl"
    assert asked(goodput=["tpot:9"]).y == "p99_tpot"
    assert asked(goodput=["tpot:9"], y="mean_tpot").y == "mean_tpot"


def test_one_token_answers_have_no_times_between_tokens() -> None:
    with pytest.raises(ValueError, match="p99_itl has no figure: every answer is a single token"):
        drawn(output_len=1, num_runs=2)


# ---- the picture and the command -------------------------------------------------------------------------------------


def test_the_picture_has_a_marker_a_point_and_the_levels() -> None:
    found = drawn(num_runs=2, goodput=["ttft:30", "tpot:9", "e2el:900"])
    (axes,) = frontier_figure(found).axes
    assert len(axes.containers) == 4
    texts = [text.get_text() for text in axes.texts]
    assert sum("TTFT ≤ 30 ms" in text for text in texts) == 1
    assert sum("TPOT ≤ 9 ms" in text for text in texts) == 1
    chunks = [chunk for text in texts if "≤" not in text for chunk in text.split(", ")]
    assert sorted(chunks) == ["1024", "1024", "128", "128"]
    assert "Not on an axis: E2EL ≤ 900 ms" in " ".join(axes.figure._supxlabel.get_text().split())  # type: ignore[union-attr]


def test_the_command_saves_and_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*COMMAND, "-o", str(tmp_path), "--goodput", "ttft:40"]) == 0
    out = capsys.readouterr().out
    assert "*  " in out
    assert "within levels %" in out
    frame = pd.read_parquet(tmp_path / "frontier.parquet")
    assert len(frame) == 2 * 2 * 2
    document = json.loads((tmp_path / "frontier.json").read_text())
    assert len(document["points"]) == 4
    off = {name: lead_error(Experiment(), name) for name in ("mean_ttft_ms", "p99_itl_ms")}
    assert document["leads_up_to_do_not_count"] == off
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_python_gives_what_the_command_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*COMMAND, "-o", str(tmp_path)]) == 0
    found = pdvsim.frontier(
        arch=["autoregressive", "pd"], dataset_name="random", num_prompts=20, input_len=600, output_len=8,
        max_num_batched_tokens=[128, 1024], request_rate=4.0, num_runs=2, jobs=1,
    )  # fmt: skip
    assert capsys.readouterr().out.rstrip("\n") == str(found)


def test_ctrl_c_keeps_the_points_that_are_done(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = runs_module.run_sweep

    def run_sweep(points: list[runs_module.Point], *rest: object) -> pd.DataFrame:
        raise SweepInterrupted(real(points[:3], *rest))  # type: ignore[arg-type]

    monkeypatch.setattr(runs_module, "run_sweep", run_sweep)
    assert main([*COMMAND, "-o", str(tmp_path)]) == 130
    assert f"interrupted: 1 of 4 points saved in {tmp_path}" in capsys.readouterr().err
    (point,) = json.loads((tmp_path / "frontier.json").read_text())["points"]
    assert (point["arch"], point["max_num_batched_tokens"]) == ("autoregressive", 128)


def test_ctrl_c_at_once_leaves_no_point(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_sweep(*_: object) -> pd.DataFrame:
        raise SweepInterrupted(pd.DataFrame())

    monkeypatch.setattr(runs_module, "run_sweep", run_sweep)
    assert main([*COMMAND, "-o", str(tmp_path / "none")]) == 130
    assert "no point is done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "a frontier is at one load: give one of --request-rate and --concurrency"),
        (["--request-rate", "2", "--concurrency", "2"], "give one of --request-rate and --concurrency"),
        (["--request-rate", "2", "--num-runs", "1"], "num-runs must be at least 2"),
        (["--request-rate", "2", "--max-num-batched-tokens", "9,9"], "max-num-batched-tokens names a value twice"),
        (["--request-rate", "2", "--max-num-batched-tokens", "0"], "max-num-batched-tokens must be 1 to"),
        (["--request-rate", "2", "--arch", "pd,pd"], "arch names a value twice"),
        (["--request-rate", "2", "--pair", "a:b"], "unknown model 'a'"),
        (["--request-rate", "2", "--goodput", "ttft:0"], "a service level of 0 ms cannot be met"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], says: str) -> None:
    assert main(["frontier", "-o", str(tmp_path / "none"), *flags]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "none").exists()
