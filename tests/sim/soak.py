"""An hour of random experiments under the laws, and of sweeps that are killed: `make soak`, or run this file.

Two things go on by turns until the time is over. A random experiment, of any architecture and setting, is run three
ways: its books must balance (`test_laws`), records must be the same to the last bit directly and through the event
queue, and streamed metrics must agree with detailed ones. A random sweep is run whole, and once more with kill -9 at
random moments and --resume, until it is done; the rows must be the same. Prints a summary, writes it as JSON, ends
with 1 on a violation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from test_laws import (
    PLACES,
    Scenario,
    Workload,
    _settled,
    arrivals,
    assert_same,
    check_gpus,
    check_littles_law,
    measured_like,
    write,
)

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Arch
from pdvsim.sim.hardware.models import GPUS, MODELS
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.policies import ARCHS
from pdvsim.testing import check_books

# Sums in another order, and quantiles from a sketch.
EXACT = ("completed", "total_input", "total_output", "duration", "request_throughput", "output_throughput")
SWEEP_EVERY = 40  # experiments
SKETCH = 0.011  # of a percentile, relative


def main() -> int:
    """Soak; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/soak.json"))
    args = parser.parse_args()
    begin_s, done, violations = time.monotonic(), Counter[str](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        profiles = (None, "roofline", write(measured_like(), Path(folder)))
        seed = args.seed
        while time.monotonic() - begin_s < 60 * args.minutes:
            turns = ["experiments", *(["killed sweeps"] if seed % SWEEP_EVERY == 0 else [])]
            for kind in turns:
                try:
                    if kind == "experiments":
                        experiment(random.Random(seed), profiles, done)
                    else:
                        killed_sweep(random.Random(seed), Path(folder) / "sweeps", done)
                    done[kind] += 1
                except Exception as error:
                    violations.append({"kind": kind, "seed": seed, "traceback": traceback.format_exc()})
                    print(f"VIOLATION: {kind}, seed {seed}: {type(error).__name__}: {error!s:.500}", flush=True)
            seed += 1
            written(args.output, begin_s, args.seed, seed, done, violations)
    minutes = (time.monotonic() - begin_s) / 60
    print(f"{minutes:.1f} minutes, seeds {args.seed} to {seed - 1}: {len(violations)} violations")
    print(", ".join(f"{count} {what}" for what, count in sorted(done.items())) + f"; {args.output}")
    return 1 if violations else 0


def written(
    path: Path, begin_s: float, first: int, seed: int, done: Counter[str], violations: list[dict[str, Any]]
) -> None:
    """The summary so far, as JSON: a soak that is stopped has said what it found."""
    minutes = (time.monotonic() - begin_s) / 60
    summary = {"minutes": minutes, "first_seed": first, "next_seed": seed, "done": dict(sorted(done.items()))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary | {"violations": violations}, indent=1) + "\n", encoding="utf-8")


def experiment(rng: random.Random, profiles: tuple[str | None, ...], done: Counter[str]) -> None:
    """One scenario under all laws."""
    scenario = random_scenario(rng, profiles)
    try:
        result = scenario.run()
    except ValueError:  # a vector of another length, a request beyond the context, no room for the weights: refused
        done["refused experiments"] += 1
        return
    check_books(result, scenario.workload.outputs, scenario.workload.arrival_s)
    check_littles_law(scenario, result)
    if scenario.experiment.hardware.gpu == "h200":  # predicted times may be a little less than a card's ceilings allow
        check_gpus(result, covering_profile(scenario.experiment))
    assert 0 < result.meta["kv_peak_tokens"] <= result.meta["kv_capacity_tokens"]
    assert_same(result, scenario.run(blocks=False))
    assert_same(result, scenario.run())
    whole = summarise(result)
    scoring = replace(scenario.experiment.scoring, detailed=False)
    streamed = summarise(replace(scenario, experiment=replace(scenario.experiment, scoring=scoring)).run())
    agree(whole, streamed)
    done[f"requests of {scenario.experiment.arch}"] += len(scenario.workload.outputs)


def agree(whole: dict[str, Any], streamed: dict[str, Any], where: str = "") -> None:
    """Streamed metrics against detailed ones."""
    for name, value in whole.items():
        other = streamed[name]
        if isinstance(value, dict):
            agree(value, other, f"{where}{name}.")
        elif isinstance(value, float) and not math.isnan(value):
            near = SKETCH if (name[:1] == "p" and name[1:2].isdigit()) or name.startswith("median") else 1e-6
            if name.startswith(("mean", "std")) or name in EXACT or near == SKETCH:
                assert abs(other - value) <= near * abs(value) + 1e-6, f"{where}{name}: {value} and streamed {other}"


def random_scenario(rng: random.Random, profiles: tuple[str | None, ...]) -> Scenario:
    """A workload and a configuration; what an architecture refuses stays at its default."""
    arch: Arch = rng.choice(ARCHS)
    seed, count = rng.randrange(2**16), rng.choice([1, 5, 30, 30, 100, 300])
    drawn = np.random.default_rng(seed)
    rate = 10 ** rng.uniform(0, 4)
    prompts = drawn.choice([1, 7, 64, 300, 700, 1500], count)
    outputs = np.where(drawn.random(count) < 0.2, 1, drawn.integers(1, rng.choice([4, 60, 300]) + 1, count))
    workload = Workload(
        arrivals(rng.choice(["burst", "poisson", "grid"]), count, rate, drawn),
        tuple(prompts.tolist()),
        tuple(outputs.tolist()),
        seed,
    )
    need = max(p + o for p, o in zip(workload.prompts, workload.outputs, strict=True)) + 40
    host = rng.choice([None, None, 0.0, 1e-4, 1e-3])
    low = rng.randrange(1, 5)
    options: dict[str, Any] = {
        "acceptance.acceptance_rate": rng.choice([0.0, 0.3, 0.6, 0.9, 1.0, rng.random()]),
        "acceptance.acceptance_concentration": rng.choice([None, None, 2.0, 30.0]),
        "acceptance.synthetic_acceptance_rates": rng.choice([(), (), (0.9, 0.5, 0.1)]),
        "traffic.num_prompts": count,
        "traffic.max_concurrency": rng.choice([None, None, 1, 3, 8, 64]),
        "server.pair": rng.choice(["tinyllama-1.1b:llama-2-7b", f"{rng.choice([*MODELS])}:{rng.choice([*MODELS])}"]),
        "server.num_speculative_tokens": rng.choice([0, 1, 2, 4, 7, 15]),
        "server.max_speculative_tokens": low + rng.randrange(0, 9),
        "server.min_speculative_tokens": low,
        "server.controller": rng.choice(["fixed", "fixed", "feedback", "goodput"]),
        "server.max_num_seqs": rng.choice([1, 2, 3, 8, 128]),
        "server.max_num_batched_tokens": rng.choice([16, 256, 2048]),
        "server.max_prompts_per_forward": rng.choice([1, 4, 16]),
        "server.num_workers": rng.choice([1, 2, 4, 9]),
        "server.max_decode_queue": rng.choice([1, 2, 32]),
        "server.verify_gather": rng.choice(["auto", "always", "never"]),
        "server.admission_factor": rng.choice([0.1, 1.2, 5.0]),
        "server.hybrid_threshold": rng.choice([0, 1, 2, 8]),
        "server.priority": rng.choice(["none", "stream", "preemptive"]),
        "hardware.gpu": rng.choice(["h200", "h200", *GPUS]),
        "hardware.contention": rng.choice(["fluid", "fluid", "serial", "max"]),
        "hardware.kv_capacity_tokens": rng.choice([need, 2 * need, 10**6]),
        "hardware.tensor_parallel_size": rng.choice([1, 1, 2, 8]),
        "hardware.draft_tensor_parallel_size": rng.choice([None, 1]),
        "hardware.place": rng.choice(PLACES),
        "hardware.link": rng.choice(["nvlink4", "100gbe"]),
        "hardware.replicas": rng.choice([1, 1, 2, 3]),
        "hardware.router": rng.choice(["round-robin", "least-loaded", "random"]),
        "host.launch_s": host,
        "host.completion_s": host,
        "host.handoff_s": host,
        "host.idle_poll_s": rng.choice([0.0, 0.0, 10e-6, 1e-3, 0.1]),
    }
    found = _settled(arch, options)
    if found.hardware.gpu == "h200":
        found = replace(found, hardware=replace(found.hardware, profile=rng.choice(profiles)))
    return Scenario(found, workload)


def killed_sweep(rng: random.Random, folder: Path, done: Counter[str]) -> None:
    """A sweep whole, and the same killed at random moments and resumed until it is done: the rows are the same."""
    archs = ",".join(rng.sample(ARCHS, rng.randrange(1, 4)))
    prompts, runs = rng.choice([200, 800, 2000]), rng.randrange(1, 4)
    argv = [sys.executable, "-m", "pdvsim.cli", "sweep", "--arch", archs, "--request-rate", "4,16,64", "--jobs", "2"]
    argv += ["--num-prompts", str(prompts), "--num-runs", str(runs), "--seed", str(rng.randrange(1000))]
    argv += ["--save-detailed"] if rng.random() < 0.3 else []
    shutil.rmtree(folder, ignore_errors=True)
    begin_s = time.monotonic()
    run_sweep([*argv, "-o", str(folder / "whole")], None)
    took_s = time.monotonic() - begin_s
    kills = 0
    for attempt in range(12):
        moment_s = rng.uniform(0.3, 1.0) * took_s if attempt < 11 else None
        if run_sweep([*argv, "-o", str(folder / "killed"), "--resume"], moment_s):
            break
        kills += 1
    done["kills"] += kills
    whole, killed = (pd.read_parquet(folder / name / "summary.parquet") for name in ("whole", "killed"))
    pd.testing.assert_frame_equal(whole, killed, check_exact=True)
    left = [path for path in (folder / "killed").rglob("*") if path.name.endswith(".tmp")]
    assert not left, f"left behind: {left}"


def run_sweep(argv: list[str], moment_s: float | None) -> bool:
    """Whether a sweep ended by itself before it was killed, with all its workers."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        _, said = process.communicate(timeout=moment_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
    assert process.returncode == 0, said.decode(errors="replace")[-500:]
    return True


if __name__ == "__main__":
    sys.exit(main())
