"""PDV that drafts ahead: while a request is verified, its drafter continues from guesses of the verdict.

With `ahead_fan` 0 it guesses that all drafts are accepted, and the target's next token with them (a chain, as in PEARL,
which drops the target's own token there instead). With F it drafts for every number of accepted tokens and the F
likeliest tokens after them, as one batch of (k + 1) F rows per request (speculative speculative decoding, arXiv
2603.03251). A request whose verdict was guessed is verified again immediately. For another a new draft is made
(`draft`), or it joins the next verify without drafts, so that the batch stays whole (`plain`, that paper's fast
backup).

Not modelled: KV cache of the branches, attention that reads a prefix once for all branches,
fan-outs that differ by position, PEARL's verification of the first draft before the others are made. A draft ahead is
not interrupted when the verdict comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdvsim.sim.core import Request
from pdvsim.sim.machine.batch import Batch, Launch
from pdvsim.sim.policies.base import Context, Process, priority
from pdvsim.sim.policies.controllers import AcceptanceEstimate
from pdvsim.sim.policies.pdv import PDV
from pdvsim.sim.workload.acceptance import expected_tokens, guessed_rate, was_guessed

FANS = (0, 1, 2, 4, 8)  # that the latency model chooses among
MARGIN = 1.05  # that drafting ahead must promise


class Lookahead(NamedTuple):
    """How to draft ahead: the fan, and whether requests that were not guessed continue without drafts."""

    fan: int
    plain: bool

    def branches(self, k: int) -> int:
        """Rows that are drafted for one with k drafts under verification."""
        return (k + 1) * self.fan if self.fan else 1


class Ahead(PDV):
    """Three lanes; the draft lane does not wait for verdicts."""

    plain_rounds = True
    least_gpus = 2
    options = (*PDV.options, "ahead_fan")
    tuned = ("verify_gather", ("auto", "never"))
    drafts_ahead = verifies_all = True
    not_in_engines = "drafts while it verifies, from guesses of the result"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.verifying: list[Request] = []  # being verified, with nothing drafted ahead yet
        self.guesses: dict[Request, tuple[int, Lookahead]] = {}  # how many tokens were drafted ahead, or are, and how
        self.foreseen: set[Request] = set()  # with drafts that were made ahead, waiting for verification
        self.making: set[Request] = set()  # with drafts ahead under way
        self.kept: list[Request] = []  # of these, rows that continue when they are ready
        self.estimate = AcceptanceEstimate()
        self._plans: dict[tuple[int, int, int, int], Lookahead | None] = {}

    def decode_worker(self) -> Process:
        while True:
            if len(self.decode):
                rows = self.decode.take(self.settings.draft_batch)
                self.wake_prefill()
                yield from self.decode_batch(rows)
            elif self.verifying:
                yield from self.draft_ahead()
            else:
                yield self.decode.wait()

    def draft_ahead(self) -> Process:
        """Draft for the requests being verified, if that pays; then the requests that waited for it continue."""
        most = self.settings.draft_batch
        rows, self.verifying = Batch(self.verifying[:most]), self.verifying[most:]
        k = self.draft_length(rows)
        plan = self.choose(rows, k) if k else None
        if plan is None:
            return
        self.guesses.update(dict.fromkeys(rows, (k, plan)))
        self.making = set(rows)
        for row in rows:
            row.taken.ahead_tokens += plan.branches(row.state.k) * (k + 1)
        yield self.device.launch(self.ahead(rows, k, plan))
        self.making.clear()
        ready, self.kept = self.kept, []
        self.send_to_verify(Batch(ready))

    def ahead(self, rows: Batch, k: int, plan: Lookahead) -> Launch:
        """Draft a token after each row's last draft token, and k more, in all its branches."""
        branches = Batch(row for row in rows for _ in range(plan.branches(row.state.k)))
        lane = self.draft_lane
        return Launch("ahead", "draft", lane, branches, 1, k + 1, (), priority(self, lane, rows), self.backlog(lane))

    def choose(self, rows: Batch, k: int) -> Lookahead | None:
        """The plan with the most tokens per second by the latency model, or None if drafting ahead does not pay."""
        count, context = len(rows), rows.context
        key = (count, context // (32 * count), k, round(50 * self.estimate.rate))  # nearly the same question
        if key not in self._plans:
            self._plans[key] = self.best_plan(count, context, k)
        return self._plans[key]

    def best_plan(self, rows: int, context: int, k: int) -> Lookahead | None:
        """The plan with the most tokens per second, computed."""
        fan, miss = self.settings.ahead_fan, self.settings.ahead_miss
        # of several, rows with new drafts would lag, and the batch would split
        plains = {"draft": (False,), "plain": (True,), "auto": (True,) if rows > 1 else (False, True)}[miss]
        ways = [Lookahead(some, plain) for some in (FANS if fan is None else (fan,)) for plain in plains]
        if len(ways) == 1:
            return ways[0]
        speeds: dict[Lookahead | None, float] = {plan: self.speed(plan, rows, context, k) for plan in ways}
        if fan is None:
            rate = self.estimate.rate
            speeds[None] = MARGIN * expected_tokens(rate, k) / self.planner.full_round_s(rows, context, k, rate)
        return max(speeds, key=lambda plan: speeds[plan])

    def speed(self, plan: Lookahead, rows: int, context: int, k: int) -> float:
        """Tokens per row and second."""
        rate, exponent = self.estimate.rate, self.settings.ahead_exponent
        hits = guessed_rate(rate, k, plan.fan, exponent)
        if not plan.plain:
            return expected_tokens(rate, k) / self.planner.ahead_s(rows, context, k, plan.branches(k), hits)
        again = guessed_rate(rate, 0, plan.fan, exponent)
        drafted_share = again / (1 - hits + again)
        branches = drafted_share * plan.branches(k) + (1 - drafted_share) * plan.branches(0)
        gain = drafted_share * expected_tokens(rate, k) + 1 - drafted_share
        return gain / self.planner.ahead_s(rows, context, k, branches, 1.0)

    def verify_worker(self) -> Process:
        while True:
            while not len(self.verify_queue) or self.gathers():
                yield self.verify_queue.wait()
            rows = self.verify_queue.take(self.settings.verify_batch)
            for row in self.foreseen.intersection(rows):
                row.taken.ahead_used += row.state.k
            self.foreseen.difference_update(rows)
            judging = self.device.launch(self.verify(rows, rows.k))
            if self.speculates:
                self.verifying = [row for row in rows if row.state.emitted + row.state.k + 1 < row.output_tokens]
            if self.verifying:
                self.decode.wake(self.env.now)
            verdict = yield judging
            self.verifying = []
            next_k = {row: self.guessed(row, accepted) for row, accepted in zip(rows, verdict, strict=True)}
            self.route_verified(self.settle(rows, verdict), next_k)

    def guessed(self, row: Request, accepted: int) -> int | None:
        """Drafts that were made ahead for this verdict; None where it was not foreseen."""
        if row not in self.guesses:
            return None
        k, plan = self.guesses.pop(row)
        if was_guessed(row, accepted, plan.fan, self.settings.ahead_exponent):
            return k
        return 0 if plan.plain else None

    def route_verified(self, rows: Batch, next_k: dict[Request, int | None]) -> None:
        """Requests whose next round is decided continue when their drafts exist; the others get a new draft."""
        ready: list[Request] = []
        anew: list[Request] = []
        for row in rows:
            k = next_k[row]
            if k is None:
                anew.append(row)
                continue
            row.state.k = k
            if k:
                row.state.drafter_lag = 0
                self.foreseen.add(row)
            (self.kept if row in self.making else ready).append(row)
        self.send_to_verify(Batch(ready))
        self.decode.put(Batch(row for row in anew if row in self.kv))  # room for the others may have cost them theirs

    def preempt(self, request: Request) -> None:
        super().preempt(request)
        self.foreseen.discard(request)
        if request in self.kept:
            self.kept.remove(request)

    def send_to_verify(self, rows: Batch) -> None:
        """Hand rows to the verify lane with the drafts that were made ahead."""
        if rows:
            self.verify_queue.put(self.reserve(rows, rows.k))

    def settle(self, rows: Batch, verdict: Sequence[int]) -> Batch:
        self.estimate.observe(*(rows.verdict_counts(verdict) or (0, 0)))
        return super().settle(rows, verdict)
