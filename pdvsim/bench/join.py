"""The one comparison: what was measured of a setting, joined with what is predicted of it.

Every kind of validation makes these rows: real runs, servers of other engines, pairs of servers, benchmark files and
published tables. An error is predicted over measured, less one. Groups of rows are summed up by the median and the 95th
percentile of the errors' sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from pdvsim.bench.pool import Backend, Row, finished
from pdvsim.common.progress import Progress

Setting = TypeVar("Setting")
Labelled = TypeVar("Labelled")
Label = TypeVar("Label", bound=Hashable)


@dataclass(frozen=True)
class Joined(Generic[Setting]):
    """One setting with its measured and its predicted metrics."""

    of: Setting
    measured: Mapping[str, Any]
    predicted: Mapping[str, float]

    @cached_property
    def errors(self) -> dict[str, float]:
        """Predicted over measured, less one, of every metric that both have."""
        return relative(self.measured, self.predicted)


def relative(measured: Mapping[str, Any], predicted: Mapping[str, float]) -> dict[str, float]:
    """Errors by metric; without those that one side lacks."""
    return {
        name: value / measured[name] - 1
        for name, value in predicted.items()
        if measured.get(name) and math.isfinite(measured[name]) and math.isfinite(value)
    }


def middle(errors: Iterable[float]) -> dict[str, float]:
    """Median and 95th percentile of the errors' sizes; nan where there are none."""
    sizes = np.abs(np.fromiter(errors, np.float64))
    sizes = sizes if sizes.size else np.array([math.nan])
    return {"median": float(np.median(sizes)), "p95": float(np.percentile(sizes, 95))}


def of_metric(rows: Iterable[Joined[Any]], metric: str) -> list[float]:
    """The errors of one metric, of the rows that have it."""
    return [one.errors[metric] for one in rows if metric in one.errors]


def grouped(rows: Iterable[Labelled], label: Callable[[Labelled], Label]) -> dict[Label, list[Labelled]]:
    """Rows by their label, in the order of its first appearance."""
    groups: dict[Label, list[Labelled]] = {}
    for row in rows:
        groups.setdefault(label(row), []).append(row)
    return groups


def some_of(rows: Sequence[Labelled], most: int | None) -> Sequence[Labelled]:
    """At most this number of rows, spread over all; all of them where None."""
    return rows if most is None else rows[:: max(1, len(rows) // most)][:most]


@dataclass(frozen=True)
class Simulations:
    """The rows of points that were simulated, by number, and why others were not."""

    rows: dict[int, Row]
    failures: dict[int, str]
    unfinished: str  # after Ctrl-C: how many of them there are


def simulations(
    task: Callable[[int, Any], Row],
    points: Sequence[Any],
    what: str,
    jobs: int | None = None,
    quiet: bool = True,
    cost: Callable[[Any], float] = lambda point: 0.0,
) -> Simulations:
    """Simulate all points, those of the largest `cost` first: a long one that starts last runs alone at the end."""
    rows, failures = dict[int, Row](), dict[int, str]()
    items = sorted(enumerate(points), key=lambda item: -cost(item[1]))
    outcomes = finished(task, items, Backend(jobs))
    with Progress(len(points), what, quiet) as progress, closing(outcomes), suppress(KeyboardInterrupt):
        for number, outcome in enumerate(outcomes, 1):
            if outcome.row is None:
                failures[outcome.index] = outcome.reason
            else:
                rows[outcome.index] = outcome.row
            progress.update(number)
    done = len(rows) + len(failures)
    return Simulations(rows, failures, f"{done} of {len(points)} {what}" if done < len(points) else "")
