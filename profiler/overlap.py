"""When co-running launches were all busy, and the work that each did meanwhile, from intervals.

An interval is (start, end) in seconds since a common start. Launches of one member follow each other without a pause,
so all members are busy from the latest first start to the earliest last end: the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Spans = NDArray[np.float64]  # (launches, 2)


def window(members: Sequence[Spans]) -> tuple[float, float] | None:
    """The interval in which all members were busy; None if there is none."""
    if not all(len(spans) for spans in members):
        return None
    begin = max(float(spans[:, 0].min()) for spans in members)
    end = min(float(spans[:, 1].max()) for spans in members)
    return (begin, end) if begin < end else None


def work_done_s(spans: Spans, solo_s: float | NDArray[np.float64], within: tuple[float, float]) -> float:
    """Seconds that a member's launches in the window would have taken alone; those cut by its ends count by share.

    `solo_s` is that of each launch, or the same for all.
    """
    length = spans[:, 1] - spans[:, 0]
    covered = np.clip(np.minimum(spans[:, 1], within[1]) - np.maximum(spans[:, 0], within[0]), 0.0, None)
    return float((solo_s * covered / length).sum())
