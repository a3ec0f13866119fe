"""Winner maps: who must win does, at its own best; a tie is masked; differences from one are paired by seed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import pdvsim
from pdvsim.bench.pool import Row
from pdvsim.bench.run import SweepInterrupted
from pdvsim.calibration.fit.build import save
from pdvsim.cli import command_class, main
from pdvsim.cli.map import MapCommand
from pdvsim.common.options import build
from pdvsim.decide import runs as runs_module
from pdvsim.decide.error import lead_error
from pdvsim.decide.figures import map_figure
from pdvsim.decide.goal import Goal
from pdvsim.decide.grid import Grid
from pdvsim.decide.runs import Bench
from pdvsim.decide.space import Space
from pdvsim.decide.tune import APART
from pdvsim.decide.winners import WinnerMap, _cell_of, draw_map
from pdvsim.sim.config import Arch, Experiment, Server, Traffic
from pdvsim.sim.prices.profile import builtin

TRAFFIC = Traffic("random", num_prompts=24, input_len=64, output_len=24)
THROUGHPUT = Goal("throughput")


def grid(archs: tuple[Arch, ...], *places: float, server: Server | None = None, **more: object) -> Grid:
    """Everyone with the settings given; `space` is what may be tuned."""
    base = Experiment(archs[0], TRAFFIC, server=server or Server())
    given = Space(archs, (4,), ("fixed",), (base.server.max_num_seqs,), (2048,), own=False)
    options: dict[str, object] = {"concurrency": (1, 8), "request_rate": (), "num_runs": 5, "goal": THROUGHPUT}
    return Grid(base, axis="acceptance", places=places, **(options | {"space": given} | more))  # type: ignore[arg-type]


def drawn(of: Grid) -> WinnerMap:
    return draw_map(of, Bench(1))


def margin_of(cell: Any) -> float:
    """The mean lead over the second."""
    return cell.contest.leads[cell.contest.others[0]].mean


def test_drafts_of_four_that_all_fail_lose_and_that_all_pass_win() -> None:
    """At acceptance 0 a round yields one token and costs more than a step; at 1 it yields five and costs less.

    The margin is that of the runs, seed by seed. With an indifference of 99% less is sure, which is hatched.
    """
    answer = drawn(grid(("autoregressive", "colocated"), 0.0, 1.0))
    runs = answer.points[answer.points["load"] == 8].pivot(index=["place", "seed"], columns="arch")["output_throughput"]
    margin = (runs["colocated"] / runs["autoregressive"] - 1).loc[1.0].mean()
    for load in (1.0, 8.0):
        for place, winner in ((0.0, "autoregressive"), (1.0, "colocated")):
            cell = answer.found[load, place]
            assert (cell.winner, cell.sure) == (winner, True)
            assert margin_of(cell) > 0
            assert load == 1 or place == 0 or margin_of(cell) == pytest.approx(margin)
    masked = drawn(replace(answer.grid, indifference=0.99))
    unsure = sum(not cell.sure for cell in masked.cells)
    assert len([patch for patch in map_figure(masked).axes[0].patches if patch.get_hatch()]) == unsure >= 2


def test_without_drafts_colocated_batching_is_plain_decoding_and_not_tuned_apart() -> None:
    """One server is one candidate: where drafts fail plain decoding wins, where they are accepted drafting does."""
    archs: tuple[Arch, ...] = ("autoregressive", "colocated")
    answer = drawn(grid(archs, 0.0, 1.0, concurrency=(4,), space=Space(archs, controllers=("fixed",), own=False)))
    fails, passes = answer.cells
    assert fails.settings["colocated"].server.num_speculative_tokens == 1
    assert (fails.winner, fails.sure) == ("autoregressive", True)
    assert passes.settings["colocated"].server.num_speculative_tokens > 4
    assert (passes.winner, passes.sure) == ("colocated", True)
    k = passes.settings["colocated"].server.num_speculative_tokens
    shown = answer.points.groupby(["place", "arch"])["settings"].unique()
    assert shown[1.0, "colocated"].tolist() == [f"k={k}, batch 128, chunk 2048"]
    alone = Space(("colocated",), controllers=("fixed",), own=False)
    assert 0 in alone.lengths(fails.settings["colocated"])  # nobody else decodes plainly


def test_an_architecture_against_itself_is_masked_everywhere() -> None:
    """pdv-hybrid that never takes its atomic path is pdv."""
    answer = drawn(grid(("pdv", "pdv-hybrid"), 0.3, 0.9, concurrency=(8,), server=Server(hybrid_threshold=0)))
    assert len(answer.cells) == 2
    assert not any(cell.sure for cell in answer.cells)
    assert all(cell.contest is not None and margin_of(cell) == 0 for cell in answer.cells)
    assert "tie: pdv" in str(answer)
    assert "= pdv-hybrid" in str(answer)


def test_where_nobody_keeps_up_nobody_wins() -> None:
    slow = Server(max_num_seqs=1)
    of = grid(("colocated", "pd"), 0.6, concurrency=(), request_rate=(2.0, 60.0), goal=Goal("e2el"), server=slow)
    of = replace(of, num_runs=2, base=replace(of.base, traffic=replace(TRAFFIC, num_prompts=100)))
    low, high = drawn(of).cells
    assert low.winner is not None
    assert (high.winner, high.sure, set(high.behind_load)) == (None, False, {"colocated", "pd"})


def test_who_misses_the_levels_cannot_win_where_another_meets_them() -> None:
    """As in advice; where nobody meets them, the best architecture."""
    of = grid(("colocated", "pd"), 0.6, goal=Goal("e2el", ("ttft:100",)), request_rate=(4.0,), concurrency=())

    def rows(e2el_ms: float, in_time: float) -> list[Row]:
        keeps_up = {"stability": "stable", "load": 4.0, "breakdown_ms_queue": 0.0, "completed": 100.0}
        return [keeps_up | {"mean_e2el_ms": e2el_ms, "request_goodput": in_time, "request_throughput": 4.0}] * 5

    base = of.placed(4.0, 0.6)
    settings = {arch: replace(base, arch=arch) for arch in ("colocated", "pd")}
    cell = _cell_of(of, 4.0, 0.6, {"colocated": rows(100.0, 0.0), "pd": rows(200.0, 4.0)}, settings)
    assert cell.winner == "pd"
    cell = _cell_of(of, 4.0, 0.6, {"colocated": rows(100.0, 0.0), "pd": rows(200.0, 0.0)}, settings)
    assert cell.winner == "colocated"


def test_a_pair_that_was_not_measured_needs_a_longer_lead(tmp_path: Path) -> None:
    measured = builtin("h200")
    save(replace(measured, uncertainty={"gemma-7b": 0.3}), tmp_path / "card.json")
    answer = pdvsim.winner_map(
        y="size", pairs=["tinyllama-1.1b:llama-2-7b", "gemma-2b:gemma-7b"], arch=["autoregressive", "pd"], num_runs=5,
        concurrency=[1], jobs=1, num_speculative_tokens=4, profile=str(tmp_path / "card.json"),
        dataset_name="random", num_prompts=6, input_len=32, output_len=8,
    )  # fmt: skip
    limits = {cell.place: cell.contest.thresholds for cell in answer.cells if cell.contest}
    error = lead_error(Experiment(), "output_throughput")  # of the card that was measured
    assert [set(limit.values()) for limit in limits.values()] == [{error}, {0.3}]


COMMAND = [
    "map", "--arch", "autoregressive,pd", "--dataset-name", "random", "--num-prompts", "10", "--input-len", "32",
    "--output-len", "8", "--concurrency", "1,4", "--acceptances", "0.2,0.8", "--num-runs", "2", "--jobs", "1",
]  # fmt: skip


def test_the_command_saves_and_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*COMMAND, "-o", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    assert re.search("95% .* 98.75%", out)
    frame = pd.read_parquet(tmp_path / "map.parquet")
    assert len(frame) == 2 * 2 * 2 * 2
    assert set(frame["place"]) == {0.2, 0.8}
    assert len(json.loads((tmp_path / "map.json").read_text())["cells"]) == 4
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(word in page for word in ("Winner map", "data:image/png;base64,", "Provenance", "98.75%"))


def test_ctrl_c_keeps_the_cells_that_are_done(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When everyone is tuned and the first five runs of the map are done: the first cell's, and one more."""
    real = runs_module.run

    def run_sweep(points: list[runs_module.Point], *rest: object) -> list[Row]:
        if not points or points[0].experiment.traffic.seed >= APART:
            return real(points, *rest)  # type: ignore[arg-type]
        raise SweepInterrupted(real(points[:5], *rest))  # type: ignore[arg-type]

    monkeypatch.setattr(runs_module, "run", run_sweep)
    assert main([*COMMAND, "-o", str(tmp_path)]) == 130
    assert re.search(f" 1 of 4 .*{tmp_path}", capsys.readouterr().err)
    cells = json.loads((tmp_path / "map.json").read_text())["cells"]
    assert [(cell["load"], cell["place"]) for cell in cells] == [(1.0, 0.2)]


def test_each_pair_may_have_an_acceptance_rate_of_its_own() -> None:
    rates = {"gemma-2b:gemma-7b": 0.9, "tinyllama-1.1b:llama-2-7b": 0.3}
    options = {"y": "size", "pairs": list(rates), "pair_acceptance": list(rates.values()), "concurrency": [4]}
    grid = build(MapCommand, options).question()
    assert {pair: grid.placed(4, pair).acceptance.acceptance_rate for pair in grid.places} == rates
    with pytest.raises(ValueError, match="pair-acceptance"):
        build(MapCommand, options | {"pair_acceptance": [0.5]}).question()


PAIRS = ("tinyllama-1.1b:llama-2-7b", "gemma-2b:gemma-7b")
FLAGS = ["--num-prompts", "6", "--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--jobs", "1"]
SMALL: dict[str, Any] = {"dataset_name": "random", "num_prompts": 6, "input_len": 32, "output_len": 8, "jobs": 1}
FIXED: dict[str, Any] = {"num_speculative_tokens": 2, "max_num_seqs": 8, "max_num_batched_tokens": 512}


def compared(**options: Any) -> Any:
    return pdvsim.winner_map(**{"concurrency": 2, "num_runs": 2, **SMALL, **FIXED} | options).differences


def test_differences_are_paired_within_a_pair() -> None:
    differences = compared(y="size", pairs=PAIRS, arch=["pd", "pdv"], against="pd")
    frame = differences.points
    assert len(frame) == 2 * 2 * 2
    for entry in differences.paired:
        here = frame[frame["place"] == entry["place"]].set_index(["arch", "seed"])[entry["metric"]]
        assert entry["difference"].mean == pytest.approx((here["pdv"] - here["pd"]).mean())
    assert [d["pair"] for d in differences.paired if d["metric"] == "mean_e2el_ms"] == sorted(PAIRS, reverse=True)


def test_everyone_is_compared_finalist_or_not() -> None:
    """The best four and plain decoding are finalists; six compete, and all stand in the table."""
    archs = ["baseline", "colocated", "pd", "pdv-unified", "pdv", "pdv-hybrid"]
    differences = compared(acceptances=0.6, arch=archs, against="baseline")
    assert [entry["arch"] for entry in differences.summary] == archs
    assert {entry["replications"] for entry in differences.summary} == {2}


@pytest.mark.usefixtures("quick_plots")
def test_a_difference_counts_beyond_the_profiles_error_over_five_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch 1 loses by far; pdv-hybrid is pd while few requests run. Four seeds are inconclusive."""
    argv = ["map", "--acceptances", "0.6", "--concurrency", "2", *FLAGS, "-o", str(tmp_path)]
    argv += [f"--{name.replace('_', '-')}={value}" for name, value in FIXED.items()]
    few, alike = "too few runs", "not significant"
    for arch, num_runs, note in (("baseline,pd", 5, ""), ("baseline,pd", 4, few), ("pd,pdv-hybrid", 5, alike)):
        assert main([*argv, "--arch", arch, "--against", arch.split(",")[0], "--num-runs", str(num_runs)]) == 0
        out = capsys.readouterr().out
        lines = [line for line in out.splitlines() if line.startswith("output_throughput ")]
        assert [[words for words in (few, alike) if line.endswith(words)] for line in lines] == [[note] if note else []]
        for difference in json.loads((tmp_path / "map.json").read_text())["paired_differences"]:
            apart = difference["relative"]
            beyond = abs(apart["mean"]) - apart["half_width"] > difference["error"]
            assert difference["significant"] is (beyond and num_runs >= 5)
    assert {path.name for path in tmp_path.iterdir()} == {"map.parquet", "map.json", "map.png", "differences.png"}


@pytest.mark.parametrize("command", ["map", "capacity", "advise"])
@pytest.mark.parametrize(("runs", "noted"), [(3, True), (5, False)])
def test_too_few_runs_are_reported_before_anything_is_computed(
    command: str, runs: int, noted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Begun(Exception):
        pass

    def bench(*_: object, **__: object) -> None:
        raise Begun

    module = import_module(f"pdvsim.cli.{command}")
    monkeypatch.setattr(module, "Bench", bench)
    loads = {"map": ["--concurrency", "4"], "capacity": ["--goodput", "ttft:500"]}
    argv = [*loads.get(command, ["--request-rate", "4"]), "--num-prompts", "20", "--num-runs", str(runs)]
    with pytest.raises(Begun):
        command_class(command).main([*argv, "--arch", "pd", "pdv"], "pdvsim")
    line = f"pdvsim: {runs} runs per point: no difference can be significant; use at least --num-runs 5\n"
    assert (line in capsys.readouterr().err) is noted
