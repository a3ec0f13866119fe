"""Do decisions hold at their load? Twelve questions, each simulated again five times as long with new seeds.

    python studies/hold.py [--only NAME ...] [--output results/hold.json]

For `advise`, every finalist is run again; the regret is the recommendation's loss against the best of them. For
`capacity`, the middle of the interval must hold in long runs, and its ends bracket the highest rate that does. Progress
is printed per question, and finished questions are kept in the output file.
"""

from __future__ import annotations

import argparse
import json
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
from pdvsim.decide.capacity import Plan
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
}  # fmt: skip


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
    rows = {candidate: bench.rows(longer(candidate)) for candidate in advice.finals}
    able = {c: mine for c, mine in rows.items() if goal.met(mine)} or rows
    if advice.question.by_cost:
        able = {c: mine for c, mine in able.items() if advice.question.hourly(c) <= advice.question.hourly(best)}
    values = {c: float(np.mean([goal.value(row) for row in mine])) for c, mine in able.items()}
    top = max(values.values()) if goal.sign > 0 else min(values.values())
    regret = goal.sign * (top - values[best]) / top if best in values else float("nan")
    return {
        "recommended": advice.question.described(best), "regret": regret, "met": goal.met(rows[best]) == advice.met,
        "holds": best in values and regret <= 0.02 and goal.met(rows[best]) == advice.met,
    }  # fmt: skip


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


def main(words: list[str]) -> int:
    """Answer the questions named, or all; returns 1 if one does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[*CAPACITIES, *ADVICE])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(words)
    done: dict[str, dict[str, Any]] = {}
    if given.output and given.output.exists():
        done = json.loads(given.output.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in given.only if name not in done):
            options = CAPACITIES.get(name) or ADVICE[name]
            if name == "own log":
                options = options | {"dataset_path": log(Path(folder))}
            answer: Callable[[dict[str, Any]], dict[str, Any]] = held if name in CAPACITIES else advised
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
