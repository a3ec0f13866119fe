"""Every architecture at its own best: on its own seeds, within what the user gave, the same in all commands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import pdvsim
from pdvsim.bench import output
from pdvsim.bench.length import with_length
from pdvsim.bench.pool import Row
from pdvsim.cli import main
from pdvsim.cli.advise import AdviseCommand
from pdvsim.cli.capacity import CapacityCommand
from pdvsim.cli.map import MapCommand
from pdvsim.common.options import build
from pdvsim.decide import runs as runs_module
from pdvsim.decide.advice import Advice
from pdvsim.decide.formula import Formula
from pdvsim.decide.goal import Goal
from pdvsim.decide.race import race
from pdvsim.decide.runs import Bench, at_acceptance
from pdvsim.decide.space import CONTROLLERS, EXCLUDED, Space
from pdvsim.decide.tune import APART, CLOSE, SEEDS, Search, most_runs, tuned
from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.metrics.steady import Length

LOAD = Experiment("pd", Traffic("random", num_prompts=40, request_rate=30.0, input_len=64, output_len=16))
LOOP = replace(LOAD, traffic=replace(LOAD.traffic, request_rate=math.inf, max_concurrency=8))
TINY: dict[str, Any] = {
    "dataset_name": "random", "num_prompts": 20, "input_len": 32, "output_len": 8, "jobs": 1, "num_runs": 5,
}  # fmt: skip


class Log(Bench):
    """A bench that remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(1)
        self.asked: list[Experiment] = []

    def rows(self, experiments: Sequence[Experiment]) -> list[Row]:
        self.asked += experiments
        return super().rows(experiments)


class Made(Bench):
    """A bench of made-up throughputs, in runs that keep up."""

    def __init__(self, speed: Callable[[Experiment], float]) -> None:
        super().__init__(1)
        self.speed = speed

    def rows(self, experiments: Sequence[Experiment]) -> list[Row]:
        self.runs += len(experiments)
        kept_up: Row = {"stability": "stable", "load": math.inf, "breakdown_ms_queue": 0.0, "completed": 1.0}
        row = kept_up | {"max_concurrent_requests": 1}
        return [row | {"output_throughput": self.speed(experiment)} for experiment in experiments]


@pytest.mark.parametrize(("place", "goal"), [(LOOP, Goal("throughput")), (LOAD, Goal("e2el"))])
def test_tuned_is_never_worse_than_where_it_started(place: Experiment, goal: Goal) -> None:
    """On the seeds of the search, where nothing is too small to count. Every architecture is there, the best first."""
    bench, place = Log(), with_length(place, Length(8, 160))
    search = Search(goal, Space(), indifference=0.0)
    [best] = tuned(search, [place], bench)
    assert set(best) == set(Space().archs)
    starts = {start.arch: start for start in search.space.starts(place)}
    for arch, mine in best.items():
        assert goal.sign * search.figures[mine] >= goal.sign * search.figures[starts[arch]]
    order = [goal.sign * search.figures[mine] for mine in best.values()]
    assert order == sorted(order, reverse=True)
    assert len(search.figures) < bench.runs <= SEEDS * len(search.figures) <= most_runs(search.space, 1)
    # the runs are short, and of seeds that no replication has
    assert {run.traffic.seed for run in bench.asked} == {APART, APART + 1}
    assert max(run.traffic.num_prompts for run in bench.asked) < place.traffic.num_prompts
    # what a setting cannot change is not tried
    assert {run.server.max_num_seqs for run in bench.asked if run.arch == "pd"} == {128}  # concurrency 8 or hardly more


def test_drafts_are_tried_on_while_they_get_better_and_the_formula_leaves_them() -> None:
    """Made-up figures that grow with the draft length: all that run are within the formula's error of its best."""
    search = Search(Goal("throughput"), Space(("pd",), Space.draft_lengths, ("fixed",), (128,), (2048,), False), 0.0)
    [best] = tuned(search, [LOOP], Made(lambda e: 100 + e.server.num_speculative_tokens))
    left = set(Formula(LOOP).likely(Space.draft_lengths, EXCLUDED))
    assert best["pd"].server.num_speculative_tokens == max(left)
    assert {c.server.num_speculative_tokens for c in search.figures} <= left < set(Space.draft_lengths)


def test_settings_close_to_the_best_run_a_second_seed() -> None:
    """Made-up figures by draft length, on the second seed in the other order."""
    speeds = {0: 100.0, 1: 99.0, 2: 98.0 / CLOSE}
    space = Space(("pd",), tuple(speeds), ("fixed",), (128,), (2048,), own=False)
    search, bench = Search(Goal("throughput"), space, 0.0), Made(lambda e: 0.0)
    bench.speed = lambda e: (
        speeds[e.server.num_speculative_tokens] + (10 * e.server.num_speculative_tokens * (e.traffic.seed % 2))
    )
    [best] = tuned(search, [at_acceptance(LOOP, 0.3)], bench)
    run = {c.server.num_speculative_tokens for c in search.figures}
    assert bench.runs == len(run) + len(run & {0, 1})
    assert best["pd"].server.num_speculative_tokens == (1 if run >= {0, 1} else 0)


def test_nobody_is_out_for_drafts_that_the_formula_liked() -> None:
    """Every draft passes, so that the formula wants many; but only without any is this made-up server fast."""

    space = Space(("autoregressive", "pd"), Space.draft_lengths, ("fixed",), (128,), (2048,), own=False)
    base = replace(at_acceptance(LOOP, 1.0), arch="autoregressive", server=Server(num_speculative_tokens=0))
    assert Formula(replace(base, arch="pd")).ranked(Space.draft_lengths)[0].k > 1
    slow = Made(lambda e: 1.0 + 99 * (e.server.num_speculative_tokens == 0))
    [best] = tuned(Search(Goal("throughput"), space, 0.0), [base], slow)
    assert best["pd"].server.num_speculative_tokens == 0


def test_of_settings_that_are_alike_the_simplest_goes_on() -> None:
    search = Search(Goal("throughput"), Space(), indifference=0.05)
    simple, other, better = (replace(LOOP, server=Server(controller=c)) for c in ("fixed", "goodput", "feedback"))
    search.figures = {better: 104.0, other: 103.0, simple: 100.0}
    assert search.ranked([other, better, simple], LOOP) == [simple, other, better]
    search.figures[simple] = 98.0
    assert search.ranked([other, better, simple], LOOP) == [other, better, simple]


def test_a_budget_that_runs_out_is_counted_by_turns() -> None:
    """Five simulations are one setting of each architecture, then of the first two again."""
    space = Space(("colocated", "pd", "pdv"), (1, 2, 3), ("fixed",), (128,), (2048,), own=False)
    search, bench = Search(Goal("e2el"), space, budget=5), Bench(1)
    [best] = tuned(search, [LOAD], bench)
    assert bench.runs == len(search.figures) == 5
    assert search.skipped > 0
    assert set(best) == {"colocated", "pd", "pdv"}
    assert [c.arch for c in search.figures][:3] == ["colocated", "pd", "pdv"]


def test_an_objective_that_the_traffic_has_no_figure_of_is_refused() -> None:
    """Answers of one token have no time between tokens."""
    changes: list[dict[str, Any]] = [{"objective": "tpot"}, {"goodput": ["tpot:20"]}]
    for change in changes:
        options = TINY | {"arch": ["autoregressive", "pd"], "request_rate": 9, "output_len": 1} | change
        with pytest.raises(ValueError, match="single token"):
            pdvsim.advise(**options)


@pytest.mark.parametrize(
    ("lead", "scatter", "budget", "seeds"),
    [
        (0.30, 0.01, None, 5),  # significant with the first seeds
        (0.02, 0.01, None, 5),  # too small to count, however many
        (0.30, 3.00, None, 20),  # scatters too much: four times as many at the most
        (0.30, 0.30, None, 10),  # ten are significant
        (0.30, 0.30, 19, 5),  # as long as the budget has room for all of them
    ],
)
def test_seeds_are_added_while_that_would_tell(lead: float, scatter: float, budget: int | None, seeds: int) -> None:
    """Two candidates by made-up figures: the one leads, more in every other seed."""

    def speed(experiment: Experiment) -> float:
        return 1 + (lead + scatter * (-1) ** experiment.traffic.seed) * (experiment.arch == "pd")

    both = {"pd": LOOP, "pdv": replace(LOOP, arch="pdv")}
    *_, finals = race(both, Goal("throughput"), Made(speed), 5, 0.035, budget)
    assert {len(rows) for rows in finals.rows.values()} == {seeds}
    assert finals.contest.seeds == seeds
    assert finals.contest.best == "pd"


@pytest.mark.parametrize("equally", [False, True])
def test_seeds_are_added_to_those_between_whom_it_is_open(equally: bool) -> None:
    """Made-up figures: pd leads pdv by what scatters, and leads plain decoding surely. Later seeds are slow for all."""

    means = {"pd": 1.3, "pdv": 1.0, "autoregressive": 0.7}

    def speed(experiment: Experiment) -> float:
        scatter = 0.3 * (experiment.arch == "pd") * (-1) ** experiment.traffic.seed
        return (means[experiment.arch] + scatter) * (1.0 if experiment.traffic.seed < 5 else 0.4)

    three = {arch: replace(LOOP, arch=arch) for arch in ("pd", "pdv", "autoregressive")}
    first, *_, last = race(three, Goal("throughput"), Made(speed), 5, 0.035, equally=equally)
    assert first.contest.unsure == ("pdv",)
    assert {name: len(rows) for name, rows in last.rows.items()} == {
        "pd": 20, "pdv": 20, "autoregressive": 20 if equally else 5,
    }  # fmt: skip
    assert last.contest.best == "pd"  # though plain decoding, without the slow seeds, has the higher mean
    assert last.contest.others == ("pdv", "autoregressive")
    assert last.contest.sure
    assert last.contest.leads["autoregressive"] == first.contest.leads["autoregressive"] or equally


# ---- what the user gave ----------------------------------------------------------------------------------------------

GIVEN = ["--num-speculative-tokens", "3", "--max-num-seqs", "32", "--max-num-batched-tokens", "512"]
SMALL = ["--dataset-name", "random", "--num-prompts", "8", "--input-len", "32", "--output-len", "4", "--jobs", "1"]
COMMANDS = {
    "advise": ["--request-rate", "20", "--arch", "autoregressive,pd", "--num-runs", "5", "--budget", "120"],
    "map": ["--concurrency", "2", "--acceptances", "0.9", "--arch", "autoregressive,pd", "--num-runs", "2"],
    "capacity": ["--goodput", "ttft:60", "--arch", "pd", "--num-runs", "2", "--tolerance", "0.2"],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """Everything that is simulated for a decision."""
    experiments: list[Experiment] = []
    real = runs_module.run

    def run_sweep(points: Any, *rest: Any) -> list[Row]:
        experiments.extend(point.experiment for point in points)
        return real(points, *rest)

    monkeypatch.setattr(runs_module, "run", run_sweep)
    return experiments


@pytest.mark.usefixtures("quick_plots")
def test_a_draft_length_that_is_given_is_never_moved(asked: list[Experiment], tmp_path: Path) -> None:
    for command, flags in COMMANDS.items():
        assert main([command, *flags, *SMALL, *GIVEN, "-o", str(tmp_path)]) == 0
    drafting = [run.server for run in asked if run.arch != "autoregressive"]
    assert {(server.num_speculative_tokens, server.controller) for server in drafting} == {(3, "fixed")}


@pytest.mark.usefixtures("quick_plots")
@pytest.mark.parametrize("command", ["advise", "capacity"])
def test_what_is_left_open_is_searched_on_seeds_of_its_own(
    command: str, asked: list[Experiment], tmp_path: Path
) -> None:
    assert main([command, *COMMANDS[command], *SMALL, "-o", str(tmp_path)]) == 0
    tried = [run for run in asked if run.traffic.seed >= APART]
    final = [run for run in asked if run.traffic.seed < APART]
    assert {APART} <= {run.traffic.seed for run in tried} <= {APART, APART + 1}  # the second where several are close
    seeds = {run.traffic.seed for run in final}
    assert seeds == set(range(len(seeds)))
    assert len(seeds) in ((5, 10, 20) if command == "advise" else (2,))  # advice adds seeds while that could decide
    drafting = [run.server for run in tried if run.arch != "autoregressive"]
    assert {server.controller for server in drafting} == set(CONTROLLERS)
    assert len({server.num_speculative_tokens for server in drafting}) > 1
    assert len({server.max_num_batched_tokens for server in drafting}) > 1


# ---- the same question -----------------------------------------------------------------------------------------------


def answer(**changes: Any) -> Advice:
    options = TINY | {"arch": ["autoregressive", "pd"], "request_rate": 20, "budget": 90, "max_num_seqs": 32} | changes
    return pdvsim.advise(**options)


def text_of(advice: Advice) -> str:
    """The whole document but for how long it took."""
    document = advice.report().document
    del document["search"]["spent_s"]
    return output.dumps(document)


def test_the_same_question_has_the_same_answer_on_any_number_of_cores() -> None:
    first = answer()
    assert text_of(first) == text_of(answer(jobs=2))
    assert first.runs <= 90


def test_the_budget_is_kept_and_what_it_leaves_out_is_named() -> None:
    """Beyond it are only the finals, which are always run."""
    few: dict[str, Any] = {"controller": "fixed", "max_num_batched_tokens": 2048}
    for budget in (1, 24):
        advice = answer(budget=budget, goodput=["ttft:500"], **few)
        finals = sum(map(len, advice.finals.rows.values()))
        assert advice.runs <= max(budget, SEEDS + finals + budget // 2)
        assert {len(rows) for rows in advice.finals.rows.values()} == {5}
        assert advice.left_out
        assert advice.report().document["search"]["left_out"] == advice.left_out
    whole = answer(budget=5000, num_runs=2, **few)
    assert not whole.left_out
    assert not whole.search.skipped


# ---- what may be tried -----------------------------------------------------------------------------------------------


def test_architectures_that_refuse_an_option_are_left_out() -> None:
    base = Experiment(arch="pdv", hardware=Hardware(place=("prefill=1", "verify=1")))
    assert [candidate.arch for candidate in Space().starts(base)] == ["pdv", "pdv-hybrid", "adaptive"]
    ways = Space().others(replace(base, arch="baseline", hardware=Hardware()), "controller")
    assert {way.server.controller for way in ways} == {"goodput"}


def test_what_an_architecture_alone_has_is_left_where_the_user_put_it() -> None:
    given = replace(LOAD, arch="baseline", server=Server(num_workers=3))
    assert Space().others(given, "own") == []
    assert {way.server.num_workers for way in Space().others(replace(given, server=Server()), "own")} == {1, 4, 16}


LEVELS: dict[str, Any] = {
    "pair": "gemma-2b:gemma-7b", "gpu": "a100-80gb", "arch": ["autoregressive", "colocated"],
    "goodput": ["ttft:400", "tpot:60"], "dataset_name": "random", "input_len": 500, "output_len": 8, "jobs": 1,
    "request_rate": 8, "controller": "fixed", "num_runs": 2,
}  # fmt: skip
QUESTIONS: dict[str, dict[str, Any]] = {
    "levels": LEVELS,
    "no levels": LEVELS | {
        "pair": "tinyllama-1.1b:llama-2-7b", "gpu": "h200", "goodput": [], "input_len": 64, "request_rate": 30,
        "output_len": 16, "arch": ["colocated", "pdv"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_same_question_has_the_same_answer(name: str) -> None:
    """To the last bit: who is taken, with which settings, by which lead."""
    ask = QUESTIONS[name] | {"num_prompts": 40}
    advice = pdvsim.advise(**ask, budget=200)  # enough for all but the flips
    [cell] = (winner_map := pdvsim.winner_map(**ask | {"request_rate": [ask["request_rate"]]}, acceptances=[0.6])).cells
    best = advice.recommended
    assert best.arch == cell.winner
    for name, candidate in advice.finalists.items():
        assert candidate.server == cell.settings[name].server
    assert advice.finals.contest.values == cell.contest.values
    assert advice.finals.contest.leads == cell.contest.leads
    assert len(winner_map.rows) == sum(map(len, advice.finals.rows.values()))


def test_what_is_asked_by_default_is_the_same() -> None:
    """The same traffic, seeds, indifference and settings to try."""
    asked = build(AdviseCommand, {"request_rate": 4}).question().base.traffic
    assert asked == replace(build(MapCommand, {"request_rate": [4]}).question().base.traffic, request_rate=4)
    for name in ("num_runs", "indifference", "attainment", "server", "acceptance", "host"):
        given = [
            getattr(options(), name) for options in (AdviseCommand, MapCommand, CapacityCommand)
            if name in {field.name for field in fields(options)}
        ]  # fmt: skip
        assert all(value == given[0] for value in given)
