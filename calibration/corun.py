"""How works side by side slow each other: the sharing model's few figures, from co-run samples.

Pairs are fitted (one efficiency for each pair of kinds, one weight for a stream priority); triples never are, so their
error tells how far the model carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdvsim.profiler import overlap
from pdvsim.sim.contention import Sharing
from pdvsim.sim.core import GpuSpec
from pdvsim.sim.latency import ForwardFit, Latency, Shape
from pdvsim.sim.profile import ContentionFit

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

PAIRS = ("draft+prefill", "draft+verify", "prefill+verify")


@dataclass
class Member:
    """One work of a group, as the sharing model sees it, and how much it was slowed."""

    kind: str
    lane: str
    priority: int
    compute: float
    bandwidth: float
    slowdown: float
    rate: float = 0.0


@dataclass(frozen=True)
class Corun:
    """The fitted figures, and the relative errors of the slowdowns by group size."""

    fit: ContentionFit
    pair_errors: Array
    triple_errors: Array


def members_of(frame: pd.DataFrame, gpu: GpuSpec, models: dict[str, Latency]) -> list[list[Member]]:
    """Every group of co-run samples that has a window in which all its members were busy."""
    alone = frame[(frame["section"] == "corun") & (frame["members"] == 1)]
    keys = ["pair", "kind", "rows", "tokens", "steps", "chunk_tokens", "priority"]
    solos = alone.groupby(keys, observed=True)["seconds"].median()
    found = []
    together = frame[(frame["section"] == "corun") & (frame["members"] > 1)]
    for _, group in together.groupby(["pair", "group"], sort=True, observed=True):
        parts = [part for _, part in group.groupby("member", sort=True)]
        spans = [part[["start_s", "end_s"]].to_numpy(float) for part in parts]
        within = overlap.window(spans)
        if within is None:
            continue
        members = []
        for part, intervals in zip(parts, spans, strict=True):
            first = part.iloc[0]
            solo = float(solos[tuple(first[key] for key in keys)])
            slowed = overlap.slowdowns(intervals, solo, within)
            if len(slowed):
                members.append(_member(first, float(np.median(slowed)), part, solo, gpu, models[first["model"]]))
        if len(members) == len(parts):
            found.append(members)
    return found


def _member(row: pd.Series, slowdown: float, part: pd.DataFrame, solo_s: float, gpu: GpuSpec, model: Latency) -> Member:
    """Demands from the bytes and flops of the work over its measured time alone."""
    context = float(part["context_total"].mean())
    shape = model.shape(int(row["bucket_rows"]), max(1, int(row["tokens"])), int(row["steps"])) if row["rows"] else None
    moved, flops = _asked(shape, context) if shape else _prompt(model, float(row["chunk_tokens"]))
    return Member(
        kind=str(row["kind"]),
        lane={"draft": "decode"}.get(str(row["kind"]), str(row["kind"])),
        priority=int(row["priority"]),
        compute=min(1.0, flops / (solo_s * gpu.flops_per_s)),
        bandwidth=min(1.0, moved / (solo_s * gpu.bandwidth_bytes_per_s)),
        slowdown=slowdown,
    )


def _asked(shape: Shape, context: float) -> tuple[float, float]:
    return shape.bytes_0 + shape.bytes_1 * context, shape.flops_0 + shape.flops_1 * context


def _prompt(model: Latency, tokens: float) -> tuple[float, float]:
    spec = model.spec
    moved = (spec.layer_params + spec.head_params) * spec.dtype_bytes + tokens * spec.kv_bytes_per_token
    flops = 2 * spec.layer_params * tokens + 2 * spec.head_params
    return moved, flops + spec.attention_flops_per_pair * tokens * (tokens + 1) / 2


def errors(groups: Sequence[list[Member]], fit: ContentionFit) -> list[float]:
    """Predicted over measured slowdown, less one, of every member."""
    found = []
    for members in groups:
        ordered = len({m.priority for m in members}) > 1
        Sharing("fluid", "stream" if ordered else "none", fit).solve(members)
        found += [1 / max(m.rate, 1e-3) / max(1.0, m.slowdown) - 1 for m in members]
    return found


def fit_corun(frame: pd.DataFrame, gpu: GpuSpec, fits: dict[str, tuple[Latency, ForwardFit]]) -> Corun | None:
    """Fit pairs; None where the samples hold no co-runs."""
    from scipy.optimize import minimize

    groups = members_of(frame, gpu, {name: latency for name, (latency, _) in fits.items()})
    pairs = [g for g in groups if len(g) == 2]
    if not pairs:
        return None

    def made(x: Array) -> ContentionFit:
        share = [float(1 / (1 + np.exp(-v))) for v in x[1:]]
        return ContentionFit(stream_weight=1 + float(np.exp(x[0])), efficiency=dict(zip(PAIRS, share, strict=True)))

    def loss(x: Array) -> float:
        return float(np.mean(np.abs(np.log1p(errors(pairs, made(x))))))

    starts = [np.array([np.log(w), e, e, e]) for w in (0.2, 1.0, 3.0) for e in (1.0, 3.0)]
    best = min((minimize(loss, x, method="Nelder-Mead") for x in starts), key=lambda found: float(found.fun))
    fit = made(best.x)
    return Corun(fit, np.array(errors(pairs, fit)), np.array(errors([g for g in groups if len(g) > 2], fit)))
