"""Test the advice on the GPU: `python studies/truth.py plan|run|report FOLDER`.

`plan` decides twelve questions as every command does (each architecture at its own best settings, simulated) and writes
what to serve for each: the recommendation, the same with a draft length longer by one, the best setting of every other
architecture, plain decoding, and continuous batching with draft length 4. `run` serves them on a CUDA GPU, all on the
same requests, and the first of each question twice. `report` prints the regret: the distance from the recommendation's
measured figure to the best measured one. FOLDER holds truth.json (the plan) and truth.jsonl (the runs).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pdvsim.bench.stats import interval
from pdvsim.calibration.validate.runs import Workbench, serve_all
from pdvsim.calibration.validate.served import ServedRun, read_runs
from pdvsim.common.commandline import command_line
from pdvsim.common.console import say
from pdvsim.common.files import write_whole
from pdvsim.decide.goal import Goal, Objective
from pdvsim.decide.race import chosen, race
from pdvsim.decide.runs import Bench
from pdvsim.decide.space import Space, settings_text
from pdvsim.decide.tune import Search, tuned
from pdvsim.realrun.machine import Machine
from pdvsim.sim.config import Acceptance, Experiment, Server, Traffic
from pdvsim.sim.limits import MAX_DATA_BYTES
from pdvsim.sim.reading import parse_json, read_text
from pdvsim.sim.relevance import applicable
from pdvsim.view.table import grid

ARCHS = ("autoregressive", "colocated", "pd", "pdv", "pdv-unified", "pdv-hybrid", "adaptive")
# controllers are left out: graphs of every draft length take long to capture
SPACE = Space(ARCHS, controllers=("fixed",), max_num_seqs=(64, 128), max_num_batched_tokens=(256, 512, 2048))
SEEDS = 5
WARMUP = 0.1
LONGER = 3  # decisions at a request rate use runs longer by this factor than those served
MOST = 6  # entries of a trial that are served
REPEATED = 1  # entries of a trial that are served twice
SMALL, QWEN, LLAMA3 = "tinyllama-1.1b:llama-2-7b", "qwen2-1.5b:qwen2-7b", "llama-3.2-1b:llama-3.1-8b"
GEMMA, LARGE = "gemma-2b:gemma-7b", "tinyllama-1.1b:codellama-34b"


@dataclass(frozen=True)
class Trial:
    """One question of a user."""

    name: str
    pair: str
    traffic: Traffic
    objective: Objective
    levels: tuple[str, ...] = ()
    acceptance: float = 0.6

    @property
    def goal(self) -> Goal:
        return Goal(self.objective, self.levels)

    def experiment(self, times: int = 1) -> Experiment:
        """The experiment as the engine serves it, with a multiple of its requests."""
        server = Server(pair=self.pair)
        traffic = replace(self.traffic, num_prompts=times * self.traffic.num_prompts)
        base = Experiment("colocated", traffic, Acceptance(acceptance_rate=self.acceptance), server)
        return _warmed(self.goal.prepared(base))

    def served(self, candidate: Experiment) -> Experiment:
        """A candidate in a run as long as the served one."""
        return applicable(_warmed(self.goal.prepared(replace(candidate, traffic=self.traffic))))


def _warmed(experiment: Experiment) -> Experiment:
    """The experiment as it was served: measured after the first tenth, to the last finish."""
    warmup = int(WARMUP * experiment.traffic.num_prompts)
    return replace(experiment, scoring=replace(experiment.scoring, steady=False, warmup_requests=warmup))


def chat(rate: float, prompts: int) -> Traffic:
    """ShareGPT's lengths at a rate."""
    return Traffic(num_prompts=prompts, request_rate=rate)


def fixed(
    inputs: int, outputs: int, prompts: int, concurrency: int | None = None, rate: float = float("inf")
) -> Traffic:
    """Prompts and outputs of one length, at a concurrency or at a rate."""
    return Traffic(
        "random",
        num_prompts=prompts,
        input_len=inputs,
        output_len=outputs,
        max_concurrency=concurrency,
        request_rate=rate,
    )


TRIALS = (
    Trial("short chat, concurrency 8", SMALL, fixed(128, 128, 64, 8), "throughput"),
    Trial("batch, concurrency 64", SMALL, fixed(128, 128, 320, 64), "throughput"),
    Trial("ShareGPT, 6 req/s", SMALL, chat(6.0, 90), "e2el"),
    Trial("ShareGPT, 20 req/s, levels", SMALL, chat(20.0, 240), "headroom", ("ttft:300", "tpot:15")),
    Trial("batch, concurrency 64", QWEN, fixed(128, 128, 320, 64), "throughput"),
    Trial("ShareGPT, 10 req/s, acceptance 0.8", QWEN, chat(10.0, 70), "e2el", acceptance=0.8),
    Trial("ShareGPT, 8 req/s, levels", LLAMA3, chat(8.0, 60), "headroom", ("ttft:300", "tpot:30")),
    Trial(
        "long prompts, 4 req/s, levels", LLAMA3, fixed(1500, 128, 32, None, 4.0), "headroom", ("ttft:500", "tpot:20")
    ),
    Trial("short chat, concurrency 32", GEMMA, fixed(64, 200, 128, 32), "throughput"),
    Trial("ShareGPT, 6 req/s, acceptance 0.75", GEMMA, chat(6.0, 50), "e2el", acceptance=0.75),
    Trial("long prompts, concurrency 8", LARGE, fixed(1500, 100, 32, 8), "e2el"),
    Trial("short chat, concurrency 16", LARGE, fixed(128, 128, 64, 16), "throughput"),
)


def planned(trial: Trial, bench: Bench) -> dict[str, Any]:
    """The decision, and the entries to serve."""
    base, goal = trial.experiment(1 if trial.traffic.max_concurrency else LONGER), trial.goal
    [best] = tuned(Search(goal, SPACE), [base], bench)
    *_, finals = race(best, goal, bench, SEEDS, 0.01)
    recommended = best[chosen(finals.contest, best, base)]
    tied = (finals.contest.best, *finals.contest.unsure)
    means = {best[name]: interval(map(goal.value, rows)).mean for name, rows in finals.rows.items()}
    longer = recommended.server.num_speculative_tokens + 1 if recommended.speculates else 1
    drafting = recommended if recommended.speculates else best["colocated"]
    others = {
        "usual": replace(base, server=replace(base.server, num_speculative_tokens=4)),
        "neighbour": replace(drafting, server=replace(drafting.server, num_speculative_tokens=longer)),
    }
    roles = [("recommended" if candidate == recommended else "rival", candidate) for candidate in best.values()]
    entries: list[dict[str, Any]] = []
    for role, candidate in [*roles, *others.items()]:
        served = trial.served(candidate)
        [row] = bench.rows([served])
        entries.append(
            {
                "role": role,
                "described": ", ".join([candidate.arch, *settings_text(candidate)]),
                "command": command_line("realrun", served),
                "predicted": goal.value(row),
                "decided_by": means.get(candidate),  # the mean over seeds, at a rate of longer runs
                "not_significant": role == "rival" and candidate.arch in tied,
            }
        )
    entries.sort(key=lambda entry: -goal.sign * float(entry["predicted"]))
    entries.sort(key=_turn(entries))
    return {
        "name": trial.name, "pair": trial.pair, "objective": trial.objective, "levels": trial.levels,
        "acceptance": trial.acceptance, "sign": goal.sign, "entries": entries,
    }  # fmt: skip


def _turn(entries: Sequence[dict[str, Any]]) -> Callable[[dict[str, Any]], int]:
    """Order of serving: the recommendation, its best rival, plain decoding, draft length 4, one token more, pdv."""
    rival = next(entry for entry in entries if entry["role"] == "rival")

    def turn(entry: dict[str, Any]) -> int:
        arch = entry["described"].partition(",")[0]
        role = entry["role"]
        firsts = (role == "recommended", entry is rival, arch == "autoregressive", role == "usual", role == "neighbour")
        return next((at for at, is_it in enumerate((*firsts, arch == "pdv")) if is_it), 6)

    return turn


def plan(output: Path) -> None:
    """Decide every trial, and write the plan."""
    bench, trials = Bench(None), []
    for trial in TRIALS:
        trials.append(planned(trial, bench))
        print(f"{trial.pair}, {trial.name}: {trials[-1]['entries'][0]['described']}", flush=True)
        write_whole(output, (json.dumps({"trials": trials}, indent=1) + "\n").encode())


def run(plan_file: Path, output: Path) -> None:
    """Serve the first `MOST` entries of each trial; continues where an earlier call stopped."""
    wanted = [
        ServedRun(entry["command"], repeat, False, {}, {}, output.parent)
        for trial in _trials(plan_file)
        for at, entry in enumerate(trial["entries"][:MOST])
        for repeat in range(2 if at < REPEATED else 1)
    ]
    tell = partial(say, "truth")
    serve_all(wanted, output, math.inf, Workbench(Machine(), tell), tell)


def _trials(plan_file: Path) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = parse_json(read_text(plan_file, MAX_DATA_BYTES))["trials"]
    return trials


def report(plan_file: Path, output: Path) -> dict[str, Any]:
    """Regret and order, trial by trial."""
    runs = read_runs(output)
    trials = []
    for trial in _trials(plan_file):
        goal, sign, entries = Goal(trial["objective"], tuple(trial["levels"])), trial["sign"], []
        for entry in trial["entries"]:
            values = [goal.value(one.metrics) for one in runs if one.command == entry["command"]]
            if values:
                spread = max(values) / min(values) - 1 if len(values) > 1 else None
                entries.append(
                    entry | {"measured": sum(values) / len(values), "repeats": len(values), "spread": spread}
                )
        if len(entries) < 2 or entries[0]["role"] != "recommended":
            continue
        best = max(entries, key=lambda e: sign * e["measured"])
        recommended = entries[0]
        ratio = recommended["measured"] / best["measured"]
        regret = 1 - ratio if sign > 0 else 1 - 1 / ratio
        spread = max((e["spread"] or 0.0 for e in entries), default=0.0)
        pairs = [(a, b) for i, a in enumerate(entries) for b in entries[i + 1 :]]
        apart = [(a, b) for a, b in pairs if abs(a["measured"] / b["measured"] - 1) > max(spread, 0.01)]
        right = [(a, b) for a, b in apart if (a["measured"] > b["measured"]) == (a["predicted"] > b["predicted"])]
        trials.append(
            {
                **{key: trial[key] for key in ("name", "pair", "objective", "levels", "acceptance")},
                "recommended": recommended["described"],
                "best": best["described"],
                "regret": regret,
                "pairs_apart": len(apart),
                "pairs_in_order": len(right),
                "wrong": [f"{a['described']} / {b['described']}" for a, b in apart if (a, b) not in right],
                "spread": spread,
                "entries": entries,
            }
        )
    return {"trials": trials}


def table(document: dict[str, Any]) -> str:
    """The report as text."""
    rows = []
    for trial in document["trials"]:
        entries = trial["entries"]
        plain = next((e for e in entries if e["described"].startswith("autoregressive")), None)
        usual = next((e for e in entries if e["role"] == "usual"), None)
        first = entries[0]
        rows.append(
            [
                f"{trial['pair']}, {trial['name']}",
                first["described"],
                f"{first['measured']:.4g} ({first['predicted'] / first['measured'] - 1:+.1%})",
                f"{plain['measured']:.4g}" if plain else "-",
                f"{usual['measured']:.4g}" if usual else "-",
                trial["best"] if trial["regret"] > 0 else "the same",
                f"{trial['regret']:.1%}",
                f"{trial['pairs_in_order']} of {trial['pairs_apart']}",
            ]
        )
    header = ["scenario", "recommended", "measured (predicted)", "plain", "colocated k=4", "best", "regret", "order"]
    return grid(header, rows)


def main(step: str, folder: str) -> None:
    """Plan, run or report."""
    plan_file, runs_file = Path(folder) / "truth.json", Path(folder) / "truth.jsonl"
    if step == "plan":
        plan(plan_file)
    elif step == "run":
        run(plan_file, runs_file)
    else:
        print(table(report(plan_file, runs_file)))


if __name__ == "__main__":
    main(*sys.argv[1:])
