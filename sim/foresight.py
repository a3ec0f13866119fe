"""Rounds without events: what one batch does until the next thing that anyone has scheduled is known beforehand.

Acceptance is drawn before the run, so while a single batch decodes and no event is due, nothing about its rounds is
uncertain, whether it has the GPU to itself or a prompt is being read beside it. They are stepped in a plain loop, whose
arithmetic is that of the device and the host, operation by operation: the records are the same to the last bit as with
an event for every step, and a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from operator import add, ge, getitem, sub

from simpy.events import Event

from pdvsim.sim.core import Request, Work
from pdvsim.sim.device import Job, SimulatedGPU, Tick
from pdvsim.sim.ledger import Lap, Ledger
from pdvsim.sim.records import Deliveries

Maker = Callable[[list[Request], int], Work]
Ahead = tuple[float, "list[int] | None"]  # until when, and the last verdict where that is left to the policy

_NS = 1e9


class Foresight:
    """Runs a batch ahead on one GPU.

    The rounds it takes are settled at once, before their time has come: nobody can look in between. A batch drafts and
    verifies either on one lane, launched together, or on two that hand over to each other.
    """

    def __init__(self, gpu: SimulatedGPU, ledger: Ledger, deliveries: Deliveries) -> None:
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
        """Rounds of `rows` on two lanes; None if the next round cannot be foreseen.

        The event has the last verdict if that finishes a request; else it says when the drafting lane has them back.
        """
        ahead = self._ahead(rows, k, draft, verify, True, False)
        return None if ahead is None else self.gpu.env.at(ahead[0], Event(self.gpu.env), ahead[1])

    def _ahead(
        self, rows: list[Request], k: int, draft: Maker, verify: Maker, handover: bool, alone: bool
    ) -> Ahead | None:
        gpu = self.gpu
        if gpu.coming or len(gpu.running) > 1:
            return None
        if handover and not k and gpu.host.free_at > gpu.env.now:
            return None  # they wait for the host as well, not only for the hand-over
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
    ) -> Ahead | None:
        """Rounds of a batch that has the GPU to itself; the last one is left open if it finishes a request."""
        gpu, times, ledger = self.gpu, self.gpu.host.times, self.ledger
        launch_s, completion_s, handoff_s = times.launch_s, times.completion_s, times.handoff_s
        check = gpu.models["target"].shape(len(rows), k + 1)
        check_0, check_1 = check.solo_0, check.solo_1
        checking = gpu.row(verify(rows, k))
        shapes, records = [check, check], [checking, checking]
        if k:
            drafting = draft(rows, k)
            for width in (1, 2):
                drafting.tokens = width
                shapes[width - 1] = gpu.models["draft"].shape(len(rows), width, k)
                records[width - 1] = gpu.row(drafting)
        single, double = shapes
        now, horizon = max(gpu.env.now, gpu.host.free_at), self._horizon()
        context = sum(row.context for row in rows)
        owed = k > 0 and any(row.owed for row in rows)
        runs, ends = [row.runs for row in rows], [row.output_tokens for row in rows]
        at = [row.emitted for row in rows]
        spare = min(map(sub, ends, at))  # tokens that each row still lacks, at least
        full = k + 1
        gains: list[int] = []
        last = gains
        verdict: list[int] | None = None
        launched = settled = 0
        note, deliver = ledger.rounds.append, ledger.gains.extend
        while True:
            begin = start = drafted = now + launch_s
            if k:
                shape = double if owed else single
                drafted = begin + (shape.solo_0 + shape.solo_1 * context)
                if handover:
                    start = drafted + completion_s + handoff_s + launch_s
                else:  # the verify is launched behind the draft
                    start = begin + launch_s
                    if drafted > start:
                        start = drafted
            elif handover:
                drafted, start = now, now + handoff_s + launch_s
            finish = start + (check_0 + check_1 * context)
            delivered = finish + completion_s
            end = delivered + handoff_s if handover else delivered
            crossing = end >= horizon
            if crossing and not alone:
                break
            note((begin, drafted, start, finish, delivered, context, owed))
            launched += 1
            gains = [full if run > k else run + 1 for run in map(getitem, runs, at)]
            if crossing or (spare <= full and any(map(ge, map(add, at, gains), ends))):
                verdict, now = [gained - 1 for gained in gains], delivered
                break
            at = list(map(add, at, gains))
            spare = spare - full if spare > 2 * full else min(map(sub, ends, at))
            context += sum(gains)
            owed = k > 0 and full in gains
            deliver(gains)
            last = gains
            settled += 1
            now = end
        if not launched:
            return None
        wait = (completion_s if k else 0.0, handoff_s) if handover else None
        lap = Lap([row.id for row in rows], launched, settled, k, wait, (*records, checking), (*shapes, check))
        ledger.close(lap)
        for i, (row, reached) in enumerate(zip(rows, at, strict=True)):
            gained = reached - row.emitted
            row.emitted = reached
            row.context += gained
            row.rounds += settled
            if not k:
                row.owed += gained
            elif settled:
                row.drafted += settled * k
                row.accepted += gained - settled
                row.owed = int(last[i] == full)
        gpu.host.free_at = now
        return now, verdict

    def _beside(
        self, prompt: Job, rows: list[Request], k: int, draft: Maker, verify: Maker, handover: bool
    ) -> Ahead | None:
        """Rounds one by one, while `prompt` is being read on another stream; none that finishes a request."""
        gpu, times = self.gpu, self.gpu.host.times
        if prompt.lane != "prefill" or not gpu.sharing.alone_is_full:
            return None
        now, horizon = max(gpu.env.now, gpu.host.free_at), self._horizon()
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
            if handover and not k:
                done, take = now, now + times.handoff_s
                ready = take + times.launch_s
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
