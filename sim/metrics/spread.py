"""Latencies of requests and of their chunks of tokens: samples, mean, deviation, quantiles and their errors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pdvsim.sim.records import Array, Columns


class Spread:
    """Count, mean, standard deviation and percentiles of numbers that come in parts.

    Mean and deviation are merged part by part (Chan, Golub and LeVeque, 1979). Equal numbers are kept once: the rows of
    a batch wait equally long for their next tokens, so a run has far fewer numbers than deliveries.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = math.nan
        self._squares = 0.0  # sum of squared distances from the mean
        self._parts: list[tuple[Array, Array]] = []  # distinct numbers in order, and how often each occurs

    def add(self, values: Array) -> None:
        """More numbers."""
        if not len(values):
            return
        mean = float(values.mean())
        squares, both, apart = np.square(values - mean).sum(), self.count + len(values), mean - self.mean
        if self.count:
            squares += self._squares + apart * apart * self.count * len(values) / both
            mean = self.mean + apart * len(values) / both
        self.count, self.mean, self._squares = both, mean, float(squares)
        numbers, counts = np.unique(values.astype(float), return_counts=True)
        self._parts.append((numbers, counts.astype(np.min_scalar_type(int(counts.max())))))

    @property
    def std(self) -> float:
        """Standard deviation."""
        return math.sqrt(self._squares / self.count) if self.count else math.nan

    def percentiles(self, ranks: list[float]) -> list[float]:
        """Percentiles as numpy's, between the two order statistics that a rank falls between."""
        if not self.count:
            return [math.nan] * len(ranks)
        if len(self._parts) > 1:
            every, counts = (np.concatenate(columns) for columns in zip(*self._parts, strict=True))
            numbers, at = np.unique(every, return_inverse=True)
            self._parts = [(numbers, np.bincount(at, counts).astype(np.int64))]
        [(numbers, counts)] = self._parts
        upto, marks = np.cumsum(counts, dtype=np.int64), []
        for rank in ranks:
            place = rank / 100 * (self.count - 1)
            low, high = (
                float(numbers[np.searchsorted(upto, at, "right")]) for at in (math.floor(place), math.ceil(place))
            )
            share = place - math.floor(place)  # from the nearer end, as numpy has it, to the last bit
            marks.append(low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share))
        return marks

    def standard_errors(self, ranks: list[float], independent: float) -> list[float]:
        """Standard error of each percentile, by order statistics, if `independent` of the numbers are independent.

        A quarter of the distance between the order statistics two standard errors of the rank below and above it: a
        percentile between two clusters of numbers has a large one, also where its neighbours are all alike.
        """
        shares = [rank / 100 for rank in ranks]
        off = [100 * 2 * math.sqrt(share * (1 - share) / max(independent, 1.0)) for share in shares]
        ends = [end for rank, two in zip(ranks, off, strict=True) for end in (max(rank - two, 0), min(rank + two, 100))]
        marks = self.percentiles(ends)
        return [(high - low) / 4 for low, high in zip(marks[::2], marks[1::2], strict=True)]


class Chunks:
    """The chunks of tokens of each request, by its number, and the accepted drafts of all rounds.

    A request is `counted` or not. A round delivers its accepted drafts plus one token.
    """

    def __init__(self, counted: Array) -> None:
        self.counted = counted
        self.inside = np.zeros(len(counted), np.int64)  # tokens of the chunks in the window
        self._last_s = np.full(len(counted), math.nan)
        self._last_tokens = np.zeros(len(counted), np.int64)
        self._later = np.zeros(len(counted), np.int64)  # chunks after the first,
        self._gained = np.zeros(len(counted), np.int64)  # and their tokens beyond one each
        self._by_accepted = np.zeros(256, np.int64)  # rounds: no draft is longer than a byte holds

    def add(self, deliveries: Columns, inside: Array) -> Array:
        """More chunks, those of a request in the order of time; returns the time since the chunk before, of counted
        requests.
        """
        order = _by_number(deliveries["request"])
        request, tokens, time_s = (deliveries[name][order] for name in ("request", "tokens", "time_s"))
        starts = np.append(True, request[1:] != request[:-1])[: len(order)]
        first, last = np.flatnonzero(starts), np.flatnonzero(np.append(starts[1:], True)[: len(order)])
        before_s = np.append(math.nan, time_s[:-1])[: len(order)]
        before_s[first] = self._last_s[request[first]]
        later = ~np.isnan(before_s)
        sums = (self.inside, tokens * inside[order]), (self._later, later), (self._gained, (tokens - 1) * later)
        for total, amount in sums if len(order) else ():
            total[request[first]] += np.add.reduceat(amount.astype(np.int64), first)
        self._last_s[request[last]], self._last_tokens[request[last]] = time_s[last], tokens[last]
        counts = later & self.counted[request]
        self._by_accepted += np.bincount(tokens[counts] - 1, minlength=256)
        return np.asarray((time_s - before_s)[counts])

    def per_position(self, req: Columns, drafts: int) -> list[float] | None:
        """Share of the drafting rounds that accepted each draft position; None where the rows are inconclusive.

        `req` are the counted requests, in order. The last round of a request was cut at its length: what it accepted
        is the request's total less the others'. Rows suffice only if every later one is a round, or the one token of a
        request that was read again. A round without drafts accepts none, and the share is over rounds that drafted.
        """
        later, gained, tokens = (column[self.counted] for column in (self._later, self._gained, self._last_tokens))
        has = later > 0
        seen = tokens[has] - 1
        accepted = (req["accepted"] - gained)[has] + seen
        if not np.array_equal(later, req["rounds"] + req["resumptions"]) or accepted.min(initial=0) < 0:
            return None
        numbers = np.concatenate((np.arange(256), accepted, seen))
        amounts = np.concatenate((self._by_accepted, np.ones_like(accepted), -np.ones_like(seen)))
        rounds = np.trim_zeros(np.bincount(numbers, amounts).astype(np.int64), "b")
        counts = rounds[::-1].cumsum()[::-1][1:]
        return list((counts / drafts).tolist())


def _by_number(numbers: Array) -> Array:
    """The stable order of numbers; where they are near each other numpy sorts them without comparing."""
    if len(numbers) and np.ptp(numbers) < 1 << 16:
        numbers = (numbers - numbers.min()).astype(np.uint16)
    return np.argsort(numbers, kind="stable")


def times_of(req: Columns) -> dict[str, Array]:
    """Seconds to the first token, per later token (0 where there is none) and from end to end."""
    e2el_s = req["finish_s"] - req["arrival_s"]
    later = req["output_tokens"] - 1
    tpot_s = np.divide(req["finish_s"] - req["first_token_s"], later, out=np.zeros_like(e2el_s), where=later > 0)
    return {"ttft": req["first_token_s"] - req["arrival_s"], "tpot": tpot_s, "e2el": e2el_s}


def in_time(times_s: dict[str, Array], levels: Mapping[str, float]) -> int:
    """Requests that meet all service levels, of those with these latencies."""
    return int(np.logical_and.reduce([times_s[name] <= level for name, level in levels.items()]).sum())
