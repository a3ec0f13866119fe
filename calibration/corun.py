"""How works side by side slow each other: the sharing model's figures, from co-run samples.

Pairs are fitted; triples never are, so their error tells how far the model carries. A member's rate is the work it did
while all were busy, over what it would have done alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdvsim.profiler import overlap
from pdvsim.sim.contention import Load, Sharing
from pdvsim.sim.core import GpuSpec
from pdvsim.sim.latency import Latency
from pdvsim.sim.profile import ContentionFit

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

SAME_SOLO = ["pair", "kind", "rows", "tokens", "steps", "chunk_tokens", "priority"]


@dataclass
class Member:
    """One work of a group as the sharing model sees it, and the rate it really had."""

    kind: str
    lane: str
    priority: int
    compute: float
    bandwidth: float
    turn_s: float
    nimble: bool
    measured: float
    share: float = 0.0
    rate: float = 0.0


@dataclass(frozen=True)
class Corun:
    """The fitted figures, and by how much the slowdowns of pairs and triples are off."""

    fit: ContentionFit
    pair_errors: Array
    triple_errors: Array


def members_of(frame: pd.DataFrame, gpu: GpuSpec, models: dict[str, Latency]) -> list[list[Member]]:
    """Every group of co-run samples that has a window in which all its members were busy."""
    corun = frame[frame["section"] == "corun"]
    solos = corun[corun["members"] == 1].groupby(SAME_SOLO, observed=True)["seconds"].median()
    found = []
    for _, group in corun[corun["members"] > 1].groupby(["pair", "group"], sort=True, observed=True):
        parts = [part for _, part in group.groupby("member", sort=True)]
        spans = [part[["start_s", "end_s"]].to_numpy(float) for part in parts]
        within = overlap.window(spans)
        if within is None:
            continue
        members = []
        for part, intervals in zip(parts, spans, strict=True):
            first = part.iloc[0]
            solo = float(solos[tuple(first[key] for key in SAME_SOLO)])
            rate = overlap.work_done_s(intervals, solo, within) / (within[1] - within[0])
            members.append(_member(first, rate, float(part["context_total"].mean()), solo, gpu, models[first["model"]]))
        found.append(members)
    return found


def _member(row: pd.Series, rate: float, context: float, solo_s: float, gpu: GpuSpec, model: Latency) -> Member:
    """Demands from the bytes and flops of the work over its measured time alone."""
    rows, steps, spec = int(row["bucket_rows"]), int(row["steps"]), model.spec
    prompt = int(row["chunk_tokens"])
    if rows:
        shape = model.shape(rows, int(row["tokens"]), steps)
        moved, flops = shape.bytes_0 + shape.bytes_1 * context, shape.flops_0 + shape.flops_1 * context
    else:
        moved = (spec.layer_params + spec.head_params) * spec.dtype_bytes + prompt * spec.kv_bytes_per_token
        flops = 2.0 * spec.layer_params * prompt + spec.attention_flops_per_pair * prompt * (prompt + 1) / 2
    return Member(
        kind=str(row["kind"]),
        lane={"draft": "decode"}.get(str(row["kind"]), str(row["kind"])),
        priority=int(row["priority"]),
        compute=min(1.0, flops / (solo_s * gpu.flops_per_s)),
        bandwidth=min(1.0, moved / (solo_s * gpu.bandwidth_bytes_per_s)),
        turn_s=solo_s / (steps * spec.layers),
        nimble=model.nimble(rows, int(row["tokens"]) if steps == 1 else 1, prompt),
        measured=rate,
    )


def errors(groups: Sequence[list[Member]], fit: ContentionFit) -> list[float]:
    """Predicted over measured slowdown, less one, of every member."""
    found = []
    for members in groups:
        ordered = len({member.priority for member in members}) > 1
        for member in members:
            member.share = 0.0  # another fit, another share
        loads: Sequence[Load] = members
        Sharing("fluid", "stream" if ordered else "none", fit).solve(loads)
        found += [member.measured / max(member.rate, 1e-3) - 1 for member in members]
    return found


def made(x: Array) -> ContentionFit:
    """The figures behind free parameters."""
    grown, spread = np.exp(x), 1 / (1 + np.exp(-x))
    return ContentionFit(
        stream_weight=1 + float(grown[0]),
        turn_exponent=float(min(grown[1], 2.0)),
        nimble_weight=1 + float(grown[2]),
        nimble_first_rate=float(spread[3]),
        nimble_together=1 + float(spread[4]),
        together=1 + float(spread[5]),
    )


def fit_corun(frame: pd.DataFrame, gpu: GpuSpec, models: dict[str, Latency]) -> Corun | None:
    """Fit pairs; None where the samples hold no co-runs."""
    from scipy.optimize import minimize

    groups = members_of(frame, gpu, models)
    pairs, triples = ([g for g in groups if (len(g) == 2) == two] for two in (True, False))
    if not pairs:
        return None

    def loss(x: Array) -> float:
        return float(np.mean(np.abs(np.log1p(errors(pairs, made(x))))))

    starts = [np.array([w, -0.2, 0.5, 0.7, -1.4, -1.8]) for w in (-3.0, -1.0)]
    found = [minimize(loss, x, method="Nelder-Mead", options={"maxiter": 1500, "maxfev": 1500}) for x in starts]
    best = min(found, key=lambda result: float(result.fun))
    fit = made(best.x)
    return Corun(fit, np.array(errors(pairs, fit)), np.array(errors(triples, fit)))
