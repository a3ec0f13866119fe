"""Several rounds stepped as one: while a single batch has the GPU to itself, its rounds are known before they run.

Acceptance is drawn beforehand, so until a request finishes nothing in the batch is uncertain: the times of all rounds
are one running sum. A stretch ends with the round in which the first request finishes, and is cut, exactly, when
anything else happens: an arrival, a hand-over, a launch. The additions are those of stepping round by round, in the
same order, so the records are the same to the last bit; a test holds the two against each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from simpy.events import Event

from pdvsim.sim.config import MAX_DRAFT
from pdvsim.sim.core import Request, Work
from pdvsim.sim.device import LANE_CODE, SimulatedGPU
from pdvsim.sim.ledger import Floats, Lap, Ledger

if TYPE_CHECKING:
    from pdvsim.sim.lane import Lane

SHORTEST = 3  # rounds below which stepping singly is cheaper
_NS = 1e9
_GAINS = [bytes(min(run, k) + 1 for run in range(256)) for k in range(MAX_DRAFT + 1)]  # tokens of a round, by run


class Path(NamedTuple):
    """The rounds that a request will go through at draft length `k`."""

    k: int
    first_round: int
    positions: NDArray[np.int64]  # output position before each round, and after the last
    owes: NDArray[np.bool_]  # whether the drafter catches up at the start of each round


def path_of(request: Request, k: int) -> Path:
    """The request's path, worked out once."""
    known: Path | None = request.path
    if known is not None and known.k == k:
        return known
    end, at = request.output_tokens, request.emitted
    gains = request.runs.translate(_GAINS[k])
    positions = array("q", [at])
    append = positions.append
    while at < end:
        at += gains[at]
        append(at)
    positions[-1] = end
    steps = np.frombuffer(positions, np.int64)
    owes = np.empty(len(positions), bool)
    owes[0] = bool(request.owed)
    np.equal(steps[1:] - steps[:-1], k + 1, out=owes[1:])
    request.path = path = Path(k, request.rounds, steps, owes)
    return path


class Stretch:
    """Undisturbed rounds of `rows` at draft length `k`, from now on.

    Without `handover`, draft and verify are launched together on one lane; `event` is the verdict of the last round.
    With it they are two lanes that hand over to each other; the verify lane is given the last verdict, and `event`
    sends the drafting lane back to its queue or, where `drafted` is set, tells it that a draft under way is done.
    """

    def __init__(
        self,
        gpu: SimulatedGPU,
        ledger: Ledger,
        rows: list[Request],
        k: int,
        paths: list[tuple[Path, int]],
        rounds: int,
        draft: Callable[[list[Request], int], Work],
        verify: Callable[[list[Request], int], Work],
        handover: tuple[Lane, Lane] | None,
    ) -> None:
        self.gpu = gpu
        self.ledger = ledger
        self.rows = rows
        self.k = k
        self.rounds = rounds
        self.draft = draft
        self.verify = verify
        self.handover = handover
        self.event = Event(gpu.env)
        self.drafted = False
        self._paths = paths
        checking = verify(rows, k)
        drafting = draft(rows, k) if k else checking
        self._lanes = (
            LANE_CODE[drafting.lane], drafting.queue_depth, LANE_CODE[checking.lane], checking.queue_depth
        )  # fmt: skip
        self._price()
        self._lay_out(gpu.env.now)
        self._end_after(rounds)

    def _price(self) -> None:
        n, count, k = self.rounds, len(self.rows), self.k
        path, at = self._paths[0]
        context = path.positions[at : at + n]
        owes = path.owes[at : at + n]
        fixed = self.rows[0].context - self.rows[0].emitted
        for i in range(1, count):
            path, at = self._paths[i]
            context = context + path.positions[at : at + n]
            owes = owes | path.owes[at : at + n]
            fixed += self.rows[i].context - self.rows[i].emitted
        context = context + fixed
        self._context, self._owes = context, owes
        check = self.gpu.models["target"].shape(count, k + 1)
        self._verify_s = self._draft_s = check.solo_0 + check.solo_1 * context
        single = double = check
        if k:
            model = self.gpu.models["draft"]
            single, double = model.shape(count, 1, k), model.shape(count, 2, k)
            if single.solo_1 == double.solo_1:  # as a rule: attention reads the cache once, for one token or two
                self._draft_s = np.where(owes, double.solo_0, single.solo_0) + single.solo_1 * context
            else:
                self._draft_s = np.where(
                    owes, double.solo_0 + double.solo_1 * context, single.solo_0 + single.solo_1 * context
                )
        self._shapes = (*single, *double, *check)

    def _lay_out(self, now_s: float) -> None:
        """Lay the rounds out in time: each instant is the one before plus one duration, as when stepped singly."""
        times = self.gpu.host.times
        n = self.rounds
        width = 8 if self.handover else 4 if self.k else 3
        instants = np.empty(n * width + 1)
        instants[0] = now_s
        spans = instants[1:].reshape(n, width)
        if self.handover:
            h, c, o = times.launch_s, times.completion_s, times.handoff_s
            spans[:] = (h, 0.0, c, o, h, 0.0, c, o)
            spans[:, 1] = self._draft_s
            spans[:, 5] = self._verify_s
        elif self.k:
            spans[:, 0] = times.launch_s
            # the verify starts when the draft is over and the host has launched it behind the draft
            np.maximum(self._draft_s, times.launch_s, out=spans[:, 1])
            spans[:, 2] = self._verify_s
            spans[:, 3] = times.completion_s
        else:
            spans[:, 0] = times.launch_s
            spans[:, 1] = self._verify_s
            spans[:, 2] = times.completion_s
        instants.cumsum(out=instants)
        self._starts: Floats = instants[::width]
        self._ends: Floats = spans  # the end of each span, now that they are summed

    def _end_after(self, rounds: int) -> None:
        """Wake up when the last of so many rounds has its verdict."""
        self.rounds = rounds
        self._wake = Event(self.gpu.env)
        self._wake.callbacks.append(self._on_end)
        done = self._ends[rounds - 1, 6] if self.handover else self._starts[rounds]
        self.gpu.env.at(float(done), self._wake)

    def _on_end(self, wake: Event) -> None:
        """The last round's verdict is in: leave it to whoever waits for it."""
        if wake is not self._wake or self.gpu.stretch is not self:
            return
        gpu, now = self.gpu, self.gpu.env.now
        gpu.stretch = None
        self._settle(self.rounds - 1, self.rounds)
        gpu.host.free_at = now
        verdict = gpu.verdict(self.verify(self.rows, self.k))
        if self.handover is None:
            gpu.env.at(now, self.event, verdict)
            return
        decode, check = self.handover
        decode.waiting(self.event, float(self._ends[self.rounds - 1, 2]))
        check.wake(now, (self.rows, gpu.env.at(now, Event(gpu.env), verdict)))

    def _under_way(self) -> int:
        return int(self._starts.searchsorted(self.gpu.env.now, side="right")) - 1

    def shorten(self) -> None:
        """End with the round under way."""
        rounds = self._under_way() + 1
        if rounds < self.rounds:
            self._end_after(rounds)

    def cut(self) -> None:
        """Something else happens now: settle the rounds that are over and put the one under way on the GPU."""
        over = self._under_way()
        gpu = self.gpu
        gpu.stretch = None
        if self.handover:
            self._hand_back(over, *self.handover)
            return
        self._settle(over, over)
        start = float(self._starts[over])
        gpu.host.free_at = start
        if self.k:
            gpu.launch(self.draft(self.rows, self.k), start)
        gpu.launch(self.verify(self.rows, self.k), start, self.event)
        gpu.catch_up(gpu.env.now)

    def _hand_back(self, over: int, decode: Lane, check: Lane) -> None:
        """Leave round `over` to the two lanes, at the stage it has reached."""
        gpu, rows = self.gpu, self.rows
        env, host = gpu.env, gpu.host
        now = env.now
        ends = self._ends[over].tolist()
        draft_start, draft_end, draft_done, check_take, _, _, check_done, _ = ends
        if now >= check_done:  # on its way back to the draft
            self._settle(over + 1, over + 1)
            host.free_at = float(self._starts[over + 1])
            decode.queue.extendleft(reversed(rows))
            env.at(host.free_at, self.event)
            return
        self._settle(over, over)
        host.free_at = float(self._starts[over])
        draft = self.draft(rows, self.k)
        if now < draft_done:  # drafting
            self.drafted = True
            gpu.launch(draft, host.free_at, self.event)
            gpu.catch_up(now)
            return
        gpu.note(draft, draft_start, draft_end, *gpu.price(draft))
        for row in rows:
            row.ready_s = draft_done
        host.free_at = check_take
        decode.waiting(self.event, draft_done)
        if now < check_take:  # on its way to the verify
            check.queue.extend(rows)
            check.wake(check_take)
            return
        wait_ns = int((check_take - draft_done) * _NS)  # verifying
        for row in rows:
            row.wait_ns += wait_ns
        underway = gpu.launch(self.verify(rows, self.k), check_take)
        gpu.catch_up(now)
        check.wake(now, (rows, underway))

    def _settle(self, over: int, launched: int) -> None:
        """Bring the requests to where they stand after `over` rounds, and keep the `launched` ones for the records."""
        if not launched:
            return
        k, ends = self.k, self._ends[:launched]
        waited_ns = None
        if self.handover:
            draft, verify, delivered = (ends[:, 0], ends[:, 1]), (ends[:, 4], ends[:, 5]), ends[:over, 6]
            waited_ns = ((ends[:, 3] - ends[:, 2]) * _NS).astype(np.int64)
        elif k:
            # a draft shorter than the launch of its verify ends before the verify can start
            draft = (ends[:, 0], ends[:, 0] + self._draft_s[:launched])
            verify, delivered = (ends[:, 1], ends[:, 2]), ends[:over, 3]
        else:
            verify, delivered = (ends[:, 0], ends[:, 1]), ends[:over, 2]
            draft = verify
        kept = []
        for request, (path, at) in zip(self.rows, self._paths, strict=True):
            positions = path.positions[at : at + over + 1]
            kept.append((request.id, positions))
            gained = int(positions[-1]) - request.emitted
            request.emitted += gained
            request.context += gained
            request.rounds += over
            if k:
                request.drafted += over * k
                request.accepted += gained - over
                request.owed = int(path.owes[at + over])
            else:
                request.owed += gained
        scalars = (self.gpu.replica, self.gpu.gpu, len(self.rows), k, *self._lanes, *self._shapes)
        self.ledger.append(
            Lap(
                scalars,
                self._context[:launched],
                self._owes[:launched],
                *draft,
                *verify,
                self._draft_s[:launched],
                self._verify_s[:launched],
                waited_ns,
                delivered,
                kept,
            )
        )
