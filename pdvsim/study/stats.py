"""How sure a mean is: Student t intervals over replications, and paired differences between architectures.

A replication is one run with its own seed. The requests of one run share queues and batches, so they are not
independent draws and no interval is taken over them alone: from a single replication the answer is nan.

Percentiles of a few runs often agree by chance, where latencies come in clusters and a percentile lies near the edge of
one. A Student t interval over three runs then covers the mean of many runs in 60% to 90% of cases. So the standard
deviation of a percentile is at least what the order statistics within the runs tell (`NAME_se`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

CONFIDENCE = 0.95
SAME = 1e-9  # relative; runs that differ by less do so by rounding
ORDINALS = ("point", "run", "seed")  # columns that number the rows


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `n` replications and the half-width of its confidence interval (nan from one replication)."""

    mean: float
    half_width: float
    n: int


def interval(values: Iterable[float], confidence: float = CONFIDENCE, within: Iterable[float] = ()) -> Interval:
    """Student t interval of the mean over replications. A replication without a value is left out.

    `within` are the standard errors of the values, each from its own run: the deviation between runs counts as no less,
    unless all runs have the same value. Then there is nothing random in it.
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
    half_width = quantile * deviation / math.sqrt(len(sample))
    return Interval(float(sample.mean()), half_width, len(sample))


def over_replications(points: pd.DataFrame, confidence: float = CONFIDENCE) -> list[dict[str, Any]]:
    """One entry per architecture, load, pair and value of what was varied, in the order of `points`.

    Numbers become Intervals, the rest is kept.

    A list of numbers (acceptance per position) is averaged place by place. A text on which the replications differ
    (one stable, one overloaded) names each value once.
    """
    from pandas.api.types import is_numeric_dtype

    keys = ["arch", "load_kind", "load", *_varied(points)]
    numeric = [c for c in points.columns if c not in (*keys, *ORDINALS) and is_numeric_dtype(points[c])]
    texts = [c for c in points.columns if c not in (*keys, *ORDINALS, *numeric)]
    entries: list[dict[str, Any]] = []
    for key, group in points.groupby(keys, sort=False, dropna=False):
        entry: dict[str, Any] = dict(zip(keys, map(_plain, key), strict=True))
        entry["replications"] = len(group)
        entry |= {name: _merged(group[name].tolist(), confidence) for name in texts}
        for name in numeric:
            within = group[f"{name}_se"].tolist() if f"{name}_se" in group else ()
            entry[name] = interval(group[name].tolist(), confidence, within)
        entries.append(entry)
    return entries


def headline(loads: Iterable[tuple[str, float]]) -> str:
    """The metric that architectures are compared by under loads of a kind and a size.

    Where requests arrive by themselves, at a finite rate or as in a trace, arrivals set the throughput: then latency.
    """
    arrivals = any(kind != "concurrency" and load != math.inf for kind, load in loads)
    return "mean_e2el_ms" if arrivals else "output_throughput"


def varied(points: pd.DataFrame) -> list[str]:
    """Of the columns that tell the entries of a sweep apart beside architecture and load, those that differ."""
    return [name for name in _varied(points) if points[name].nunique(dropna=False) > 1]


def _varied(points: pd.DataFrame) -> list[str]:
    """The pair, and what a sweep writes between a row's seed and its foundation: the flags it varies.

    The profile's name stands there too; it goes with the flags, so that it parts nothing that they do not.
    """
    names = list(points.columns)
    pair = ["pair"] if "pair" in names else []
    if "seed" not in names or "foundation" not in names:
        return pair
    between = names[names.index("seed") + 1 : names.index("foundation")]
    return pair + [name for name in between if name not in pair]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value  # numpy's scalars


def _merged(values: Sequence[Any], confidence: float) -> Any:
    """One value for all replications: the common one, intervals of a list's numbers, or unlike texts side by side."""
    if all(isinstance(v, list) for v in values):
        return [interval(column, confidence) for column in zip_longest(*values, fillvalue=0.0)]
    if all(v == values[0] for v in values):
        return values[0]
    return "/".join(dict.fromkeys(str(v) for v in values))


def paired_differences(
    points: pd.DataFrame, metric: str, against: str, confidence: float = CONFIDENCE
) -> list[dict[str, Any]]:
    """What each other architecture adds to `metric` over `against`, from runs with the same seed, load and settings.

    Common random numbers make the runs pairs: the interval is over the differences, far narrower than that of two
    independent means. `relative` is the same as a share of `against`.
    """
    same = ["load_kind", "load", *_varied(points)]
    keys = [*same, "seed"]
    base = points[points["arch"] == against].set_index(keys)[metric]
    entries: list[dict[str, Any]] = []
    for (*place, arch), group in points.groupby([*same, "arch"], sort=False, dropna=False):
        if arch == against:
            continue
        mine = group.set_index(keys)[metric]
        theirs = base.reindex(mine.index)
        entries.append(
            {
                "arch": arch,
                "against": against,
                **dict(zip(same, map(_plain, place), strict=True)),
                "metric": metric,
                "difference": interval((mine - theirs).tolist(), confidence),
                "relative": interval((mine / theirs - 1).tolist(), confidence),
            }
        )
    return entries
