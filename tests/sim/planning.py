"""What is planned with on an H200, running requests, and the rounds that acceptance gives a request."""

from __future__ import annotations

from typing import Any

from pdvsim.sim.config import Contention, Priority
from pdvsim.sim.core import Request
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.models.presets import pair
from pdvsim.sim.policies.planner import Planner
from pdvsim.sim.prices.contention import Sharing
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.host import HostCost
from pdvsim.sim.prices.profile import builtin

PAIR = "tinyllama-1.1b:llama-2-7b"
OUTPUT = 500


def planner(
    host: HostCost, priority: Priority = "none", contention: Contention = "fluid", dear_draft: float = 1.0
) -> Planner:
    """The built-in latency model; `dear_draft` makes the GPU, as the planner sees it, that much slower at drafting."""
    profile, models = builtin("h200"), pair(PAIR)
    fits: Any = {
        "draft": CostModel(models.draft, profile.fit(models.draft).scaled(dear_draft)),
        "target": CostModel(models.target, profile.fit(models.target)),
    }
    peak = (profile.gpu.flops_per_s, profile.gpu.bandwidth_bytes_per_s)
    return Planner(fits, Sharing(contention, priority, profile.contention), peak, host)


def batch(rows: int, context: int) -> Batch:
    """Running requests with `context` tokens cached each, `OUTPUT` tokens delivered."""
    requests = [Request(i, 0.0, context, 1000, bytes(1000)) for i in range(rows)]
    for request in requests:
        request.state.context, request.state.emitted = context, OUTPUT
    return Batch(requests)


def walk(runs: bytes, k: int, start: int = 0) -> list[int]:
    """Accepted drafts of each round of a request: a round at p accepts min(runs[p], k) and emits one more."""
    counts, at = [], start
    while at < len(runs):
        counts.append(min(runs[at], k))
        at += counts[-1] + 1
    return counts
