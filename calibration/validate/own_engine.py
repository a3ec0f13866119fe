"""What a profile from an engine's log is worth: `python -m pdvsim.calibration.validate.own_engine FOLDER`, on a GPU.

Eight runs of our own engine (no drafts and drafts of 4, at 1, 4, 16 and 64 at once) give the log, two of them the
benchmarks. The profile fitted to these alone predicts twelve other runs, beside the profile of the card's kernels. The
logs, the profile and the errors are written to FOLDER. Targets: median 4%, 95th percentile 12%.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from pdvsim.calibration.fit.build import save
from pdvsim.calibration.fit.engine_fit import calibrate_engine
from pdvsim.calibration.fit.engine_log import BenchRun, read_logs
from pdvsim.calibration.fit.errors import middle
from pdvsim.calibration.validate.runs import Workbench
from pdvsim.common.console import guarded, say
from pdvsim.common.files import write_whole
from pdvsim.common.version import __version__
from pdvsim.realrun.machine import Machine, as_served
from pdvsim.sim.config import Acceptance, Experiment, Server, Traffic
from pdvsim.sim.hardware.models import gpu, pair
from pdvsim.sim.metrics.iterations import iteration_lines
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

USERS = (1, 4, 16, 64)
DRAFTS = (0, 4)
BENCHED = 16  # at once, in the runs that stand for benchmarks
METRICS = ("output_throughput", "mean_tpot_ms", "mean_ttft_ms")
# draft length, requests at once, prompt and output tokens: other k, other loads, other lengths
OTHERS = (
    (0, 8, 256, 200), (0, 32, 256, 200), (0, 48, 700, 100), (1, 24, 256, 200), (2, 8, 256, 200), (2, 48, 128, 300),
    (3, 16, 700, 100), (3, 32, 64, 400), (4, 2, 256, 200), (4, 32, 512, 128), (6, 8, 256, 200), (6, 64, 256, 200),
)  # fmt: skip


def run_of(name: str, k: int, users: int, prompt: int = 256, output: int = 200, *, seed: int = 0) -> Experiment:
    """A closed loop of colocated serving."""
    traffic = Traffic(
        dataset_name="random", num_prompts=max(12, 3 * users), max_concurrency=users, input_len=prompt,
        output_len=output, random_range_ratio=0.3, seed=seed,
    )  # fmt: skip
    server = Server(pair=name, num_speculative_tokens=k)
    return as_served(Experiment("colocated", traffic, Acceptance(acceptance_rate=0.7), server))


def prove(folder: Path, name: str, card: str, machine: Machine, few: bool = False) -> dict[str, Any]:
    """Serve, fit and predict; `few` of each for a look."""
    lengths = (16, 12) if few else ()
    fitted = [run_of(name, k, users, *lengths) for k in DRAFTS for users in USERS[: 2 if few else None]]
    others = [
        run_of(name, k, users, *(lengths or (prompt, output)), seed=1)
        for k, users, prompt, output in OTHERS[: 2 if few else None]
    ]
    results = dict(_served([*fitted, *others], machine))
    logs, benches = [], []
    for k in DRAFTS:
        lines: list[str] = []
        for experiment in fitted:
            users = experiment.traffic.max_concurrency
            if experiment.server.num_speculative_tokens == k:
                lines += iteration_lines(results[experiment], "pdvsim", __version__)
                if users == BENCHED:
                    gap_s = summarise(results[experiment])["median_itl_ms"] / 1e3
                    benches.append(BenchRun(f"k={k}, {users} at once", users, k, gap_s))
        logs.append(folder / f"k{k}.log")
        write_whole(logs[-1], "".join(f"{line}\n" for line in lines).encode())
    found = calibrate_engine(read_logs(tuple(map(str, logs))), tuple(benches), pair(name), gpu(card), "own-engine")
    profile = folder / "own-engine.json"
    save(found.profile, profile)
    rows: list[dict[str, Any]] = []
    for experiment, (k, users, prompt, output) in zip(others, OTHERS, strict=False):
        real = summarise(results[experiment])
        own = replace(experiment, hardware=replace(experiment.hardware, profile=str(profile)))
        kernels = replace(experiment, hardware=replace(experiment.hardware, gpu=card))
        told = {"log": summarise(simulate(own)), "kernels": summarise(simulate(kernels))}
        errors = {way: {m: one[m] / real[m] - 1 for m in METRICS} for way, one in told.items()}
        rows.append({"k": k, "users": users, "prompt": prompt, "output": output, "errors": errors})
    summary = {way: {m: middle([row["errors"][way][m] for row in rows]) for m in METRICS} for way in ("log", "kernels")}
    document = {**found.document(), "runs": rows, "errors": summary}
    write_whole(folder / "own-engine.errors.json", (json.dumps(document, indent=1) + "\n").encode())
    return document


def _served(experiments: Sequence[Experiment], machine: Machine) -> Iterator[tuple[Experiment, Result]]:
    """Serve them all, those of a draft length on one rig."""
    bench = Workbench(machine, partial(say, "own_engine"))
    by_length = sorted(experiments, key=_draft_length)
    for k, group in groupby(by_length, key=_draft_length):
        alike = list(group)
        bench.ready(alike)
        for experiment in alike:
            say("own_engine", f"k={k}, {experiment.traffic.max_concurrency} at once")
            yield experiment, bench.served(experiment)


def _draft_length(experiment: Experiment) -> int:
    return experiment.server.num_speculative_tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded("own_engine", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description="What a profile from an engine's log is worth, on this machine's GPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pair", default="tinyllama-1.1b:llama-2-7b")
    parser.add_argument("--gpu", default="h200", help="the card that it runs on")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models on the CPU and few runs: tries the program, not the fit"
    )
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    machine = Machine(device="cpu", tiny=True) if args.tiny else Machine()
    document = prove(args.folder, args.pair, args.gpu, machine, args.tiny)
    print(json.dumps(document["errors"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
