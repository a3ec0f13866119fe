"""A batch: requests that one worker decodes together, with k draft tokens each, until each has all its tokens.

Acceptance is drawn before the run, so all rounds of a request are known when it joins. The batch keeps, by round, the
sums over its rows that a launch and the KV cache need, and a round then costs the same whatever the number of rows.
What became of a request is written to it when it finishes, or when somebody looks: to a policy a batch is a list of
requests like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self, overload

import numpy as np

from pdvsim.sim.core import Request, packed_tally
from pdvsim.sim.machine.kv import KvCache
from pdvsim.sim.records import Array, Deliveries

ROUNDS = 4096  # after so many a batch starts its arrays again


class Way(NamedTuple):
    """How a round goes: the lanes of its draft and its verify, and what lies between them."""

    draft_lane: str
    verify_lane: str
    watched: bool  # the host sees the draft through before it launches the verify
    handed: bool  # and hands the rows over to the other lane, and back
    depth: int  # requests queued for either lane


class Path:
    """The rounds of one request in a batch."""

    __slots__ = ("accepted", "draft_s", "emitted", "first", "verify_s", "wait_s")

    def __init__(self, request: Request, k: int, first: int) -> None:
        at, end = request.emitted, request.output_tokens
        emitted, accepted = [at], []
        if k:
            runs = request.runs
            while at < end:
                run = runs[at]
                if run > k:
                    run = k
                accepted.append(run)
                at += run + 1
                emitted.append(at)
            emitted[-1] = end
            self.emitted = np.array(emitted)
        else:
            self.emitted = np.arange(at, end + 1)
            accepted = [0] * (end - at)
        self.accepted: list[int] = accepted  # draft tokens, by round
        self.first = first  # the batch's round in which it takes part first
        self.draft_s = self.wait_s = self.verify_s = 0.0  # of the batch, when it joined


class Verdict(Sequence[int]):
    """How many draft tokens of each row the target accepts in the round under way."""

    def __init__(self, batch: Batch) -> None:
        self._batch, self._round = batch, batch.round

    def _of(self, path: Path) -> int:
        return path.accepted[self._round - path.first]

    def __iter__(self) -> Iterator[int]:
        return map(self._of, self._batch.paths.values())

    def __len__(self) -> int:
        return len(self._batch)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class Batch(list[Request]):
    """Rows with k draft tokens each. `round` counts the rounds that are over; the sums are those of each round."""

    def __init__(self, rows: Iterable[Request], k: int, kv: KvCache, deliveries: Deliveries, rereads: bool) -> None:
        super().__init__()
        self.k = k
        self.kv, self.deliveries, self.rereads = kv, deliveries, rereads
        self.busy = False  # a round of it is under way
        self.ready_s = -1.0  # when it was drafted for
        self._clear()
        self += rows

    def _clear(self) -> None:
        self.round = 0
        self.times_s: list[float] = []  # when each round was over
        self.paths: dict[Request, Path] = {}  # in the order of the rows
        self.ends: dict[int, list[Request]] = {}  # who finishes with which round
        self.end = 0  # the first of these
        self.draft_s = self.wait_s = self.verify_s = 0.0  # that its rounds took so far
        self.held_tokens = 0  # of the KV cache, by all rows
        self.granted = -1  # the last round that there is room for
        self._context = np.zeros(ROUNDS, np.int64)
        self._owed = np.zeros(ROUNDS, np.int64)
        self._held = np.zeros(ROUNDS, np.int64)

    # rounds ----------------------------------------------------------------------------------------------------

    def __iadd__(self, rows: Iterable[Request]) -> Self:  # type: ignore[override, misc]
        """Rows join before the next round."""
        if self.round >= ROUNDS:
            rows = [*self.dissolve(), *rows]
            self.clear()
            self._clear()
        for row in rows:
            self.append(row)
        return self

    def append(self, row: Request) -> None:
        if not self:
            self.kv.batches.append(self)
            self.deliveries.batches.append(self)
        first, k = self.round, self.k
        path = self.paths[row] = Path(row, k, first)
        path.draft_s, path.wait_s, path.verify_s = self.draft_s, self.wait_s, self.verify_s
        end = first + len(path.accepted)
        if end > len(self._context):
            more = np.zeros(end, np.int64)
            self._context, self._owed, self._held = (
                np.concatenate((sums, more)) for sums in (self._context, self._owed, self._held)
            )
        emitted = path.emitted
        context = emitted[:-1] + (row.context - row.emitted)
        self._context[first:end] += context
        if k:
            self._owed[first] = max(self._owed.item(first), row.owed)
            gained = emitted[1:-1] - emitted[:-2]
            owed = gained - 1 if self.rereads else gained > k
            later = self._owed[first + 1 : end]
            np.maximum(later, owed, out=later)
        if self.kv.paged:
            self._held[first:end] += np.maximum(self.kv.blocks(context + (k + 1)), row.held_tokens)
            self.held_tokens += row.held_tokens
        self.ends.setdefault(end, []).append(row)
        self.end = min(self.end, end) if self else end
        super().append(row)

    @property
    def context(self) -> int:
        """Cached tokens of all rows, before the next round."""
        return self._context.item(self.round)

    @property
    def owed(self) -> int:
        """The most that any row's drafter has yet to catch up with."""
        return self._owed.item(self.round) if self.k else 0

    def sums(self, rounds: int) -> tuple[Array, Array]:
        """Both, of the next rounds."""
        here = slice(self.round, self.round + rounds)
        return self._context[here], self._owed[here]

    def hold(self) -> bool:
        """Room in the KV cache for the next round, if there is."""
        if self.kv.paged:
            need = self._held.item(self.round)
            if need > self.held_tokens:
                if not self.kv.take(need - self.held_tokens):
                    return False
                self.held_tokens = need
            self.granted = self.round
        self.busy = True
        return True

    def roomy(self, rounds: int) -> int:
        """Of the next rounds, how many there is room for."""
        if not self.kv.paged:
            return rounds
        free = self.kv.capacity_tokens - self.kv.used_tokens + self.held_tokens
        return int(np.searchsorted(self._held[self.round : self.round + rounds], free, "right"))

    def pass_rounds(self, times_s: list[float], spent_s: tuple[float, float, float]) -> None:
        """So many rounds are over, at these times, of which parts took so long; there was room for them."""
        self.draft_s, self.wait_s, self.verify_s = (
            a + b for a, b in zip((self.draft_s, self.wait_s, self.verify_s), spent_s, strict=True)
        )
        self.times_s += times_s
        self.round += len(times_s)
        if self.kv.paged:
            self.granted = self.round - 1
            need = self._held.item(self.granted)
            self.kv.take(need - self.held_tokens)
            self.held_tokens = need

    def verdict(self) -> Verdict:
        """On the draft tokens of the round under way."""
        return Verdict(self)

    def settle(self, now_s: float) -> list[Request]:
        """A round is over; those who have all their tokens leave."""
        self.round += 1
        self.times_s.append(now_s)
        return self.leave()

    def leave(self) -> list[Request]:
        """Those who have all their tokens now; they are in the batch no longer."""
        self.busy = False
        if self.round < self.end or not self:
            return []
        leaving = self.ends.pop(self.round)
        for row in leaving:
            self._write(row, self.paths.pop(row))
            super().remove(row)
            self.held_tokens -= row.held_tokens
        self.end = min(self.ends, default=0)
        if not self:
            self.dissolve()
            self._clear()
        return leaving

    # rows ------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Write to all rows what became of them so far."""
        for row, path in self.paths.items():
            self._write(row, path)
            row.pinned = self.busy and self.kv.paged

    def dissolve(self) -> list[Request]:
        """The rows as a plain list, up to date."""
        self.sync()
        for kept in (self.kv.batches, self.deliveries.batches):
            kept[:] = [batch for batch in kept if batch is not self]
        return self.raw()

    def _write(self, row: Request, path: Path) -> None:
        k, here = self.k, self.round - path.first
        if self.kv.paged and self.granted >= path.first:
            last = path.emitted.item(self.granted - path.first) + row.context - row.emitted
            row.held_tokens = max(row.held_tokens, self.kv.blocks(last + k + 1))
        row.k, row.ready_s = k, self.ready_s
        row.draft_s += self.draft_s - path.draft_s
        row.wait_s += self.wait_s - path.wait_s
        row.verify_s += self.verify_s - path.verify_s
        path.draft_s, path.wait_s, path.verify_s = self.draft_s, self.wait_s, self.verify_s
        if not here:
            return
        emitted = path.emitted[: here + 1]
        accepted = path.accepted[:here]
        self.deliveries.extend_one(row.id, emitted[1:] - emitted[:-1], self.times_s[path.first : self.round])
        gained = emitted.item(here) - row.emitted
        row.emitted += gained
        row.context += gained
        drafted = here if k else 0
        refused = drafted - accepted.count(k) if k else 0
        row.tally += packed_tally(here, drafted, k * here, sum(accepted), refused)
        row.owed = row.owed + gained if not k else accepted[-1] if self.rereads else int(accepted[-1] == k)
        row.turn_s = self.times_s[-1]
        path.first = self.round
        path.emitted, path.accepted = path.emitted[here:], path.accepted[here:]

    def __iter__(self) -> Iterator[Request]:
        self.sync()
        return super().__iter__()

    def __reversed__(self) -> Iterator[Request]:
        self.sync()
        return super().__reversed__()

    @overload
    def __getitem__(self, index: Any) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...

    def __getitem__(self, index: Any) -> Any:
        self.sync()
        return super().__getitem__(index)

    def __add__(self, rows: list[Request]) -> list[Request]:  # type: ignore[override]
        return [*self, *rows]

    def raw(self) -> list[Request]:
        """The rows as they were last written to."""
        return list(self.paths)

    def takes(self, rows: list[Request]) -> bool:
        """Whether rows may join: in the midst of a round only those for whom as much was drafted."""
        return not self.busy or all(row.k == self.k for row in rows)
