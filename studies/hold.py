"""Do decisions hold at their load? Twenty questions, each simulated again five times as long with new seeds.

    python studies/hold.py [--only NAME ...] [--output results/hold.json]

For `advise`, every finalist is run again; the regret is the recommendation's loss against the best of them. For
`capacity`, the ends of the interval must bracket the highest rate that long runs hold. For a map, the regret is that of
its worst cell; for a draft table, the loss against the lengths next to its own in the middle of each range. Progress is
printed per question, and finished questions are kept in the output file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

import pdvsim
from pdvsim.bench.length import length_of, with_length
from pdvsim.bench.pool import Row
from pdvsim.decide.capacity import Plan
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, keeps_up
from pdvsim.sim.config import Experiment
from pdvsim.sim.metrics.steady import Length

TIMES, SEEDS, NEW = 5, 3, 50_000  # length of a run, runs of each finalist, offset of their seeds
TALK: dict[str, Any] = {"num_turns": 10, "think_time_s": 10.0}
SHORT_TALK: dict[str, Any] = {"num_turns": 5, "think_time_s": 2.0}
PREFIX: dict[str, Any] = {
    "dataset_name": "random", "prefix_len": 2000, "num_prefixes": 150, "input_len": 200, "output_len": 100,
}  # fmt: skip
TWO: dict[str, Any] = {"arch": ["colocated", "autoregressive"], "controller": "fixed"}
H100: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h100-sxm"}
ONE: dict[str, Any] = {"arch": ["colocated"], "num_runs": 2}
CAPACITIES: dict[str, dict[str, Any]] = {
    "talks capacity": ONE | TALK | {
        "goodput": ["ttft:200", "tpot:12"], "num_speculative_tokens": 2, "max_num_seqs": 128,
    },
    "short talks capacity": ONE | SHORT_TALK | {"goodput": ["ttft:500", "tpot:50"], "num_speculative_tokens": 2},
    "prefix capacity": ONE | PREFIX | {
        "goodput": ["ttft:500", "tpot:50"], "num_speculative_tokens": 0, "max_num_seqs": 64,
    },
    "chat capacity": ONE | {"goodput": ["ttft:500", "tpot:20"], "num_speculative_tokens": 1, "max_num_seqs": 128},
    "vllm capacity": ONE | H100 | {
        "goodput": ["ttft:500", "tpot:20"], "num_speculative_tokens": 2, "max_num_seqs": 128, "drafter": "eagle3",
    },
}  # fmt: skip
ADVICE: dict[str, dict[str, Any]] = {
    "chat": {"request_rate": 8, "goodput": ["ttft:500", "tpot:50"]} | TWO,
    "busy chat": {"request_rate": 24} | TWO,
    "talks loop": {"concurrency": 64, "num_turns": 10} | TWO,
    "prefixes": PREFIX | {"request_rate": 20} | TWO,
    "fleet": H100 | TWO | {"request_rate": 60, "goodput": ["p99_ttft:200", "tpot:20"], "gpu_hour_usd": 3.0},
    "fleet of long answers": TWO | {
        "request_rate": 30, "input_len": 200, "output_len": 600, "dataset_name": "random", "goodput": ["tpot:12"],
        "gpu_hour_usd": 4.0,
    },
    "own log": TWO,
    "experts": {"model": "qwen3-30b-a3b-fp8", "drafter": "eagle3", "concurrency": 32} | TWO,
    "readme": H100 | {"request_rate": 8, "goodput": ["ttft:500", "tpot:50"]},
    "readme, tight": H100 | {"request_rate": 12, "goodput": ["p99_ttft:200", "tpot:20"]},
    "sglang loop": H100 | TWO | {"engine": "sglang", "concurrency": 16},
    "batch job": TWO | {"num_prompts": 600},
    "two gpus": TWO | {"gpus": 2, "concurrency": 8},
}  # fmt: skip
MAPS: dict[str, dict[str, Any]] = {"map": TWO | {"concurrency": [1, 32], "acceptances": [0.3, 0.8]}}
TABLES: dict[str, dict[str, Any]] = {"draft table": H100 | {"drafter": "eagle3", "max_num_seqs": 128, "max_k": 4}}
ENOUGH = 0.02  # regret up to which a decision holds


def log(folder: Path) -> str:
    """A log of 3,000 requests in bursts."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.gamma(0.3, 1 / (0.3 * 8), 3000))
    rows = (f"{at:.3f},{rng.integers(50, 800)},{rng.integers(20, 300)}" for at in times)
    path = folder / "log.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return str(path)


def longer(experiment: Experiment) -> list[Experiment]:
    """Return the same load five times as long, with new seeds; a log keeps its length."""
    length = length_of(experiment)
    long = with_length(experiment, Length(length.start, TIMES * length.measured))
    seed = experiment.traffic.seed + NEW
    return [replace(long, traffic=replace(long.traffic, seed=seed + at)) for at in range(SEEDS)]


def advised(options: dict[str, Any]) -> dict[str, Any]:
    """Regret of an advice, and whether it still meets its goal in the long runs."""
    advice = pdvsim.advise(**options, budget=250)
    goal, bench, best = advice.question.goal, Bench(), advice.recommended
    assert best is not None
    rows = {candidate: bench.rows(longer(candidate)) for candidate in advice.finalists.values()}
    able = {c: mine for c, mine in rows.items() if goal.met(mine)} or rows
    if advice.question.by_cost:
        able = {c: mine for c, mine in able.items() if advice.question.hourly(c) <= advice.question.hourly(best)}
    regret = _regret(able, best, goal)
    return {
        "recommended": advice.question.described(best), "regret": regret, "met": goal.met(rows[best]) == advice.met,
        "holds": regret <= ENOUGH and goal.met(rows[best]) == advice.met,
    }  # fmt: skip


def _regret(rows: dict[Experiment, list[Row]], chosen: Experiment, goal: Goal) -> float:
    """The loss of a choice against the best, by the means of long runs; nan if it cannot be chosen."""
    values = {c: float(np.mean([goal.value(row) for row in mine])) for c, mine in rows.items()}
    top = max(values.values()) if goal.sign > 0 else min(values.values())
    return goal.sign * (top - values[chosen]) / top if chosen in values else math.nan


def mapped(options: dict[str, Any]) -> dict[str, Any]:
    """Regret of the winner in the worst cell of a map; of a tie it is that of the one named first."""
    answer, bench, regrets = pdvsim.winner_map(**options), Bench(), {}
    for cell in answer.cells:
        if cell.winner is not None:
            rows = {mine: bench.rows(longer(mine)) for mine in cell.settings.values()}
            regrets[f"{cell.place} at {cell.load:g}"] = _regret(rows, cell.settings[cell.winner], answer.grid.goal)
    return {"regrets": regrets, "holds": all(regret <= ENOUGH for regret in regrets.values())}


def tabled(options: dict[str, Any]) -> dict[str, Any]:
    """Loss of a draft table in the middle of its ranges, against the lengths of the ranges next to it and k±1."""
    table, bench, losses = pdvsim.draft_table(**options), Bench(), {}
    for tier in table.tiers:
        rows = round(math.sqrt(tier.first * tier.last))
        lengths = {tier.k, *(k for k in (tier.k - 1, tier.k + 1) if 0 < k <= table.question.max_k)}
        runs = {k: longer(table.question.loops(rows, k)[0]) for k in lengths}
        speeds = {k: float(np.mean([row["output_throughput"] for row in bench.rows(mine)])) for k, mine in runs.items()}
        losses[f"k={tier.k} at batch {rows}"] = 1 - speeds[tier.k] / max(speeds.values())
    return {"losses": losses, "holds": all(lost <= ENOUGH + table.question.indifference for lost in losses.values())}


def held(options: dict[str, Any]) -> dict[str, Any]:
    """Return whether the interval of a capacity holds the highest rate that long runs hold."""
    capacities = pdvsim.capacity(**options)
    [entry], plan = capacities.summary(), capacities.plan
    rate = entry["rate"]
    ends = rate.mean - rate.half_width, rate.mean + rate.half_width
    low, high = (_holds(plan, max(end, 0.1)) for end in ends)
    return {"rate": rate.mean, "half_width": rate.half_width, "holds": low and not high}


def _holds(plan: Plan, rate: float) -> bool:
    [arch], bench = plan.archs, Bench()
    rows = bench.rows(longer(plan.experiment((arch, plan.base.traffic.seed), rate)))
    return plan.goal.attains(*rows) and all(map(keeps_up, rows))


KINDS: tuple[tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, dict[str, Any]]], ...] = (
    (held, CAPACITIES), (advised, ADVICE), (mapped, MAPS), (tabled, TABLES),
)  # fmt: skip


def main(words: list[str]) -> int:
    """Answer the questions named, or all; returns 1 if one does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[*CAPACITIES, *ADVICE, *MAPS, *TABLES])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(words)
    done: dict[str, dict[str, Any]] = {}
    if given.output and given.output.exists():
        done = json.loads(given.output.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in given.only if name not in done):
            [(answer, options)] = [(ask, kind[name]) for ask, kind in KINDS if name in kind]
            if name == "own log":
                options = options | {"dataset_path": log(Path(folder))}
            begin = monotonic()
            done[name] = answer(options) | {"seconds": round(monotonic() - begin)}
            print(name, done[name], flush=True)
            if given.output:
                given.output.write_text(json.dumps(done, indent=1))
    holding = sum(bool(entry["holds"]) for entry in done.values())
    print(f"{holding} of {len(done)} decisions hold")
    return 0 if holding == len(done) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
