"""Student t intervals over replications, and paired differences between architectures.

A replication is one run with its own seed. The requests of one run share queues and batches, so they are not
independent, and a single replication has no interval (nan).

Percentiles of a few runs often agree by chance, if latencies are clustered and a percentile lies near the edge of a
cluster. A Student t interval over three runs then covers the mean of many runs in 60% to 90% of cases. So the standard
deviation of a percentile is at least the standard error from the order statistics within the runs (`NAME_se`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

CONFIDENCE = 0.95
SAME = 1e-9  # relative; smaller differences between runs are rounding
RESAMPLES = 200
ORDINALS = ("point", "run", "seed")  # columns that number the rows


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `n` replications and the half-width of its confidence interval (nan from one replication)."""

    mean: float
    half_width: float
    n: int

    @property
    def half(self) -> float:
        """The half-width; 0 from one replication."""
        return 0.0 if math.isnan(self.half_width) else self.half_width

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval; from one replication both are the mean."""
        return self.mean - self.half, self.mean + self.half


def interval(
    values: Iterable[float], confidence: float = CONFIDENCE, within: Iterable[float] = (), grid: float = 0.0
) -> Interval:
    """Student t interval of the mean over replications. Replications without a value are ignored.

    `within` are the standard errors of the values, each from its own run. They are the least deviation between runs,
    unless all runs have the same value, which is then not random. Values that were rounded to multiples of `grid`
    deviate by at least what rounding hides, grid / sqrt(12), even if they agree.
    """
    import numpy as np

    sample = np.array([v for v in values if v is not None], float)
    sample = sample[~np.isnan(sample)]
    if not len(sample):
        return Interval(math.nan, math.nan, 0)
    if len(sample) == 1:
        return Interval(float(sample[0]), math.nan, 1)
    from scipy.special import stdtrit  # the t quantile of scipy.stats, without its half second of import

    quantile = float(stdtrit(len(sample) - 1, 0.5 + confidence / 2))
    inside = np.array([v for v in within if v is not None], float)
    inside = inside[~np.isnan(inside)]
    deviation = float(sample.std(ddof=1))
    if len(inside) and deviation > SAME * abs(float(sample.mean())):
        deviation = max(deviation, math.sqrt(np.square(inside).mean()))
    deviation = max(deviation, grid / math.sqrt(12))
    half_width = quantile * deviation / math.sqrt(len(sample))
    return Interval(float(sample.mean()), half_width, len(sample))


def over_replications(points: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry per architecture, load, pair and varied value, in the order of `points`.

    Numbers become Intervals. A list of numbers (acceptance per position) is averaged per position. Texts that differ
    between replications (one stable, one overloaded) are joined, each once.
    """
    from pandas.api.types import is_numeric_dtype

    keys = ["arch", "load_kind", "load", *_varied(points)]
    numeric = [c for c in points.columns if c not in (*keys, *ORDINALS) and is_numeric_dtype(points[c])]
    texts = [c for c in points.columns if c not in (*keys, *ORDINALS, *numeric)]
    entries: list[dict[str, Any]] = []
    for key, group in points.groupby(keys, sort=False, dropna=False):
        entry: dict[str, Any] = dict(zip(keys, map(_plain, key), strict=True)) | {"replications": len(group)}
        values = group.to_dict("list")
        entry |= {name: _merged(values[name]) for name in texts}
        entry |= {name: interval(values[name], within=values.get(f"{name}_se", ())) for name in numeric}
        entries.append(entry)
    return entries


def headline(loads: Iterable[tuple[str, float]]) -> str:
    """The metric that compares architectures under a kind of load.

    At a finite rate or in a trace the arrivals set the throughput, so it is latency there.
    """
    arrivals = any(kind != "concurrency" and load != math.inf for kind, load in loads)
    return "mean_e2el_ms" if arrivals else "output_throughput"


def varied(points: pd.DataFrame) -> list[str]:
    """The columns, besides architecture and load, in which the entries of a sweep differ."""
    return [name for name in _varied(points) if points[name].nunique(dropna=False) > 1]


def _varied(points: pd.DataFrame) -> list[str]:
    """The pair, and the columns between a row's seed and its foundation: the varied flags.

    The profile's name is among them; it depends on the flags, so it separates no further points.
    """
    names = list(points.columns)
    pair = ["pair"] if "pair" in names else []
    if "seed" not in names or "foundation" not in names:
        return pair
    between = names[names.index("seed") + 1 : names.index("foundation")]
    return pair + [name for name in between if name not in pair]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value  # numpy's scalars


def _merged(values: Sequence[Any]) -> Any:
    """One value for all replications: the common one, intervals of a list's numbers, or different texts joined by /."""
    if all(isinstance(v, list) for v in values):
        return [interval(column) for column in zip_longest(*values, fillvalue=0.0)]
    if all(v == values[0] for v in values):
        return values[0]
    return "/".join(dict.fromkeys(str(v) for v in values))


def paired_differences(
    points: pd.DataFrame, metric: str, against: str, confidence: float = CONFIDENCE
) -> list[dict[str, Any]]:
    """Differences of `metric` between each other architecture and `against`, for the same seed, load and settings.

    Common random numbers pair the runs: the interval of the differences is much narrower than that of two independent
    means. `relative` is the same relative to `against`.
    """
    same = ["load_kind", "load", *_varied(points)]
    rows = points[[*same, "seed", "arch"]].assign(mine=points[metric])
    pair = rows.groupby([*same, "seed"], sort=False, dropna=False).ngroup()
    base = rows["arch"] == against
    rows["theirs"] = pair.map(rows["mine"][base].set_axis(pair[base]))
    entries: list[dict[str, Any]] = []
    for (*place, arch), group in rows.groupby([*same, "arch"], sort=False, dropna=False):
        if arch == against:
            continue
        mine, theirs = group["mine"], group["theirs"]
        entry = {"arch": arch, "against": against, **dict(zip(same, map(_plain, place), strict=True)), "metric": metric}
        entry["difference"] = interval((mine - theirs).tolist(), confidence)
        entries.append(entry | {"relative": interval((mine / theirs - 1).tolist(), confidence)})
    return entries


def resamples(rng: np.random.Generator, requests: int) -> NDArray[np.int64]:
    """How often each request of a run is drawn, in each resample of all of them."""
    import numpy as np

    drawn = rng.integers(requests, size=(RESAMPLES, requests))
    return np.array([np.bincount(each, minlength=requests) for each in drawn])


def resampled(
    values: NDArray[np.float64], of: NDArray[np.int64], counts: NDArray[np.int64], share: float
) -> NDArray[np.float64]:
    """The figure of each resample of the requests that the values are of: the quantile at `share`; nan: the mean."""
    import numpy as np

    drawn = (np.repeat(values, each[of]) for each in counts)
    return np.array([np.mean(each) if math.isnan(share) else np.quantile(each, share) for each in drawn])
