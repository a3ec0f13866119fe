"""A batch: requests that one worker decodes together, with k draft tokens each, until each has all its tokens.

Acceptance is drawn before the run, so all rounds of a request are known when it joins. The batch keeps, by round, the
sums over its rows that a launch and the KV cache need, and a round then costs the same whatever the number of rows.
What became of a request is written to it when it finishes, or when somebody looks: to a policy a batch is a list of
requests like any other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from operator import add
from typing import Any, Self

from pdvsim.sim.core import Request
from pdvsim.sim.machine.kv import KvCache
from pdvsim.sim.records import Deliveries

ROUNDS = 4096  # after so many a batch starts its arrays again


class Path:
    """The rounds of one request in a batch: what each gains it, were it not for the request's end."""

    __slots__ = ("draft_s", "first", "gains", "verify_s", "wait_s")

    def __init__(self, request: Request, k: int, first: int) -> None:
        at, end = request.state.emitted, request.output_tokens
        self.gains = _path(request.accept_runs, k, at, end) if k else bytes((1,)) * (end - at)
        self.first = first  # the batch's round in which it takes part first
        self.draft_s = self.wait_s = self.verify_s = 0.0  # of the batch, when it joined


_accepted = bytes((0, *range(255)))  # draft tokens, by what a round gains


@cache
def _gains(k: int) -> bytes:
    """What a round of k draft tokens gains, by how many would be accepted: these, and one token of the target's."""
    return bytes(min(run, k) + 1 for run in range(256))


@cache
def _whole(k: int) -> bytes:
    """Whether all k draft tokens were accepted, by what the round gained."""
    return bytes(gained > k for gained in range(256))


@lru_cache(maxsize=10_000)  # a search serves the same requests again and again
def _path(runs: bytes, k: int, at: int, end: int) -> bytes:
    """What each round gains, from token `at` on."""
    gains = []
    runs = runs.translate(_gains(k))
    while at < end:
        gained = runs[at]
        gains.append(gained)
        at += gained
    return bytes(gains)


class BatchVerdict(Sequence[int]):
    """How many draft tokens of each row the target accepts in the round under way."""

    def __init__(self, batch: RunningBatch, past: int) -> None:
        self._batch, self._round = batch, batch.round - past

    def _of(self, path: Path) -> int:
        return path.gains[self._round - path.first] - 1

    def judged(self) -> tuple[int, int] | None:
        """Draft tokens accepted, and rows whose next one was refused; None where nothing was drafted."""
        gains = [path.gains[self._round - path.first] for path in self._batch.paths.values()]
        k = self._batch.k
        return (sum(gains) - len(gains), len(gains) - gains.count(k + 1)) if k else None

    def __iter__(self) -> Iterator[int]:
        return (self._of(self._batch.paths[row]) for row in self._batch.raw())

    def __len__(self) -> int:
        return len(self._batch)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class RunningBatch(list[Request]):
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
        self.paths: dict[Request, Path] = {}
        self.ends: dict[int, list[Request]] = {}  # who finishes with which round
        self.end = 0  # the first of these
        self.draft_s = self.wait_s = self.verify_s = 0.0  # that its rounds took so far
        self.held_tokens = 0  # of the KV cache, by all rows
        self.granted = -1  # the last round that there is room for
        self._written_state: Any = None
        self._prompts = 0  # cached tokens of all rows, less what they have emitted
        self._emitted: list[int] = []
        self._owed: list[int] = []  # rows that owe the drafter a token; of a head, the most that any does
        self._late = -1, 0  # a round before which a row joined that owes more than one, and how many
        self._held: list[int] = []

    # rounds ----------------------------------------------------------------------------------------------------

    def __iadd__(self, rows: Iterable[Request]) -> Self:  # type: ignore[override]
        """Rows join before the next round."""
        if self.round >= ROUNDS:
            rows = [*self.dissolve(), *rows]
            super().clear()
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
        if self.busy:  # it has waited for the verify since its own draft
            row.taken.wait_s += self.ready_s - row.state.ready_s
        gains = path.gains
        end = first + len(gains)
        if end > len(self._emitted):
            more = [0] * (end - len(self._emitted))
            for sums in (self._emitted, self._owed, self._held):
                sums += more
        prompt = row.state.context - row.state.emitted
        self._prompts += prompt
        emitted = list(accumulate(gains, initial=row.state.emitted))
        emitted.pop()
        self._emitted[first:end] = map(add, self._emitted[first:end], emitted)
        if k:
            if self.rereads:
                self._owed[first:end] = map(
                    max, self._owed[first:end], (row.state.drafter_lag, *gains.translate(_accepted))
                )
            else:
                owed = bytes((row.state.drafter_lag > 0,)) + gains.translate(_whole(k))
                self._owed[first:end] = map(add, self._owed[first:end], owed)
                if row.state.drafter_lag > 1:
                    self._late = first, max(row.state.drafter_lag, self._late[1] if self._late[0] == first else 0)
        if self.kv.paged:
            self.held_tokens += row.state.held_tokens
            held = self.kv.all_blocks(emitted, prompt + k + 1)
            self._held[first:end] = map(add, self._held[first:end], held)
        self.ends.setdefault(end, []).append(row)
        self.end = min(self.end, end) if self else end
        super().append(row)

    @property
    def context(self) -> int:
        """Cached tokens of all rows, before the next round."""
        return self._emitted[self.round] + self._prompts if self else 0

    @property
    def owed(self) -> int:
        """The most that any row's drafter has yet to catch up with."""
        owed = self._owed[self.round] if self.k else 0
        if owed and not self.rereads:
            return self._late[1] if self._late[0] == self.round else 1
        return owed

    def sums(self, rounds: int) -> tuple[list[int], list[int]]:
        """Both, of the next rounds."""
        here, prompts = slice(self.round, self.round + rounds), self._prompts
        owed = self._owed[here]
        if not self.rereads:
            owed = [1 if rows else 0 for rows in owed]
        owed[0] = self.owed
        return [emitted + prompts for emitted in self._emitted[here]], owed

    def hold(self) -> bool:
        """Room in the KV cache for the next round, if there is."""
        if self.kv.paged and self:
            need = self._held[self.round]
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
        return bisect_right(self._held, free, self.round, self.round + rounds) - self.round

    def pass_rounds(self, times_s: list[float], spent_s: tuple[float, float, float]) -> None:
        """So many rounds are over, at these times, of which parts took so long; there was room for them."""
        self.draft_s, self.wait_s, self.verify_s = (
            a + b for a, b in zip((self.draft_s, self.wait_s, self.verify_s), spent_s, strict=True)
        )
        self.times_s += times_s
        self.round += len(times_s)
        if self.kv.paged:
            self.granted = self.round - 1
            need = self._held[self.granted]
            self.kv.take(need - self.held_tokens)
            self.held_tokens = need

    def verdict(self, past: int = 0) -> BatchVerdict:
        """On the draft tokens of the round under way, or of one that is just over."""
        return BatchVerdict(self, past)

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
        if len(leaving) > 1 and leaving[0].chain:  # whose blocks are older, and whose next turn comes first
            leaving = [row for row in self.raw() if row in leaving]
        for row in leaving:
            self._write(row, self.paths.pop(row))
            super().remove(row)
            self.held_tokens -= row.state.held_tokens
            self._prompts -= row.state.context - row.state.emitted
        self.end = min(self.ends, default=0)
        if not self:
            self.dissolve()
            self._clear()
        return leaving

    # rows ------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Write to all rows what became of them so far."""
        state = self.round, self.granted, self.busy, self.draft_s, self.wait_s, self.verify_s, len(self)
        if state != self._written_state:
            self._written_state = state
            for row, path in self.paths.items():
                self._write(row, path)
                row.state.pinned = self.busy and self.kv.paged

    def dissolve(self) -> list[Request]:
        """The rows as a plain list, up to date."""
        self.sync()
        for kept in (self.kv.batches, self.deliveries.batches):
            kept[:] = [batch for batch in kept if batch is not self]
        return self.raw()

    def _write(self, row: Request, path: Path) -> None:
        k, here = self.k, self.round - path.first
        if self.kv.paged and self.granted >= path.first:
            last = row.state.context + sum(path.gains[: self.granted - path.first])
            row.state.held_tokens = self.kv.blocks(last + k + 1)
        row.state.k, row.state.ready_s = k if self.busy else 0, self.ready_s
        row.taken.draft_s += self.draft_s - path.draft_s
        row.taken.wait_s += self.wait_s - path.wait_s
        row.taken.verify_s += self.verify_s - path.verify_s
        path.draft_s, path.wait_s, path.verify_s = self.draft_s, self.wait_s, self.verify_s
        if not here:
            return
        gains = path.gains[:here]
        gained, full = sum(gains), gains.count(k + 1)
        over = max(0, row.state.emitted + gained - row.output_tokens)  # of its last round, beyond its end
        self.deliveries.extend_one(row.id, gains, over, self.times_s[path.first : self.round])
        row.taken.rounds += here
        if k:
            row.taken.drafts += here
            row.taken.drafted += k * here
            row.taken.accepted += gained - here
            row.taken.refused += here - full
        row.state.emitted += gained - over
        row.state.context += gained - over
        row.state.drafter_lag = (
            row.state.drafter_lag + gained if not k else gains[-1] - 1 if self.rereads else int(gains[-1] > k)
        )
        row.state.last_delivery_s = self.times_s[-1]
        path.first, path.gains = self.round, path.gains[here:]

    def __iter__(self) -> Iterator[Request]:
        self.sync()
        return super().__iter__()

    def __reversed__(self) -> Iterator[Request]:
        self.sync()
        return super().__reversed__()

    def __getitem__(self, index: Any) -> Any:
        self.sync()
        return super().__getitem__(index)

    def __add__(self, rows: list[Request]) -> list[Request]:  # type: ignore[override]
        return [*self, *rows]

    def raw(self) -> list[Request]:
        """The rows as they were last written to."""
        return list(super().__iter__())

    def in_order(self, rows: list[Request]) -> RunningBatch:
        """The same rows, in this order."""
        super().__setitem__(slice(None), rows)
        return self

    def takes(self, rows: list[Request]) -> bool:
        """Whether rows may join: in the midst of a round only those for whom as much was drafted."""
        return not self.busy or all(row.state.k == self.k for row in rows)


def _changing(name: str) -> Callable[..., Any]:
    """A list's own method, after which the batch is made anew."""

    def change(batch: RunningBatch, *args: Any, **options: Any) -> Any:
        rows = batch.dissolve()
        returned = getattr(rows, name)(*args, **options)
        list.clear(batch)
        batch._clear()
        batch += rows
        return returned

    return change


for _name in ("insert", "extend", "pop", "remove", "clear", "sort", "reverse", "__setitem__", "__delitem__"):
    setattr(RunningBatch, _name, _changing(_name))


def context_of(rows: Sequence[Request]) -> int:
    """Cached tokens of all rows."""
    return rows.context if isinstance(rows, RunningBatch) else sum([row.state.context for row in rows])


def drafted_for(rows: list[Request]) -> int:
    """The most draft tokens of any row."""
    return rows.k if isinstance(rows, RunningBatch) else max([row.state.k for row in rows], default=0)
