"""A Result made by hand: every request is served alone, so that each row can be checked on paper."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from pdvsim.sim.config import Experiment
from pdvsim.sim.core import KINDS
from pdvsim.sim.records import DELIVERY_DTYPES, LANES, LAUNCH_DTYPES, REQUEST_DTYPES, Columns, Result

META = {
    "foundation": "made up for a test",
    "profile": "synthetic",
    "gpu": "h200",
    "gpus": 1,
    "kv_capacity_tokens": 1000,
    "kv_peak_tokens": 10,
    "clock": "simulated",
    "bandwidth_bytes_per_s": 1e9,
}


def columns(rows: list[dict[str, Any]], dtypes: dict[str, str]) -> Columns:
    return {name: np.array([row.get(name, 0) for row in rows], dtype) for name, dtype in dtypes.items()}


def result(
    experiment: Experiment,
    requests: list[dict[str, Any]],
    deliveries: list[tuple[int, int, float]] = (),  # type: ignore[assignment]
    launches: list[dict[str, Any]] = (),  # type: ignore[assignment]
) -> Result:
    """Rows as dictionaries, lanes and kinds by name."""
    coded = [launch | {"lane": LANES.index(launch["lane"]), "kind": KINDS.index(launch["kind"])} for launch in launches]
    delivered = [dict(zip(DELIVERY_DTYPES, row, strict=True)) for row in deliveries]
    return Result(
        experiment,
        columns(requests, REQUEST_DTYPES),
        columns(delivered, DELIVERY_DTYPES),
        columns(coded, LAUNCH_DTYPES),
        dict(META),
    )


def served_alone(experiment: Experiment, replicas: int = 1) -> Result:
    """Arrivals, rounds and acceptance from the experiment's seed; nothing waits for anything else."""
    traffic = experiment.traffic
    rng = random.Random(traffic.seed)
    requests: list[dict[str, Any]] = []
    deliveries: list[tuple[int, int, float]] = []
    launches: list[dict[str, Any]] = []
    arrival_s = 0.0
    for id in range(traffic.num_prompts):
        arrival_s += 0.0 if math.isinf(traffic.request_rate) else rng.expovariate(traffic.request_rate)
        output, k, now = rng.randint(1, 40), experiment.server.num_speculative_tokens, arrival_s + 0.001
        row: dict[str, Any] = {"id": id, "replica": id % replicas, "arrival_s": arrival_s, "admitted_s": now}
        row |= {"prompt_tokens": rng.randint(1, 100), "output_tokens": output}
        row |= dict.fromkeys(("rounds", "drafts", "drafted", "accepted", "refused"), 0)
        row |= {"prefill_s": 0.01, "draft_s": 0.0, "verify_s": 0.0}
        launch = {"replica": id % replicas, "gpu": 0, "rows": 1, "queue_depth": id % 3, "bytes": 1e6, "steps": 1}
        launches.append(
            launch | {"lane": "prefill", "kind": "prefill", "start_s": now, "end_s": now + 0.01, "solo_s": 0.01}
        )
        now += 0.01
        row["first_token_s"] = now
        deliveries.append((id, 1, now))
        emitted = 1
        while emitted < output:
            accepted = rng.randint(0, k)
            for lane, kind, length_s in (("decode", "draft", 0.002), ("verify", "verify", 0.008)):
                launches.append(
                    launch
                    | {"lane": lane, "kind": kind, "start_s": now, "end_s": now + length_s, "solo_s": length_s / 2}
                )
                row[f"{kind}_s"] += length_s
                now += length_s
            tokens = min(accepted + 1, output - emitted)
            emitted += tokens
            deliveries.append((id, tokens, now))
            row["rounds"] += 1
            row["drafts"] += 1
            row["drafted"] += k
            row["accepted"] += accepted
            row["refused"] += accepted < k
        row["finish_s"] = now
        requests.append(row)
    deliveries.sort(key=lambda d: d[2])
    launches.sort(key=lambda r: float(r["start_s"]))
    return result(experiment, requests, deliveries, launches)
