"""Rounds without events: what one batch does until the next thing that anyone has scheduled is known beforehand.

Acceptance is drawn before the run, so while a single batch decodes and no event is due, nothing about its rounds is
uncertain. Alone on the GPU, the times of all its rounds are one running sum; beside one prompt that is being read, they
follow round by round from the sharing of the GPU. Either way the arithmetic is that of stepping singly, operation by
operation, so the records are the same to the last bit; a test holds the two against each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from simpy.events import Event

from pdvsim.sim.config import MAX_DRAFT
from pdvsim.sim.core import Request, Work
from pdvsim.sim.device import LANE_CODE, Job, SimulatedGPU, Tick
from pdvsim.sim.ledger import Floats, Lap, Ledger
from pdvsim.sim.records import Table

Maker = Callable[[list[Request], int], Work]

_FEW = 2  # rounds below which events are cheaper than arrays
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
    path = request.path = Path(k, request.rounds, steps, owes)
    return path


class Foresight:
    """Runs a batch ahead on one GPU.

    The rounds it takes are settled at once, before their time has come: nobody can look in between. A batch drafts and
    verifies either on one lane, launched together, or on two that hand over to each other.
    """

    def __init__(self, gpu: SimulatedGPU, ledger: Ledger, deliveries: Table) -> None:
        self.gpu = gpu
        self.ledger = ledger
        self.deliveries = deliveries

    def one_lane(self, rows: list[Request], k: int, draft: Maker, verify: Maker, alone: bool) -> Event | None:
        """Rounds of `rows`: the verdict of the last one, or None where the next round cannot be foreseen.

        `alone`: the batch has the GPU to itself until its round is over, whatever happens.
        """
        ahead = self._ahead(rows, k, draft, verify, False, alone)
        if ahead is None:
            return None
        time, verdict = ahead
        env, done = self.gpu.env, Event(self.gpu.env)
        if verdict is not None:
            return env.at(time, done, verdict)
        wake = Event(env)

        def go_on(_: Event) -> None:
            if k:
                self.gpu.launch(draft(rows, k), time)
            self.gpu.launch(verify(rows, k), time, done)

        wake.callbacks = [go_on]
        env.at(time, wake)
        return done

    def two_lanes(self, rows: list[Request], k: int, draft: Maker, verify: Maker) -> Event | None:
        """Rounds of `rows` on two lanes: the last one's verdict if it finishes a request, else (with no value) when the
        drafting lane has them back; None if the next round cannot be foreseen."""
        ahead = self._ahead(rows, k, draft, verify, True, False)
        return None if ahead is None else self.gpu.env.at(ahead[0], Event(self.gpu.env), ahead[1])

    def _ahead(
        self, rows: list[Request], k: int, draft: Maker, verify: Maker, handover: bool, alone: bool
    ) -> tuple[float, list[int] | None] | None:
        gpu = self.gpu
        if gpu.host.free_at > gpu.env.now or gpu.coming or len(gpu.running) > 1:
            return None
        if k:
            for row in rows:
                if row.owed > 1:
                    return None
        if gpu.running:
            return self._beside(gpu.running[0], rows, k, draft, verify, handover)
        return self._alone(rows, k, draft, verify, handover, alone)

    def _horizon(self) -> float:
        """When the next event is due, the GPU's own apart."""
        gpu, horizon = self.gpu, inf
        for time, _, _, event in gpu.env._queue:
            if time < horizon and not (type(event) is Tick and event.gpu is gpu):
                horizon = time
        return horizon

    def _alone(
        self, rows: list[Request], k: int, draft: Maker, verify: Maker, handover: bool, alone: bool
    ) -> tuple[float, list[int] | None] | None:
        """Rounds as one running sum."""
        paths, rounds = [], 1 << 30
        for row in rows:
            path = path_of(row, k)
            at = row.rounds - path.first_round
            left = len(path.positions) - 1 - at
            if left < _FEW:
                return None
            if left < rounds:
                rounds = left
            paths.append((path, at))
        now, horizon = self.gpu.env.now, self._horizon()
        lap = _Lap(self.gpu, rows, k, paths, handover)
        if horizon < inf:  # no more than can fit, by the length of the first round: rounds only get longer
            rounds = min(rounds, int((horizon - now) / lap.first_s) + 1)
        if rounds < _FEW:
            return None
        lap.lay_out(rounds, now)
        # rounds that are over before anything can happen; the last to finish a request is left to its policy
        over = int(lap.starts[1:].searchsorted(horizon, side="left"))
        finishing = over == len(lap.starts) - 1 and rounds == min(len(p.positions) - 1 - at for p, at in paths)
        last = alone or finishing
        settled = min(over, rounds - 1) if last else over
        if settled + last < _FEW:
            return None
        lap.settle(self.ledger, settled, settled + last, draft, verify)
        time = float(lap.ends[settled, 6] if last and handover else lap.starts[settled + last])
        self.gpu.host.free_at = time
        return time, (self.gpu.verdict(verify(rows, k)) if last else None)

    def _beside(
        self, prompt: Job, rows: list[Request], k: int, draft: Maker, verify: Maker, handover: bool
    ) -> tuple[float, list[int] | None] | None:
        """Rounds one by one, while `prompt` is being read on another stream."""
        gpu, times = self.gpu, self.gpu.host.times
        if prompt.lane != "prefill" or not gpu.sharing.alone_is_full:
            return None
        now, horizon = gpu.env.now, self._horizon()
        clock, left = gpu.time_s, prompt.remaining_s
        rounds = 0
        while True:
            verdict = [k if (run := row.runs[row.emitted]) > k else run for row in rows]
            if any(
                row.emitted + accepted + 1 >= row.output_tokens for row, accepted in zip(rows, verdict, strict=True)
            ):
                break
            launched = now + times.launch_s
            works = [draft(rows, k)] if k else []
            works.append(verify(rows, k))
            notes = []
            ready, at, rest = launched, clock, left
            for work in works:
                job = gpu.job(work, ready)
                # as the device does it: both advance to the start, share, and advance to the finish
                if ready >= at + rest:
                    break
                if ready > at:
                    rest -= ready - at
                    at = ready
                start = at
                gpu.sharing.solve([prompt, job])
                finish = at + job.remaining_s / job.rate if job.rate > 0 else inf
                if prompt.rate > 0 and at + rest / prompt.rate <= finish:
                    break
                rest -= (finish - at) * prompt.rate
                at = finish
                notes.append((work, start, finish, job.solo_s, job.bytes, job.flops))
                if work.kind == "draft" and handover:
                    done = finish + times.completion_s
                    take = done + times.handoff_s
                    ready = take + times.launch_s
                elif work.kind == "draft":
                    ready = launched + times.launch_s
            if len(notes) < len(works):
                break
            delivered = max(at, ready) + times.completion_s
            end = delivered + times.handoff_s if handover else delivered
            if end >= horizon or at + rest <= end:  # the host would be needed elsewhere as well
                break
            for note in notes:
                gpu.note(*note)
            for row, accepted in zip(rows, verdict, strict=True):
                self.deliveries.append((row.id, row.book(accepted), delivered))
                if handover:
                    row.wait_ns += int((take - done) * _NS)
            now, clock, left = end, at, rest
            rounds += 1
        prompt.rate = 1.0
        if not rounds:
            return None
        gpu.host.free_at = now
        gpu.resume(prompt, clock, left)
        return now, None


class _Lap:
    """Rounds of a batch that has the GPU to itself."""

    def __init__(
        self, gpu: SimulatedGPU, rows: list[Request], k: int, paths: list[tuple[Path, int]], handover: bool
    ) -> None:
        self.gpu = gpu
        self.rows = rows
        self.k = k
        self.paths = paths
        self.handover = handover
        self.cached = sum(row.context for row in rows)
        self.check = gpu.models["target"].shape(len(rows), k + 1)
        self.single = self.double = self.check
        if k:
            drafter = gpu.models["draft"]
            self.single, self.double = drafter.shape(len(rows), 1, k), drafter.shape(len(rows), 2, k)
        context = self.cached
        self.first_s = self.check.solo_0 + self.check.solo_1 * context
        if k:
            self.first_s += self.single.solo_0 + self.single.solo_1 * context

    def lay_out(self, rounds: int, now_s: float) -> None:
        """Price `rounds` rounds and lay them out in time: each instant is the one before plus one duration."""
        n, k = rounds, self.k
        path, at = self.paths[0]
        positions = path.positions[at : at + n]
        owes = path.owes[at : at + n]
        emitted = self.rows[0].emitted
        for i in range(1, len(self.rows)):
            path, at = self.paths[i]
            positions = positions + path.positions[at : at + n]
            owes = owes | path.owes[at : at + n]
            emitted += self.rows[i].emitted
        context = positions + (self.cached - emitted)
        check, single, double = self.check, self.single, self.double
        verify_s = draft_s = check.solo_0 + check.solo_1 * context
        if k and single.solo_1 == double.solo_1:  # as a rule: attention reads the cache once, for one token or two
            draft_s = np.where(owes, double.solo_0, single.solo_0) + single.solo_1 * context
        elif k:
            draft_s = np.where(owes, double.solo_0 + double.solo_1 * context, single.solo_0 + single.solo_1 * context)
        self.context, self.owes, self.draft_s, self.verify_s = context, owes, draft_s, verify_s

        times = self.gpu.host.times
        width = 8 if self.handover else 4 if k else 3
        instants = np.empty(n * width + 1)
        instants[0] = now_s
        spans = instants[1:].reshape(n, width)
        if self.handover:
            launch, done, pass_on = times.launch_s, times.completion_s, times.handoff_s
            spans[:] = (launch, 0.0, done, pass_on, launch, 0.0, done, pass_on)
            spans[:, 1] = draft_s
            spans[:, 5] = verify_s
        elif k:
            spans[:, 0] = times.launch_s
            # the verify starts when the draft is over and the host has launched it behind the draft
            np.maximum(draft_s, times.launch_s, out=spans[:, 1])
            spans[:, 2] = verify_s
            spans[:, 3] = times.completion_s
        else:
            spans[:, 0] = times.launch_s
            spans[:, 1] = verify_s
            spans[:, 2] = times.completion_s
        instants.cumsum(out=instants)
        self.starts: Floats = instants[::width]  # of each round, and the end of the last
        self.ends: Floats = spans  # of each span, now that they are summed

    def settle(self, ledger: Ledger, over: int, launched: int, draft: Maker, verify: Maker) -> None:
        """Bring the requests to where they stand after `over` rounds, and book the `launched` ones."""
        k, ends = self.k, self.ends[:launched]
        checking = verify(self.rows, k)
        drafting = draft(self.rows, k) if k else checking
        waited_ns = None
        if self.handover:
            drafts, verifies, delivered = (ends[:, 0], ends[:, 1]), (ends[:, 4], ends[:, 5]), ends[:over, 6]
            waited_ns = ((ends[:, 3] - ends[:, 2]) * _NS).astype(np.int64)
        elif k:
            # a draft shorter than the launch of its verify ends before the verify can start
            drafts = (ends[:, 0], ends[:, 0] + self.draft_s[:launched])
            verifies, delivered = (ends[:, 1], ends[:, 2]), ends[:over, 3]
        else:
            drafts = verifies = (ends[:, 0], ends[:, 1])
            delivered = ends[:over, 2]
        kept = []
        for request, (path, at) in zip(self.rows, self.paths, strict=True):
            positions = path.positions[at : at + over + 1]
            kept.append((request.id, positions))
            request.book_rounds(over, int(positions[-1]) - request.emitted, int(path.owes[at + over]))
        lanes = (LANE_CODE[drafting.lane], drafting.queue_depth, LANE_CODE[checking.lane], checking.queue_depth)
        ledger.append(
            Lap(
                (self.gpu.replica, self.gpu.gpu, len(self.rows), k, *lanes, *self.single, *self.double, *self.check),
                self.context[:launched],
                self.owes[:launched],
                *drafts,
                *verifies,
                self.draft_s[:launched],
                self.verify_s[:launched],
                waited_ns,
                delivered,
                kept,
            )
        )
