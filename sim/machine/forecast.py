"""The rounds to come of a batch whose verdicts were drawn before the run.

All rounds of a request are known when it joins. A forecast keeps, by round, the sums over its rows that a launch and
the KV cache need, so a round costs the same whatever the number of rows. Where a row stands and what it took is written
when its state is asked for (`Request.state` is missing meanwhile), and when it leaves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, Protocol

import numpy as np

from pdvsim.sim.core import Request, RequestState
from pdvsim.sim.machine.kv import KvCache
from pdvsim.sim.machine.paths import RequestPath, lags_by_gain, path_of
from pdvsim.sim.records import Deliveries

ROUNDS = 4096  # after this number of rounds a forecast is renewed when a row joins
_ROOM = 256  # rounds that its arrays have to begin with


class ForeseenRow:
    """A row of a forecast: its state as of the first round that is not written to it, and its rounds from there."""

    __slots__ = ("ahead", "draft_s", "first", "paths", "state", "verify_s", "wait_s")

    def __init__(self, forecast: Forecast, state: RequestState, path: RequestPath) -> None:
        self.state = state
        self.first = forecast.round
        self.paths, self.ahead = path.paths, path.first - forecast.round  # whose entries are by so much ahead of rounds
        self.draft_s, self.wait_s, self.verify_s = forecast.draft_s, forecast.wait_s, forecast.verify_s

    def gained(self, until: int) -> int:
        """Tokens that it gains from its first unwritten round to the one before `until`."""
        context = self.paths.contexts.item
        return context(until + self.ahead) - context(self.first + self.ahead)

    def gain(self, round: int) -> int:
        """Tokens that it gains in a round."""
        return self.paths.gains[round + self.ahead]


class ForeseenVerdict(Sequence[int]):
    """How many draft tokens of each row the target accepts in a round."""

    def __init__(self, rows: Sequence[Request], forecast: Forecast) -> None:
        self._rows, self._forecast, self._round = rows, forecast, forecast.round

    def __iter__(self) -> Iterator[int]:
        foreseen, at = self._forecast.foreseen, self._round
        return (foreseen[row].gain(at) - 1 for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]


class Foreseeable(Protocol):
    """A batch that may have a forecast."""

    forecast: Forecast | None


class Forecast:
    """Rows with k draft tokens each. `round` counts the rounds that are over; the sums are those of each round."""

    def __init__(self, owner: Foreseeable, k: int, kv: KvCache, deliveries: Deliveries, rereads: bool) -> None:
        self.owner = owner
        self.k = k
        self.kv, self.deliveries, self.rereads = kv, deliveries, rereads
        self.busy = False  # a round is under way
        self.ready_s = -1.0  # when its rows were drafted for
        self.round = 0
        self.verdict_round = 0  # the round of the last verdict
        self.times_s = array("d")  # when each round was over
        self.foreseen: dict[Request, ForeseenRow] = {}
        self.ends: dict[int, list[Request]] = {}  # rows that finish, by round
        self._order: list[int] = []  # these rounds, a heap
        self.end = 0  # the first of these
        self.draft_s = self.wait_s = self.verify_s = 0.0  # that its rounds took so far
        self.held_tokens = 0  # of the KV cache, by all rows
        self.granted = -1  # the last round that there is room for
        self._contexts = np.zeros(_ROOM, np.int64)  # cached tokens of all rows, before the round
        self._lags = np.zeros(_ROOM, np.uint8)  # the most that any row's drafter has to catch up with
        self._late = -1, 0  # a round before which rows joined that lag more than rounds cause, and the most of these
        self._held = np.zeros(_ROOM, np.int64)
        deliveries.unwritten.append(self.flush)

    # rows ------------------------------------------------------------------------------------------------------

    def takes(self, rows: Iterable[Request]) -> bool:
        """Return whether rows may join: in the midst of a round only those with as many drafts."""
        return self.round < ROUNDS and (not self.busy or all(row.state.k == self.k for row in rows))

    def join(self, row: Request) -> None:
        """A row joins before the next round, or in the midst of one that it was drafted for."""
        state, first, k = row.state, self.round, self.k
        path = paths, at, last = path_of(row, k, self.rereads, self.kv)
        self.foreseen[row] = ForeseenRow(self, state, path)
        if self.busy:  # it has waited for the verify since its own draft
            row.taken.wait_s += self.ready_s - state.ready_s
        end = first + last - at
        if end >= len(self._contexts):
            self._contexts, self._lags, self._held = (
                np.concatenate((sums, np.zeros(end, sums.dtype))) for sums in (self._contexts, self._lags, self._held)
            )
        contexts = self._contexts[first:end]
        contexts += paths.contexts[at:last]
        if k:
            later = self._lags[first + 1 : end]
            np.maximum(later, paths.lags[at : last - 1], out=later)
            if state.drafter_lag:
                self._late = first, max(state.drafter_lag, self.drafter_lag)
        if self.kv.paged:
            self.held_tokens += state.held_tokens
            held = self._held[first:end]
            held += paths.held[at:last]
        if (others := self.ends.get(end)) is not None:
            others.append(row)
        else:
            self.ends[end] = [row]
            heappush(self._order, end)
            self.end = self._order[0]
        row.forecast = self
        del row.state

    def leave(self) -> list[Request]:
        """Return the rows that have all their tokens now; they are foreseen no longer."""
        self.busy = False
        if self.round < self.end:
            return []
        leaving = self.ends.pop(self.round)
        for row in leaving:
            foreseen = self.foreseen.pop(row)
            self._write(row, foreseen)
            row.state, row.forecast = foreseen.state, None
            self.held_tokens -= row.state.held_tokens
        heappop(self._order)
        if self.foreseen:
            self.end = self._order[0]
        else:
            self.close()
        return leaving

    def close(self) -> None:
        """Write to all rows where they stand and what they took, and foresee nothing more."""
        self.flush()
        for row, foreseen in self.foreseen.items():
            row.state, row.forecast = foreseen.state, None
        self.foreseen.clear()
        self.owner.forecast = None
        unwritten = self.deliveries.unwritten
        unwritten[:] = [flush for flush in unwritten if flush != self.flush]

    def flush(self) -> None:
        """Write to all rows what they took so far."""
        for row, foreseen in self.foreseen.items():
            self._write(row, foreseen)

    def state_of(self, row: Request) -> RequestState:
        """The state of a row, as of now; to be read but not written."""
        foreseen = self.foreseen[row]
        self._write(row, foreseen)
        return foreseen.state

    def _write(self, row: Request, foreseen: ForeseenRow) -> None:
        """Write to a row where it stands and what it took."""
        k, busy, paged, until = self.k, self.busy, self.kv.paged, self.round
        state, taken, first, ahead = foreseen.state, row.taken, foreseen.first, foreseen.ahead
        state.k, state.ready_s, state.pinned = k if busy else 0, self.ready_s, busy and paged
        taken.draft_s += self.draft_s - foreseen.draft_s
        taken.wait_s += self.wait_s - foreseen.wait_s
        taken.verify_s += self.verify_s - foreseen.verify_s
        foreseen.draft_s, foreseen.wait_s, foreseen.verify_s = self.draft_s, self.wait_s, self.verify_s
        if paged and self.granted >= first:
            state.held_tokens = foreseen.paths.held.item(self.granted + ahead)
        if until == first:
            return
        rounds, gained = until - first, foreseen.gained(until)
        gains = foreseen.paths.gains[first + ahead : until + ahead]
        delivered = min(gained, row.output_tokens - state.emitted)  # its last round may go beyond its end
        self.deliveries.extend_one(row.id, gains, gained - delivered, self.times_s[first:until])
        taken.rounds += rounds
        if k:
            taken.drafts += rounds
            taken.drafted += k * rounds
            taken.accepted += gained - rounds
            taken.refused += rounds - gains.count(k + 1)
            state.drafter_lag = lags_by_gain(k, self.rereads)[gains[-1]]
        else:
            state.drafter_lag += gained
        state.emitted += delivered
        state.context += delivered
        state.last_delivery_s = self.times_s[-1]
        foreseen.first = until

    # rounds ----------------------------------------------------------------------------------------------------

    @property
    def context(self) -> int:
        """Cached tokens of all rows before the next round."""
        return self._contexts.item(self.round)

    @property
    def drafter_lag(self) -> int:
        """The most that any row's drafter has yet to catch up with."""
        if not self.k:
            return 0
        return self._late[1] if self._late[0] == self.round else self._lags.item(self.round)

    def sums(self, rounds: int) -> tuple[list[float], list[int]]:
        """Context and drafter lag before each of the next rounds; the context as what prices are computed from."""
        here = slice(self.round, self.round + rounds)
        lags = [0] * rounds
        if self.k:
            lags = self._lags[here].tolist()
            lags[0] = self.drafter_lag
        return self._contexts[here].astype(float).tolist(), lags

    def reserve(self) -> bool:
        """Reserve room in the KV cache for the next round; False if there is none."""
        if self.kv.paged:
            more = self._held.item(self.round) - self.held_tokens
            if more > 0:
                if not self.kv.take(more):
                    return False
                self.held_tokens += more
            self.granted = self.round
        self.busy = True
        return True

    def roomy(self, rounds: int) -> int:
        """Return how many of the next rounds there is room for."""
        if not self.kv.paged:
            return rounds
        free = self.kv.capacity_tokens - self.kv.used_tokens + self.held_tokens
        if self._held.item(self.round + rounds - 1) <= free:
            return rounds
        return int(self._held[self.round : self.round + rounds].searchsorted(free, "right"))

    def spend(self, draft_s: float, wait_s: float, verify_s: float) -> None:
        """Add the seconds that rounds took."""
        self.draft_s += draft_s
        self.wait_s += wait_s
        self.verify_s += verify_s

    def pass_rounds(self, times_s: list[float]) -> None:
        """Note the end of rounds at these times; there was room for them."""
        self.times_s.fromlist(times_s)
        self.round += len(times_s)
        if self.kv.paged:
            self.granted = self.round - 1
            need = self._held.item(self.granted)
            self.kv.take(need - self.held_tokens)
            self.held_tokens = need

    def settle(self, now_s: float) -> list[Request]:
        """Note the end of a round; return the requests that have all their tokens and leave."""
        self.round += 1
        self.times_s.append(now_s)
        return self.leave()

    def verdict_counts(self) -> tuple[int, int] | None:
        """Draft tokens accepted by the last verdict, and rows whose next one was refused; None if none was drafted."""
        if not self.k:
            return None
        gains = [state.gain(self.verdict_round) for state in self.foreseen.values()]
        return sum(gains) - len(gains), len(gains) - gains.count(self.k + 1)
