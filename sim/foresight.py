"""Several rounds stepped as one: while a single batch has the GPU to itself, its rounds are known before they run.

Acceptance is drawn beforehand, so until a request finishes nothing in the batch is uncertain: the times of all rounds are
one running sum. A stretch ends before the round in which the first request finishes, and is cut, exactly, when anything
else happens: an arrival, a hand-over, a launch. The additions are those of stepping round by round, in the same order,
so the records are the same to the last bit; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from simpy.events import Event

from pdvsim.sim.core import Request, Work
from pdvsim.sim.device import KIND_CODE, LANE_CODE, ROLE_CODE, SimulatedGPU
from pdvsim.sim.latency import Shape
from pdvsim.sim.records import Columns

if TYPE_CHECKING:
    from pdvsim.sim.lane import Lane

Floats = NDArray[np.float64]

SHORTEST = 3  # rounds below which stepping singly is cheaper
_NS = 1e9


class Path(NamedTuple):
    """The rounds that a request will go through at draft length `k`."""

    k: int
    first_round: int
    positions: NDArray[np.int64]  # output position before each round, and after the last
    owes: NDArray[np.bool_]  # whether the drafter catches up at the start of each round


def path_of(request: Request, k: int) -> Path:
    """The request's path, worked out once."""
    path = request.path
    if isinstance(path, Path) and path.k == k:
        return path
    runs, end = request.runs, request.output_tokens
    at = request.emitted
    positions = [at]
    if k == 0:
        positions = list(range(at, end + 1))
    else:
        while at < end:
            run = runs[at]
            at += (run if run < k else k) + 1
            positions.append(at)
        positions[-1] = end
    steps = np.array(positions)
    owes = np.empty(len(positions), bool)
    owes[0] = bool(request.owed)
    np.equal(steps[1:] - steps[:-1], k + 1, out=owes[1:])
    request.path = path = Path(k, request.rounds, steps, owes)
    return path


class Lap(NamedTuple):
    """The settled rounds of a stretch, as they are kept until the records are made."""

    gpu: SimulatedGPU
    draft: Work | None
    verify: Work
    shapes: tuple[Shape | None, Shape | None, Shape]  # draft, draft that catches up, verify
    context: NDArray[np.int64]
    owes: NDArray[np.bool_]
    spans: tuple[Floats, Floats, Floats, Floats]  # start and end of draft and verify
    delivered_s: Floats
    rows: list[tuple[int, NDArray[np.int64]]]  # request, output positions before and after each round


class Stretch:
    """Undisturbed rounds of `rows` at draft length `k`, from now on.

    Without `handover`, draft and verify are launched together on one lane, and `event` is the completion of the first
    round that was not foreseen. With it they are two lanes that hand over to each other; then `event` sends the drafting
    lane back to its queue, or, where `drafted` is set, tells it that the draft under way at a cut is done.
    """

    def __init__(
        self,
        gpu: SimulatedGPU,
        laps: list[Lap],
        rows: list[Request],
        k: int,
        rounds: int,
        draft: Callable[[list[Request], int], Work],
        verify: Callable[[list[Request], int], Work],
        handover: tuple[Lane, Lane] | None,
    ) -> None:
        self.gpu = gpu
        self.laps = laps
        self.rows = rows
        self.k = k
        self.rounds = rounds
        self.draft = draft
        self.verify = verify
        self.handover = handover
        self.event = Event(gpu.env)
        self.drafted = False
        self._paths: list[tuple[Path, int]] = []
        for request in rows:
            path = path_of(request, k)
            self._paths.append((path, request.rounds - path.first_round))
        self._price()
        self._lay_out(gpu.env.now)
        wake = Event(gpu.env)
        wake.callbacks.append(self._on_end)  # type: ignore[union-attr]
        gpu.env.at(float(self._starts[rounds]), wake)

    def _price(self) -> None:
        n, count, k = self.rounds, len(self.rows), self.k
        context = np.zeros(n, np.int64)
        owes = np.zeros(n, bool)
        fixed = 0
        for request, (path, at) in zip(self.rows, self._paths, strict=True):
            context += path.positions[at : at + n]
            if k:
                owes |= path.owes[at : at + n]
            fixed += request.context - request.emitted
        context += fixed
        self._context, self._owes = context, owes
        single = double = None
        if k:
            model = self.gpu.models["draft"]
            single, double = model.shape(count, 1, k), model.shape(count, 2, k)
            self._draft_s = np.where(
                owes, double.solo_0 + double.solo_1 * context, single.solo_0 + single.solo_1 * context
            )
        check = self.gpu.models["target"].shape(count, k + 1)
        self._verify_s = check.solo_0 + check.solo_1 * context
        self._shapes = (single, double, check)

    def _lay_out(self, now_s: float) -> None:
        """Lay the rounds out in time: each instant is the one before plus one duration, as when stepped singly."""
        times = self.gpu.host.times
        n = self.rounds
        if self.handover:
            spans = np.empty((n, 8))
            spans[:, 0] = spans[:, 4] = times.launch_s
            spans[:, 1] = self._draft_s
            spans[:, 2] = spans[:, 6] = times.completion_s
            spans[:, 3] = spans[:, 7] = times.handoff_s
            spans[:, 5] = self._verify_s
        elif self.k:
            spans = np.empty((n, 4))
            spans[:, 0] = times.launch_s
            # the verify starts when the draft is over and the host has launched it behind the draft
            spans[:, 1] = np.maximum(self._draft_s, times.launch_s)
            spans[:, 2] = self._verify_s
            spans[:, 3] = times.completion_s
        else:
            spans = np.empty((n, 3))
            spans[:, 0] = times.launch_s
            spans[:, 1] = self._verify_s
            spans[:, 2] = times.completion_s
        width = spans.shape[1]
        instants = np.empty(n * width + 1)
        instants[0] = now_s
        instants[1:] = spans.ravel()
        np.cumsum(instants, out=instants)
        self._starts: Floats = instants[::width]
        self._ends: Floats = instants[1:].reshape(n, width)  # end of each span

    def _on_end(self, wake: Event) -> None:
        if self.gpu.stretch is self:
            self._leave(self.rounds)

    def cut(self) -> None:
        """Something else happens now: settle the rounds that are over and put the one under way on the GPU."""
        self._leave(int(np.searchsorted(self._starts, self.gpu.env.now, side="right")) - 1)

    def _leave(self, over: int) -> None:
        gpu = self.gpu
        gpu.stretch = None
        if self.handover:
            self._hand_back(over, *self.handover)
            return
        self._settle(over)
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
        if over < self.rounds:
            ends = self._ends[over].tolist()
            _, draft_end, draft_done, check_take, _, _, check_done, _ = ends
        if over == self.rounds or now >= check_done:  # on its way back to the draft
            over += over < self.rounds
            self._settle(over)
            start = float(self._starts[over])
            host.free_at = start
            decode.queue.extendleft(reversed(rows))
            env.at(start, self.event)
            return
        self._settle(over)
        start = float(self._starts[over])
        host.free_at = start
        draft = self.draft(rows, self.k)
        if now < draft_done:  # drafting
            self.drafted = True
            gpu.launch(draft, start, self.event)
            gpu.catch_up(now)
            return
        solo, moved, flops = gpu.price(draft)
        gpu.note(draft, float(self._ends[over, 0]), draft_end, solo, moved, flops)
        for row in rows:
            row.k = self.k
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

    def _settle(self, over: int) -> None:
        """Bring the requests to where they stand after `over` rounds, and keep those rounds for the records."""
        if not over:
            return
        k, ends = self.k, self._ends[:over]
        if self.handover:
            draft, verify, delivered = (ends[:, 0], ends[:, 1]), (ends[:, 4], ends[:, 5]), ends[:, 6]
            wait_ns = int(((ends[:, 3] - ends[:, 2]) * _NS).astype(np.int64).sum())
        elif k:
            # a draft shorter than the launch of its verify ends before the verify can start
            draft = (ends[:, 0], ends[:, 0] + self._draft_s[:over])
            verify, delivered, wait_ns = (ends[:, 1], ends[:, 2]), ends[:, 3], 0
        else:
            verify, delivered, wait_ns = (ends[:, 0], ends[:, 1]), ends[:, 2], 0
            draft = verify
        draft_ns = int(((draft[1] - draft[0]) * _NS).astype(np.int64).sum()) if k else 0
        verify_ns = int(((verify[1] - verify[0]) * _NS).astype(np.int64).sum())
        kept = []
        for request, (path, at) in zip(self.rows, self._paths, strict=True):
            positions = path.positions[at : at + over + 1]
            emitted = int(positions[-1])
            gained = emitted - request.emitted
            request.emitted = emitted
            request.context += gained
            request.rounds += over
            if k:
                request.drafted += over * k
                request.accepted += gained - over
                request.owed = int(path.owes[at + over])
                request.draft_ns += draft_ns
                request.wait_ns += wait_ns
            else:
                request.owed += gained
            request.verify_ns += verify_ns
            kept.append((request.id, positions))
        works = (self.draft(self.rows, k) if k else None, self.verify(self.rows, k))
        self.laps.append(
            Lap(
                self.gpu, *works, self._shapes, self._context[:over], self._owes[:over],
                (*draft, *verify), delivered, kept,
            )
        )  # fmt: skip


def expand(laps: list[Lap]) -> tuple[Columns, Columns]:
    """The launches and deliveries of all settled stretches, as columns."""
    if not laps:
        return {}, {}
    counts = np.array([len(lap.context) for lap in laps])
    context = np.concatenate([lap.context for lap in laps])
    owes = np.concatenate([lap.owes for lap in laps])
    drafts = np.repeat([lap.draft is not None for lap in laps], counts)

    def spread(pick: Callable[[Lap], float]) -> NDArray[np.float64]:
        return np.repeat(np.array([pick(lap) for lap in laps]), counts)

    def line(at: int, field: int, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
        def coefficient(lap: Lap, which: int) -> float:
            shape = lap.shapes[at]
            return shape[which] if shape is not None else 0.0

        slope = spread(lambda lap: coefficient(lap, field + 1))
        return (spread(lambda lap: coefficient(lap, field)) + slope * context)[mask]

    both: list[Columns] = []
    for side in (0, 1):
        mask = drafts if side == 0 else np.ones(len(context), bool)

        def work(lap: Lap, side: int = side) -> Work:
            return lap.draft if side == 0 and lap.draft is not None else lap.verify

        late = owes[mask]
        prices = []
        for field in (0, 2, 4):
            usual = line(0 if side == 0 else 2, field, mask)
            prices.append(np.where(late, line(1, field, mask), usual) if side == 0 else usual)
        rows = spread(lambda lap: len(lap.rows))[mask]
        steps = spread(lambda lap: work(lap).steps)[mask]
        width = 1 + late if side == 0 else spread(lambda lap: lap.verify.tokens)[mask]
        both.append(
            {
                "replica": spread(lambda lap: lap.gpu.replica)[mask],
                "gpu": spread(lambda lap: lap.gpu.gpu)[mask],
                "lane": spread(lambda lap: LANE_CODE[work(lap).lane])[mask],
                "kind": spread(lambda lap: KIND_CODE[work(lap).kind])[mask],
                "role": spread(lambda lap: ROLE_CODE[work(lap).role])[mask],
                "rows": rows,
                "tokens": rows * (width + steps - 1),
                "steps": steps,
                "queue_depth": spread(lambda lap: work(lap).queue_depth)[mask],
                "start_s": np.concatenate([lap.spans[2 * side] for lap in laps])[mask],
                "end_s": np.concatenate([lap.spans[2 * side + 1] for lap in laps])[mask],
                "solo_s": prices[0],
                "bytes": prices[1],
                "flops": prices[2],
            }
        )
    launches = {name: np.concatenate([part[name] for part in both]) for name in both[0]}
    kept = [(request, positions, lap.delivered_s) for lap in laps for request, positions in lap.rows]
    deliveries = {
        "request": np.repeat([request for request, _, _ in kept], [len(times) for _, _, times in kept]),
        "tokens": np.concatenate([positions[1:] - positions[:-1] for _, positions, _ in kept]),
        "time_s": np.concatenate([times for _, _, times in kept]),
    }
    return launches, deliveries
