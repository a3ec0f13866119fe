"""What `--machine` is worth: runs predicted without and with this machine's pace.

`python studies/machine_pace.py OUT.json` needs a GPU of the profile's kind, and about five minutes. Every run is served
once, after a warm-up from which the pace is taken, and simulated twice.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pdvsim.realrun.machine import Machine, as_served
from pdvsim.realrun.site import architectures, dtype_of, make_models, prepare, serve
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Arch, Experiment, Server, Traffic
from pdvsim.sim.hardware.pace import pace_in
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import make_requests

METRICS = ("output_throughput", "mean_tpot_ms", "mean_ttft_ms", "mean_e2el_ms", "p99_itl_ms")
FIRST, SECOND = "tinyllama-1.1b:llama-2-7b", "qwen2-1.5b:qwen2-7b"


def closed(users: int, requests: int, seed: int) -> Traffic:
    """A closed loop of 128 tokens in and out, more or less."""
    return Traffic(
        "random", num_prompts=requests, input_len=128, output_len=128, random_range_ratio=0.3, max_concurrency=users,
        seed=seed,
    )  # fmt: skip


def arriving(rate: float, seed: int) -> Traffic:
    """80 requests of ShareGPT's lengths."""
    return Traffic(num_prompts=80, request_rate=rate, seed=seed)


PLAN: list[tuple[Arch, Traffic, Server]] = [
    ("colocated", closed(16, 120, 11), Server(FIRST, 3)),
    ("colocated", arriving(8.0, 12), Server(FIRST, 3)),
    ("colocated", closed(64, 300, 13), Server(FIRST, 2)),
    ("colocated", closed(4, 40, 14), Server(FIRST, 4, async_scheduling=True)),
    ("autoregressive", closed(16, 90, 15), Server(FIRST)),
    ("pd", closed(16, 120, 16), Server(FIRST, 3)),
    ("pdv", closed(16, 120, 17), Server(FIRST, 3)),
    ("pdv", arriving(8.0, 18), Server(FIRST, 3)),
    ("pd", arriving(6.0, 19), Server(FIRST, 2, async_scheduling=True)),
    ("colocated", closed(16, 120, 21), Server(SECOND, 3)),
    ("pdv", closed(16, 120, 22), Server(SECOND, 3)),
    ("colocated", arriving(8.0, 23), Server(SECOND, 3)),
]


def measured(experiment: Experiment, models: Any) -> dict[str, Any]:
    """One run: its pace, and the errors of its predictions in percent."""
    machine = Machine()
    rig = prepare(experiment, machine, make_requests(experiment.traffic, experiment.acceptance), models=dict(models))
    result = serve(experiment, machine, rig=rig)
    real, pace = summarise(result), pace_in(result.meta)
    if pace is None:
        raise ValueError("the profile does not know these models")
    here = pace.applied(covering_profile(experiment), experiment.pair)
    predicted = {"before": simulate(experiment), "after": simulate(experiment, profile=here)}
    errors = {
        name: {metric: round(100 * (summarise(one)[metric] / real[metric] - 1), 1) for metric in METRICS}
        for name, one in predicted.items()
    }
    return {
        "arch": experiment.arch, "pair": experiment.server.pair, "users": experiment.traffic.max_concurrency,
        "async": experiment.server.async_scheduling, "pace": pace._asdict(), "gpu": result.meta["gpu"],
        "torch": result.meta["torch"], "measured_at": result.meta["measured_at"],
        "idle_us": round(1e6 * result.meta["host_idle_s_per_round"]), **errors,
    }  # fmt: skip


def main(out: Path) -> int:
    """All runs; what is finished is kept."""
    machine, rows, models, pair = Machine(), [], None, ""
    for arch, traffic, server in PLAN:
        experiment = as_served(Experiment(arch, traffic, server=server))
        if server.pair != pair:
            pair, both = server.pair, as_served(Experiment("colocated", traffic, server=Server(server.pair)))
            models = make_models(architectures(both, machine), machine, 2048, dtype_of(machine), 0)
        rows.append(measured(experiment, models))
        out.write_text(json.dumps(rows, indent=1))
        print(rows[-1], flush=True)
    for metric in METRICS:
        for when in ("before", "after"):
            errors = np.abs([row[when][metric] for row in rows])
            print(f"{metric:20} {when:6}: mean {errors.mean():.1f}%, most {errors.max():.1f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
