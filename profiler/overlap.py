"""What intervals of works that ran side by side say: how much each was slowed, and what the group gained over turns.

An interval is (start, end) in seconds since a common start. Works of one member follow each other without a pause, so
all members are busy from the latest first start to the earliest last end: the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Spans = NDArray[np.float64]  # (works, 2)


def window(members: Sequence[Spans]) -> tuple[float, float] | None:
    """When all members were busy at once; None where they never were."""
    if not all(len(spans) for spans in members):
        return None
    begin = max(float(spans[:, 0].min()) for spans in members)
    end = min(float(spans[:, 1].max()) for spans in members)
    return (begin, end) if begin < end else None


def slowdowns(spans: Spans, solo_s: float, within: tuple[float, float]) -> NDArray[np.float64]:
    """Time over time alone, of each work that ran wholly inside the window."""
    inside = (spans[:, 0] >= within[0]) & (spans[:, 1] <= within[1])
    ratio: NDArray[np.float64] = (spans[inside, 1] - spans[inside, 0]) / solo_s
    return ratio


def work_done_s(spans: Spans, solo_s: float, within: tuple[float, float]) -> float:
    """Seconds the member's work in the window would have taken alone; works cut by its ends count by their share."""
    length = spans[:, 1] - spans[:, 0]
    covered = np.clip(np.minimum(spans[:, 1], within[1]) - np.maximum(spans[:, 0], within[0]), 0.0, None)
    return float(solo_s * (covered / length).sum())


def span_over_serial(members: Sequence[Spans], solos_s: Sequence[float]) -> float | None:
    """The window over what the same work takes one after the other: under 1, running side by side gained."""
    within = window(members)
    if within is None:
        return None
    serial = sum(work_done_s(spans, solo, within) for spans, solo in zip(members, solos_s, strict=True))
    return (within[1] - within[0]) / serial
