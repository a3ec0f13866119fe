"""How errors are summed up, everywhere: the median and the 95th percentile of their sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def middle(errors: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Median and 95th percentile of the errors' sizes; nan where there are none."""
    sizes = np.abs(np.asarray(errors, np.float64)) if len(errors) else np.array([math.nan])
    return {"median": float(np.median(sizes)), "p95": float(np.percentile(sizes, 95))}
