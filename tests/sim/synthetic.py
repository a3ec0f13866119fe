"""A Result made by hand, so that each row can be checked on paper."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdvsim.sim.config import Experiment
from pdvsim.sim.core import KINDS
from pdvsim.sim.records import DELIVERY_DTYPES, LANES, LAUNCH_DTYPES, REQUEST_DTYPES, Columns, Result

META = {
    "foundation": "made up for a test", "profile": "synthetic", "gpu": "h200", "gpus": 1, "kv_capacity_tokens": 1000,
    "kv_peak_tokens": 10, "clock": "simulated", "bandwidth_bytes_per_s": 1e9,
}  # fmt: skip


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
        experiment, columns(requests, REQUEST_DTYPES), columns(delivered, DELIVERY_DTYPES),
        columns(coded, LAUNCH_DTYPES), dict(META),
    )  # fmt: skip
