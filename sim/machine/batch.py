"""A batch: requests that decode together. It knows their sums, reserves room for a round, and settles its verdict.

Where a device fast-forwards, a batch has a forecast of its rounds, and its sums are looked up. Otherwise they are added
up over the rows. No other code sees the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from pdvsim.sim.core import Chunk, Kind, Request, Role
from pdvsim.sim.machine.forecast import Forecast, ForeseenVerdict
from pdvsim.sim.machine.kv import KvCache
from pdvsim.sim.records import Deliveries


class Batch(Sequence[Request]):
    """Rows in order, changed by `add`, `take` and `remove` only.

    A batch that is given away gives its rows away: those added to another are no longer in it.
    """

    __slots__ = ("_rows", "forecast")

    def __init__(self, rows: Iterable[Request] = ()) -> None:
        self._rows = list(rows)
        self.forecast: Forecast | None = None
        for row in self._rows:
            if row.forecast is not None:  # of another batch
                row.forecast.close()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Batch: ...
    def __getitem__(self, index: int | slice) -> Request | Batch:
        item = self._rows[index]
        return Batch(item) if isinstance(item, list) else item

    # its rows -------------------------------------------------------------------------------------------------

    def add(self, others: Batch) -> None:
        """Append the rows of another batch."""
        joining = others._rows
        if self._rows and self.forecast is not None:
            others.drop_forecast()
        elif others.forecast is not None:
            joining, self.forecast = self._rows, others.forecast
            self.forecast.owner, others.forecast = self, None
        if self.forecast is not None and joining:
            if self.forecast.takes(joining):
                for row in joining:
                    self.forecast.join(row)
            else:
                self.forecast.close()
        self._rows += others._rows
        others._rows = []

    def take(self, limit: int) -> Batch:
        """The first `limit` rows as a batch of their own."""
        taken = Batch()
        if limit >= len(self._rows):
            taken.add(self)
        elif limit > 0:
            self.drop_forecast()
            taken._rows, self._rows = self._rows[:limit], self._rows[limit:]
        return taken

    def remove(self, row: Request) -> None:
        """Remove a row."""
        self.drop_forecast()
        self._rows.remove(row)

    def foresee(self, k: int, kv: KvCache, deliveries: Deliveries, rereads: bool) -> Forecast:
        """Forecast its rounds of k draft tokens each, with drawn verdicts; room for the first has been reserved."""
        if self.forecast is None or self.forecast.k != k:
            self.drop_forecast()
            self.forecast = Forecast(self, k, kv, deliveries, rereads)
            for row in self._rows:
                self.forecast.join(row)
            self.forecast.reserve()
        return self.forecast

    def drop_forecast(self) -> None:
        """End the forecast: its rounds will be others than those foreseen."""
        if self.forecast is not None:
            self.forecast.close()

    # sums ------------------------------------------------------------------------------------------------------

    @property
    def context(self) -> int:
        """Cached tokens of all rows."""
        if self.forecast is not None:
            return self.forecast.context
        return sum([row.state.context for row in self._rows])

    @property
    def drafter_lag(self) -> int:
        """The most that any row's drafter has yet to read."""
        if self.forecast is not None:
            return self.forecast.drafter_lag
        return max([row.state.drafter_lag for row in self._rows], default=0)

    @property
    def k(self) -> int:
        """The most draft tokens of any row that wait for verification."""
        if self.forecast is not None:
            return self.forecast.k if self.forecast.busy else 0
        return max([row.state.k for row in self._rows], default=0)

    @k.setter
    def k(self, k: int) -> None:
        if self.forecast is not None and self.forecast.k != k:
            self.drop_forecast()
        if self.forecast is None:
            for row in self._rows:
                row.state.k = k

    def count_undrafted(self) -> None:
        """Rows without drafts are verified with others that have some."""
        if self.forecast is None:
            for row in self._rows:
                if not row.state.k:
                    row.taken.undrafted_rounds += 1

    # a round ---------------------------------------------------------------------------------------------------

    def reserve(self, kv: KvCache, k: int) -> bool:
        """Reserve room for a round of k draft tokens for each row; False if there is too little."""
        if self.forecast is not None:
            if self.forecast.k == k and self.forecast.reserve():
                return True
            self.drop_forecast()
        return kv.grow_all(self._rows, k + 1)

    def wait_from(self, now_s: float) -> None:
        """Note that its rows wait for verification from now on."""
        if self.forecast is not None:
            self.forecast.ready_s = now_s
        else:
            for row in self._rows:
                row.state.ready_s = now_s

    def wait_until(self, now_s: float) -> None:
        """Add the time that its rows have waited until now."""
        if self.forecast is not None:
            self.forecast.wait_s += now_s - self.forecast.ready_s
        else:
            for row in self._rows:
                row.taken.wait_s += now_s - row.state.ready_s

    def spend(self, kind: Kind, seconds: float) -> None:
        """Add the seconds of a launch of its rows."""
        if self.forecast is not None:
            if kind == "draft":
                self.forecast.draft_s += seconds
            else:
                self.forecast.verify_s += seconds
        elif kind == "draft":
            for row in self._rows:
                if row.taken.finish_s < 0:  # an early draft may outlive a row
                    row.taken.draft_s += seconds
        elif kind != "ahead":  # its rows are being verified
            for row in self._rows:
                row.taken.verify_s += seconds

    def verdict(self) -> Sequence[int]:
        """Return how many draft tokens of each row the target accepts, as drawn before the run."""
        if self.forecast is not None:
            self.forecast.verdict_round = self.forecast.round
            return ForeseenVerdict(self, self.forecast)
        verdict = []
        for row in self._rows:
            state = row.state
            run = row.accept_runs[state.emitted]
            verdict.append(run if run < state.k else state.k)
        return verdict

    def verdict_counts(self, verdict: Sequence[int]) -> tuple[int, int] | None:
        """Draft tokens accepted, and rows whose next one was refused; None where nothing was drafted.

        A row for which none was found counts as refused: the next round is as likely to find none.
        """
        if self.forecast is not None:
            return self.forecast.verdict_counts()
        accepted = refused = 0
        drafted = False
        for row, passed in zip(self._rows, verdict, strict=True):
            state = row.state
            if state.k:
                drafted = True
                accepted += passed
                refused += passed < state.k
            elif state.missed:
                drafted = True
                refused += 1
        return (accepted, refused) if drafted else None

    def settle(
        self, verdict: Sequence[int], now_s: float, kv: KvCache, deliveries: Deliveries, rereads: bool
    ) -> list[Request]:
        """Deliver a round's tokens; return the requests that have all their tokens and leave."""
        if self.forecast is not None:
            return self._without(self.forecast.settle(now_s))
        gains, over = apply_verdict(self._rows, verdict, now_s, rereads)
        kv.unpin(self._rows)
        deliveries.extend([row.id for row in self._rows], gains, now_s)
        if not over:
            return []
        return self._without([row for row in self._rows if row.state.emitted == row.output_tokens])

    @property
    def over(self) -> bool:
        """Whether a row has all its tokens after fast-forwarded rounds."""
        return self.forecast is not None and self.forecast.round == self.forecast.end

    def finished(self) -> list[Request]:
        """Return the rows that have all their tokens after fast-forwarded rounds; they leave."""
        return [] if self.forecast is None else self._without(self.forecast.leave())

    def _without(self, leaving: list[Request]) -> list[Request]:
        if len(leaving) > 1 and leaving[0].chain:  # whose blocks are older, and whose next turn comes first
            leaving = [row for row in self._rows if row in leaving]
        for row in leaving:
            self._rows.remove(row)
        return leaving


def apply_verdict(
    rows: Sequence[Request], verdict: Sequence[int], now_s: float, rereads: bool
) -> tuple[list[int], bool]:
    """Give each row its accepted drafts and one target token, up to its output length.

    Returns the gains, and whether some row is finished. A drafter that `rereads` must catch up on all accepted drafts.
    """
    gains, over = [], False
    for row, accepted in zip(rows, verdict, strict=True):
        state, taken = row.state, row.taken
        k, gained, drafted = state.k, accepted + 1, state.k + state.left_out
        emitted = state.emitted + gained
        if emitted >= row.output_tokens:
            gained -= emitted - row.output_tokens
            emitted = row.output_tokens
            over = True
        state.emitted = emitted
        state.context += gained
        taken.rounds += 1
        state.k, state.left_out, state.missed, state.last_delivery_s = 0, 0, False, now_s
        if k:
            taken.drafts += 1
            taken.drafted += k
            taken.accepted += accepted
            taken.refused += accepted < k
        if not drafted:
            state.drafter_lag += gained
        else:  # after full acceptance the drafter has not read its own last draft; a head reads accepted ones again
            state.drafter_lag = accepted if rereads else int(accepted == drafted)
        gains.append(gained)
    return gains, over


@dataclass(slots=True)
class Launch:
    """One GPU launch: `steps` forwards of one model over `rows`, the first with `tokens` new tokens per row.

    `chunks` are prompt chunks in the (first) forward. A draft of length k is k steps of one token; the first step has
    more tokens if some row must catch up. A verify is one step of k+1.
    """

    kind: Kind
    role: Role
    lane: str
    rows: Batch
    tokens: int = 1
    steps: int = 1
    chunks: tuple[Chunk, ...] = ()
    priority: int = 0  # higher goes first
    queue_depth: int = 0  # requests left waiting in the lane when this was launched
    watched: bool = True  # the host reads its completion back; a draft that the same lane verifies needs none
    context: int = -1  # cached tokens of all rows; -1: not counted yet
    worker: int = 0  # number among the concurrent workers of its lane
    packed: int = 0  # new tokens of all rows where their numbers differ, up to `tokens` each; 0: all have `tokens`
    early: bool = False  # a draft that is launched before the verdict that it follows is known

    def enters(self) -> bool:
        """Return whether requests enter with it: no launch has carried their prompts before. From now on one has."""
        enters = False
        for chunk in self.chunks:
            state = chunk.request.state
            if not state.entered:
                state.entered = enters = True
        return enters
