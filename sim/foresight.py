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
from pdvsim.sim.records import Deliveries

Maker = Callable[[list[Request], int], Work]
Ahead = tuple[float, "list[int] | None"]  # until when, and the last verdict where that is left to the policy

_NS = 1e9


class Foresight:
    """Runs a batch ahead on one GPU.

    The rounds it takes are settled at once, before their time has come: nobody can look in between. A batch drafts and
    verifies either on one lane, launched together, or on two that hand over to each other.
    """

    def __init__(self, gpu: SimulatedGPU, deliveries: Deliveries) -> None:
        self.gpu = gpu
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
    ) -> Ahead | None:
        """Rounds of a batch that has the GPU to itself; the last one is left open if it finishes a request."""
        gpu, times = self.gpu, self.gpu.host.times
        launch_s, completion_s, handoff_s = times.launch_s, times.completion_s, times.handoff_s
        check = gpu.models["target"].shape(len(rows), k + 1)
        if k:
            drafter = gpu.models["draft"]
            single, double = drafter.shape(len(rows), 1, k), drafter.shape(len(rows), 2, k)
        now, horizon = gpu.env.now, self._horizon()
        checking = verify(rows, k)
        verify_row = gpu.row(checking)
        if k:
            drafting = draft(rows, k)
            drafting.tokens = 1
            single_row = gpu.row(drafting)
            drafting.tokens = 2
            double_row = gpu.row(drafting)
        context = sum(row.context for row in rows)
        owed = k > 0 and any(row.owed for row in rows)
        ids, runs = [row.id for row in rows], [row.runs for row in rows]
        ends = [row.output_tokens for row in rows]
        at = [row.emitted for row in rows]
        spare = min(map(sub, ends, at))  # tokens that each row still lacks, at least
        draft_ns = verify_ns = wait_ns = launched_rounds = settled = 0
        verdict: list[int] | None = None
        last: list[int] = []
        log, deliver = gpu.log.append, self.deliveries.extend
        while True:
            launched = start = now + launch_s
            if k:
                s0, s1, b0, b1, f0, f1 = double if owed else single
                draft_s = s0 + s1 * context
                drafted = start + draft_s
                draft_price = (start, drafted, draft_s, b0 + b1 * context, f0 + f1 * context)
                if handover:
                    done = drafted + completion_s
                    take = done + handoff_s
                    start = take + launch_s
                else:
                    start = launched + launch_s  # the verify is launched behind the draft
                    if drafted > start:
                        start = drafted
            s0, s1, b0, b1, f0, f1 = check
            verify_s = s0 + s1 * context
            finish = start + verify_s
            delivered = finish + completion_s
            end = delivered + handoff_s if handover else delivered
            crossing = end >= horizon
            if crossing and not alone:
                break
            if k:
                log((*(double_row if owed else single_row), *draft_price))
                draft_ns += int((drafted - launched) * _NS)
            log((*verify_row, start, finish, verify_s, b0 + b1 * context, f0 + f1 * context))
            verify_ns += int((finish - start) * _NS)
            if handover:
                wait_ns += int((take - done) * _NS)
            launched_rounds += 1
            gains = [(k if run > k else run) + 1 for run in map(getitem, runs, at)]
            if crossing or (spare <= k + 1 and any(map(ge, map(add, at, gains), ends))):
                verdict, now = [gained - 1 for gained in gains], delivered
                break
            at = list(map(add, at, gains))
            spare = spare - k - 1 if spare > 2 * (k + 1) else min(map(sub, ends, at))
            context += sum(gains)
            owed = k > 0 and k + 1 in gains
            last = gains
            deliver(ids, gains, delivered)
            settled += 1
            now = end
        if not launched_rounds:
            return None
        for i, (row, reached) in enumerate(zip(rows, at, strict=True)):
            row.draft_ns += draft_ns
            row.verify_ns += verify_ns
            row.wait_ns += wait_ns
            gained = reached - row.emitted
            row.emitted = reached
            row.context += gained
            row.rounds += settled
            if not k:
                row.owed += gained
            elif settled:
                row.drafted += settled * k
                row.accepted += gained - settled
                row.owed = int(last[i] == k + 1)
        gpu.host.free_at = now
        return now, verdict

    def _beside(
        self, prompt: Job, rows: list[Request], k: int, draft: Maker, verify: Maker, handover: bool
    ) -> Ahead | None:
        """Rounds one by one, while `prompt` is being read on another stream; none that finishes a request."""
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
