"""Chunks of tokens as requests get them: the time between two, and what each round accepted."""

from __future__ import annotations

import numpy as np

from pdvsim.sim.metrics.sketch import summed
from pdvsim.sim.records import DELIVERY_DTYPES, Array, Columns, rows_of


class Chunks:
    """The tokens of each request in the system, and the accepted drafts of all rounds."""

    def __init__(self) -> None:
        # of each request, by its number: its last chunk; the tokens of all its chunks in the window (`inside`); of the
        # chunks after the first, their number (`later`) and their tokens beyond one each (`gained`)
        names = (*DELIVERY_DTYPES, "inside", "later", "gained")
        self._open: Columns = {name: np.empty(0, DELIVERY_DTYPES.get(name, "i8")) for name in names}
        self._by_accepted = np.zeros(1, np.int64)
        self._tells = True

    def add(self, deliveries: Columns, inside: Array, counted: tuple[int, float]) -> Array:
        """More chunks, `inside` the window or not; returns the time since the one before, of requests that count.

        Those have numbers from the first of `counted` to below the second.
        """
        tokens, known = deliveries["tokens"], len(self._open["request"])
        more = {"inside": tokens * inside, "later": np.ones_like(tokens), "gained": tokens - 1}
        rows = {name: np.concatenate((old, (deliveries | more)[name])) for name, old in self._open.items()}
        order = _by_number(rows["request"])
        rows = rows_of(rows, order)
        first = np.concatenate(([True], rows["request"][1:] != rows["request"][:-1]))[: len(order)]
        heads = np.flatnonzero(first)
        start = heads[order[heads] >= known]
        rows["later"][start] = rows["gained"][start] = 0
        counts = ~first & (rows["request"] >= counted[0]) & (rows["request"] < counted[1])
        self._by_accepted = summed(self._by_accepted, np.bincount(rows["tokens"][counts] - 1))
        tails = np.append(heads[1:], len(order))[: len(heads)] - 1
        self._open = rows_of({name: rows[name] for name in DELIVERY_DTYPES}, tails)
        self._open |= {name: np.add.reduceat(rows[name], heads) for name in more}
        return np.diff(rows["time_s"], prepend=0)[counts]

    def leave(self, ids: Array) -> Columns:
        """Remove finished requests; returns their columns, zeros for those without a chunk."""
        at = np.searchsorted(self._open["request"], ids)
        got = {name: np.append(column, column.dtype.type(0))[at] for name, column in self._open.items()}
        some = got["request"] == ids
        self._open = rows_of(self._open, ~np.isin(self._open["request"], ids))
        return {name: column * some for name, column in got.items()}

    def correct_last(self, req: Columns, got: Columns) -> None:
        """A request's last round was cut at its length: what it accepted is the request's total less the others'.

        A round delivers its accepted drafts plus one token. Rows suffice only if every later one is a round, or the one
        token of a request that was read again.
        """
        has = got["later"] > 0
        seen = got["tokens"].astype(np.int64)[has] - 1
        accepted = (req["accepted"] - got["gained"])[has] + seen
        if not np.array_equal(got["later"], req["rounds"] + req["resumptions"]) or accepted.min(initial=0) < 0:
            self._tells = False
            return
        self._by_accepted = summed(self._by_accepted, np.bincount(accepted))
        self._by_accepted = summed(self._by_accepted, -np.bincount(seen))

    def per_position(self, drafts: int) -> list[float] | None:
        """Share of the drafting rounds that accepted each draft position; None where the rows are inconclusive.

        A round without drafts accepts none, and the share is over rounds that drafted.
        """
        counts = np.trim_zeros(self._by_accepted, "b")[::-1].cumsum()[::-1][1:]
        return (counts / drafts).tolist() if self._tells else None


def _by_number(numbers: Array) -> Array:
    """The stable order of numbers; where they are near each other numpy sorts them without comparing."""
    if len(numbers) and np.ptp(numbers) < 1 << 16:
        numbers = (numbers - numbers.min()).astype(np.uint16)
    return np.argsort(numbers, kind="stable")
