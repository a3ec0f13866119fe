"""Measured pairs of servers without and with speculation: the evidence for ratios nearest to a question."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdvsim.bench.pool import Row
from pdvsim.bench.stats import interval
from pdvsim.calibration.validate.speculation import MeasuredPair, read_pairs
from pdvsim.sim.config import Experiment


def nearest_pair(candidate: Experiment | None, rows: Sequence[Row]) -> list[str]:
    """The measured pair of servers that is most like a candidate that drafts, as a line; none if there is none."""
    if candidate is None or candidate.hardware.predicted_engine == "pdvsim":  # measured by real runs of its own
        return []
    hardware, method, k = candidate.hardware, candidate.server.drafted_by, max(1, candidate.longest_draft)
    clients = max(1.0, interval(float(row["request_throughput"]) * row["mean_e2el_ms"] / 1e3 for row in rows).mean)
    pairs = [pair for pair in read_pairs() if (pair.drafted.engine, pair.method) == (hardware.predicted_engine, method)]

    def distance(pair: MeasuredPair) -> tuple[bool, bool, float]:
        side = pair.drafted
        off = abs(math.log(side.k / k)) + abs(math.log(side.concurrency / clients))
        return side.pair.partition(":")[2] != candidate.pair.target.name, side.card != hardware.gpu, off

    for pair in sorted(pairs, key=distance)[:1]:
        side = pair.drafted
        where = f"{side.engine} {side.version} on {side.card}, {side.pair}, k={side.k}, concurrency {side.concurrency}"
        return [f"measured nearest to this: {where}: {pair.speedup:.2f} times as fast with drafts ({pair.source})"]
    return [f"no pair of {hardware.predicted_engine} servers with and without {method} drafts was measured"]
