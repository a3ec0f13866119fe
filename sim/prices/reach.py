"""The measured range of a profile, and the share of a run's GPU time outside it.

Only upper limits count. A launch counts in full if it exceeds what its model was measured at alone. Otherwise it counts
for the time in which it co-runs with another launch and one of them exceeds what was measured when co-running.

Not covered: pairs of models that were never measured co-running, and combinations of limits (the largest batch with the
longest context).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import KINDS
from pdvsim.sim.limits import MAX_TOKENS, Range
from pdvsim.sim.prices.costs import STRETCHES
from pdvsim.sim.records import Columns

Array = NDArray[Any]

DRAFT = KINDS.index("draft")
NOTABLE_SHARE = 0.01  # of the GPU time
SIZES = {
    "rows": "rows",
    "k": "draft length",
    "context": "context",
    "prompt_tokens": "prompt tokens in a forward",
    "prompt_start": "prompt cached before",
    "tokens": "tokens in a forward",
}


Size = Annotated[int, Range(0, MAX_TOKENS)]


@dataclass(frozen=True)
class Reach:
    """The largest of each size that was measured; None: unknown."""

    rows: Size | None = None
    k: Size | None = None  # draft length: steps of a draft, tokens per row of a verify, less one
    context: Size | None = None  # cached tokens per row
    prompt_tokens: Size | None = None  # in one forward
    prompt_start: Size | None = None  # tokens of a prompt cached before
    tokens: Size | None = None  # new tokens of one forward, rows and prompts


@dataclass(frozen=True)
class Reaches:
    """Measured ranges of the draft and the target model alone, and of co-running launches."""

    draft: Reach | None = None
    target: Reach | None = None
    together: Reach | None = None
    widest: int = 2  # most tokens per row in the first forward of a draft


class Outside:
    """Adds up the GPU time of launches, and how much of it is outside what was measured."""

    def __init__(self, reaches: Reaches) -> None:
        unknown = Reach()
        self._alone = [asdict(reach or unknown) for reach in (reaches.draft, reaches.target)]
        self._together = {name: most for name, most in asdict(reaches.together or unknown).items() if most is not None}
        self._widest = reaches.widest
        self._known = any((reaches.draft, reaches.target, reaches.together))
        self._all_s = self._outside_s = 0.0
        self._furthest: dict[str, tuple[float, float]] = {}  # what was reached, and the limit it is beyond
        self._open: list[Columns] = []  # launches that others, not yet added, may overlap
        self._settled_s = -math.inf

    def add(self, launches: Columns, settled_s: float = math.inf) -> None:
        """More launches, in any order; those still to come began at `settled_s` or later."""
        if not self._known:
            return
        spent_s = launches["end_s"] - launches["start_s"]
        self._all_s += float(spent_s.sum())
        sizes = _sizes(launches, self._widest)
        target = launches["role"] == 1
        beyond = np.zeros(len(target), bool)
        for name, size in sizes.items():
            low, high = (math.inf if reach[name] is None else reach[name] for reach in self._alone)
            if size.max(initial=0) <= min(low, high):
                continue
            over = size > np.where(target, high, low)
            for limit, mine in ((low, over & ~target), (high, over & target)):
                self._reached(name, size[mine], limit)
            beyond |= over
        self._outside_s += float(spent_s[beyond].sum())
        if self._together:
            times = {name: launches[name] for name in ("start_s", "end_s")}
            place = launches["replica"].astype(np.int64) * 256 + launches["gpu"]
            self._open.append(times | sizes | {"place": place, "counted": beyond})
            self._add_overlaps(settled_s)

    def _add_overlaps(self, settled_s: float) -> None:
        """Count what ran together up to then; launches that reach beyond it are kept."""
        launches = {name: np.concatenate([part[name] for part in self._open]) for name in self._open[0]}
        begin_s, end_s = (launches[name].clip(self._settled_s, settled_s) for name in ("start_s", "end_s"))
        large = any(launches[name].max(initial=0) > limit for name, limit in self._together.items())
        for gpu in np.flatnonzero(np.bincount(launches["place"])).tolist() if large else ():
            here = np.flatnonzero(launches["place"] == gpu)
            columns = {name: column[here] for name, column in launches.items()}
            over = {name: columns[name] > limit for name, limit in self._together.items()}
            beyond = np.logical_or.reduce(list(over.values()))
            if not beyond.any():
                continue
            shared_s = _shared_s(begin_s[here], end_s[here], beyond)
            self._outside_s += float(shared_s[~columns["counted"]].sum())
            for name, limit in self._together.items():
                self._reached(f"together_{name}", columns[name][over[name] & (shared_s > 0)], limit)
        last = launches["end_s"] > settled_s
        self._open = [{name: column[last] for name, column in launches.items()}]
        self._settled_s = settled_s

    def _reached(self, name: str, sizes: Array, limit: float) -> None:
        if len(sizes):
            most = float(sizes.max())
            if most > self._furthest.get(name, (0.0, 0.0))[0]:
                self._furthest[name] = (most, float(limit))

    def metrics(self) -> dict[str, Any]:
        """The share outside, and by size how far it went and what was measured; nothing where no range is known."""
        if not self._known:
            return {}
        outside: dict[str, float] = {"share": self._outside_s / self._all_s if self._all_s else 0.0}
        for name, (most, limit) in sorted(self._furthest.items()):
            outside |= {name: most, f"{name}_limit": limit}
        return {"outside_measured": outside}


def _sizes(launches: Columns, widest: int) -> dict[str, Array]:
    """Each launch's sizes under the names of a Reach."""
    rows, steps, width = launches["rows"], launches["steps"], launches["width"]
    drafter = launches["role"] == 0
    first = np.where(drafter, np.minimum(width, widest), width)  # what a drafter lacks beyond that it prefills
    prompt = np.maximum(0, launches["tokens"] - rows * (first + steps - 1))  # rows of n-gram drafts may have fewer
    lags = drafter & (width > widest)
    prompt = np.where(lags, np.minimum(prompt, STRETCHES * (width - 1)), prompt)
    return {
        "rows": rows,
        "k": np.where(rows == 0, 0, np.where(launches["kind"] == DRAFT, steps, first - 1)),
        "context": launches["context"] / np.maximum(rows, 1),
        "prompt_tokens": prompt,
        "prompt_start": launches["prompt_start"],
        "tokens": rows * first + prompt,
    }


def _shared_s(start_s: Array, end_s: Array, beyond: Array) -> Array:
    """For each launch the time in which it co-runs and some running launch is `beyond`."""
    count = len(start_s)
    at_s = np.concatenate([start_s, end_s])
    change = np.concatenate([np.ones(count, np.int64), -np.ones(count, np.int64)])
    order = np.argsort(at_s, kind="stable")
    running = np.cumsum(change[order])
    odd = np.cumsum((change * np.concatenate([beyond, beyond]))[order])
    span_s = np.diff(at_s[order]) * ((running > 1) & (odd > 0))[:-1]
    passed_s = np.empty(2 * count)
    passed_s[order] = np.concatenate([[0.0], np.cumsum(span_s)])
    return np.asarray(passed_s[count:] - passed_s[:count])
