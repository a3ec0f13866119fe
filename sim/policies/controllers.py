"""Draft-length controllers: `fixed`, `feedback` as published, and `goodput`, an argmax over the latency model.

A policy asks `draft_length` how many tokens to draft for the next round and shows `observe` every verdict. The state of
each row has what belongs to its own round: `k`, and `last_delivery_s`, when the round before delivered. So rounds of
several batches may be under way concurrently.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil, inf, log2, sqrt
from operator import itemgetter

from pdvsim.sim.core import Chunk, Request
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.policies.options import Server
from pdvsim.sim.policies.planner import Planner
from pdvsim.sim.workload.acceptance import dropped_tokens, expected_tokens


class AcceptanceEstimate:
    """Chance that a draft token is accepted, from recent verdicts: older ones fade, with a weak prior of 0.6.

    Where the last `SHORT` verdicts contradict the longer memory, that is forgotten: acceptance has changed.
    """

    SHORT = 150.0
    SURPRISE_DEVIATIONS = 4.5
    AFRESH = 20.0  # verdicts that are left of the memory then: the next ones are what counts

    def __init__(self, memory: float = 2000.0) -> None:
        self._keep, self._keep_short = 1 - 1 / memory, 1 - 1 / self.SHORT
        self._accepted, self._tried = 6.0, 10.0
        self._latest_accepted, self._latest_tried = 6.0, 10.0

    def observe(self, accepted: int, rejected: int) -> None:
        """`accepted` drafts passed, `rejected` were the first of their round to fail; later ones had no verdict."""
        judged = accepted + rejected
        decay, short = self._keep**judged, self._keep_short**judged
        self._accepted = self._accepted * decay + accepted
        self._tried = self._tried * decay + judged
        self._latest_accepted = self._latest_accepted * short + accepted
        self._latest_tried = self._latest_tried * short + judged
        latest, rate = self._latest_accepted / self._latest_tried, self.rate
        if (latest - rate) ** 2 * self._latest_tried > self.SURPRISE_DEVIATIONS**2 * max(rate * (1 - rate), 0.05):
            self._latest_accepted *= self.AFRESH / self._latest_tried
            self._latest_tried = self.AFRESH
            self._accepted, self._tried = self._latest_accepted, self._latest_tried

    def fade(self, tried: float) -> None:
        """Limit the weight of past verdicts to this number: the next ones count for more."""
        if self._tried > tried:
            self._accepted *= tried / self._tried
            self._tried = tried
        if self._latest_tried > tried / 5:
            self._latest_accepted *= tried / 5 / self._latest_tried
            self._latest_tried = tried / 5

    @property
    def rate(self) -> float:
        return self._accepted / self._tried

    @property
    def cautious(self) -> float:
        """The rate less half its standard deviation."""
        rate = self.rate
        return max(0.0, rate - 0.5 * sqrt(rate * (1 - rate) / self._tried))


class Controller:
    """Always the same draft length."""

    learns = False  # from verdicts
    sums_suffice = True  # it needs the sums of a batch's verdict, not each row's
    selects = False  # which drafts are verified
    scheduled = 0  # requests of the step, prefills included: the policy sets it before it asks

    def __init__(self, settings: Server) -> None:
        self.k = min(settings.num_speculative_tokens, settings.longest_draft)

    @property
    def acceptance(self) -> float | None:
        """The estimated acceptance rate; None without an estimate."""
        return None

    @property
    def drafting(self) -> bool:
        """Whether drafts are made at present; while not, the drafter does not prefill."""
        return self.k > 0

    def draft_length(self, rows: Batch, queue_depth: int, now_s: float) -> int:
        """Draft length for the next round of `rows`, with that many requests queued for verification; 0: none."""
        return self.k

    def select(self, rows: Batch, chunks: Sequence[Chunk]) -> None:
        """Set how many of each row's drafts the next verify takes, whose forward carries `chunks` too."""

    def observe(self, rows: Batch, verdict: Sequence[int], now_s: float) -> None:
        """Observe a verdict: the accepted draft tokens of each of `rows`, which are delivered now."""

    def finished(self, rows: Sequence[Request]) -> None:
        """Requests that have all their tokens."""


class ByBatchSize(Controller):
    """The draft length of a table by batch size, as vLLM applies it (`num_speculative_tokens_per_batch_size`).

    A batch counts all requests of a step, prefills included. At k=0 the drafter still drafts one token, which keeps its
    KV cache complete, and nothing is verified (vLLM issue 49548).
    """

    def __init__(self, settings: Server) -> None:
        super().__init__(settings)
        self.tiers = settings.draft_table
        self._use(self.k)

    @property
    def drafting(self) -> bool:
        return True

    def _use(self, k: int) -> None:
        self.k, self.selects, self.sums_suffice = k, not k, k > 0

    def draft_length(self, rows: Batch, queue_depth: int, now_s: float) -> int:
        tiers = self.tiers
        at = bisect_right(tiers, self.scheduled, key=itemgetter(0))
        self._use(tiers[max(0, at - 1)][1])
        return max(1, self.k)

    def select(self, rows: Batch, chunks: Sequence[Chunk]) -> None:
        for row in rows:
            row.state.k, row.state.left_out = 0, row.state.k


def _computed(request: Request) -> int:
    """Prompt tokens that were not cached."""
    return request.prompt_tokens - max(0, request.taken.num_cached_tokens)


class ServedLengths:
    """Mean lengths of the requests served, older ones fading.

    By them a round is charged with what a request costs once: its prompt, its first draft, its last round.
    """

    def __init__(self) -> None:
        self.outputs, self.prompts = inf, 0.0  # tokens of a request
        self._requests = self._outputs = self._prompts = 0.0

    def look(self, rows: Sequence[Request]) -> None:
        """Count running requests as if they ended now, until one is served."""
        if not self._requests:
            self.outputs = max([row.state.emitted for row in rows])
            self.prompts = sum(map(_computed, rows)) / len(rows)

    def observe(self, rows: Sequence[Request]) -> None:
        """Learn from requests that have all their tokens."""
        for row in rows:
            self._requests = 0.99 * self._requests + 1
            self._outputs = 0.99 * self._outputs + row.output_tokens
            self._prompts = 0.99 * self._prompts + _computed(row)
            self.outputs, self.prompts = self._outputs / self._requests, self._prompts / self._requests

    def in_a_round(self, rows: int, k: int, rate: float) -> tuple[float, float]:
        """Tokens delivered in a round of `rows`, and requests that finish in it."""
        tokens = rows * expected_tokens(rate, k) / (1 + dropped_tokens(rate, k) / self.outputs)
        return tokens, tokens / self.outputs


class Learner:
    """Acceptance learned from verdicts, for controllers that may stop drafting, and when to try drafts again.

    Plain decoding teaches nothing about acceptance. Before a try the drafter must catch up on all that was decoded
    without it, so tries are as rare as `BUDGET` demands.
    """

    BUDGET = 0.006  # share of the time that tries may cost
    LEAST, AGAIN = 30, 10  # plain rounds between two tries, and after a promising one
    PROMISING = 2.0  # standard deviations by which it went better than expected
    TRUST = 60.0  # verdicts that the estimate is worth while only tries feed it

    def __init__(self) -> None:
        self.estimate = AcceptanceEstimate()
        self.served = ServedLengths()
        self._rounds_since_try = 0
        self._due = self.LEAST

    def observe(self, rows: Batch, verdict: Sequence[int], plain: bool) -> None:
        """The verdict of a round; `plain` while drafts are only tried."""
        counts = rows.verdict_counts(verdict)
        if counts is None:
            self._rounds_since_try += 1
            return
        accepted, rejected = counts
        if plain:
            self.estimate.fade(self.TRUST)
            expected, tried = self.estimate.rate, accepted + rejected
            if accepted - expected * tried > self.PROMISING * sqrt(max(expected * (1 - expected), 0.05) * tried):
                self._due = self.AGAIN
        self.estimate.observe(accepted, rejected)

    def tries(self, lost: Callable[[], float]) -> bool:
        """Return whether to draft in this round of plain decoding, where that costs `lost` plain rounds."""
        if self._rounds_since_try < self._due:
            return False
        if self._due > self.AGAIN:
            self._due = max(self.LEAST, int(lost() / self.BUDGET))
            if self._rounds_since_try < self._due:
                return False
        self._rounds_since_try, self._due = 0, self.LEAST
        return True


class Goodput(Controller):
    """The draft length with the most expected tokens per second for the batch at hand, by the latency model."""

    learns = True
    HOLD = 1.005  # another length must promise so much more than the one in use
    HOLD_PLAIN = 1.015  # likewise to begin or end plain decoding,
    PERSISTENCE = 40  # consecutive rounds
    HORIZON_S = 2.0  # within which what the drafter must read after plain decoding has to pay
    TRY_LENGTH = 4

    def __init__(self, settings: Server, planner: Planner) -> None:
        super().__init__(settings)
        self.planner = planner
        self.low, self.high = settings.draft_range
        self.k = min(max(self.k, self.low), self.high)
        self.learner = Learner()
        self._last_sizes: deque[int] = deque(maxlen=4)
        self._speeds: dict[tuple[int, ...], list[float]] = {}
        self._urge = 0  # rounds in a row in which it would have paid to begin or end plain decoding
        self._asked, self._answer = (-1.0, 0, 0), self.k

    @property
    def acceptance(self) -> float:
        return self.learner.estimate.rate

    def observe(self, rows: Batch, verdict: Sequence[int], now_s: float) -> None:
        self._last_sizes.append(len(rows))
        self.learner.observe(rows, verdict, plain=not self.k)

    def finished(self, rows: Sequence[Request]) -> None:
        self.learner.served.observe(rows)

    def draft_length(self, rows: Batch, queue_depth: int, now_s: float) -> int:
        asked = now_s, len(rows), rows.context
        if asked != self._asked:  # asking again about the same round gives the same answer
            self._asked, self._answer = asked, self._decide(rows, asked[2])
        return self._answer

    def _decide(self, rows: Sequence[Request], context: int) -> int:
        count = max((len(rows), *self._last_sizes))  # where lanes alternate, the batch at hand may be the smaller one
        context = context * count // max(1, len(rows))
        speeds = self._predicted(count, context)
        best = self.low + speeds.index(max(speeds))
        gain = max(speeds) / speeds[self.k - self.low]
        if self.k and best:
            self._urge = 0
            if gain > self.HOLD:
                self.k = best
            return self.k
        hold = self.HOLD_PLAIN
        if gain > hold and not self.k:
            hold += self.planner.lag_s(rows) * count / len(rows) / self.HORIZON_S
        self._urge = self._urge + 1 if gain > hold else 0
        if self._urge > self.PERSISTENCE:
            self.k, self._urge = best, 0
        elif self.k:  # the best that drafts can do, until it is clear that none are better
            self.k = self.low + speeds.index(max(speeds[1:]))
        elif self.learner.tries(lambda: self._lost(rows, count, context)):
            return min(self.TRY_LENGTH, self.high)
        return self.k

    def _predicted(self, count: int, context: int) -> list[float]:
        """Tokens per second at each draft length.

        They are flat around the best, so rounding what they depend on costs nothing and lets them be remembered.
        """
        served, estimate = self.learner.served, self.learner.estimate
        rate = round(estimate.rate if self.k else estimate.cautious, 2)
        lengths = [round(4 * log2(tokens + 1)) if tokens < inf else 0 for tokens in (served.outputs, served.prompts)]
        key = (count, context // (128 * count), round(100 * rate), *lengths)
        speeds = self._speeds.get(key)
        if speeds is None:
            speeds = [self._speed(count, context, k, rate) for k in range(self.low, self.high + 1)]
            self._speeds[key] = speeds
        return speeds

    def _speed(self, count: int, context: int, k: int, rate: float) -> float:
        tokens, finished = self.learner.served.in_a_round(count, k, rate)
        return tokens / self.planner.full_round_s(count, context, k, rate, finished, self.learner.served.prompts)

    def _lost(self, rows: Sequence[Request], count: int, context: int) -> float:
        """Plain rounds that trying drafts costs."""
        k, rate = min(self.TRY_LENGTH, self.high), self.learner.estimate.rate
        trying_s = self.planner.lag_s(rows) * count / len(rows) + self.planner.full_round_s(count, context, k, rate)
        return trying_s / self.planner.full_round_s(count, context, 0, rate) - expected_tokens(rate, k)


class Feedback(Controller):
    """One draft token fewer when a signal is bad, one more when all are good, as published with PD-Verify.

    Three signals: the mean acceptance ratio of the last rounds, the depth of the verify queue, and the 95th percentile
    of decode latency. The draft length falls by one when any of them is bad, rises by one when all of them are good,
    and otherwise stays: the gap between the two thresholds of a signal is the hysteresis. All figures below are the
    published ones. They do not depend on the GPU, the models or the batch, so the length it settles on is often not the
    best; the `goodput` controller computes that.

    A decode latency is here the time between two deliveries to one request. The published program timed the draft
    alone. It also adjusted after every ten verdicts, here at most once for each round, whose rows are judged together.
    """

    learns = True
    sums_suffice = False  # needs each row's verdict and latency
    WINDOW = 100  # verdicts that the signals are taken over
    INTERVAL = 10  # verdicts between two adjustments
    ACCEPTANCE = (0.4, 0.7)  # shorter below the first, longer only above the second
    QUEUE = (10, 0)  # requests: shorter above the first, longer only at the second
    LATENCY_S = (0.050, 0.040)  # shorter above the first, longer only below the second

    def __init__(self, settings: Server) -> None:
        super().__init__(settings)
        self.low, self.high = settings.draft_range
        self.k = min(max(self.k, self.low), self.high)
        self._ratios: deque[float] = deque(maxlen=self.WINDOW)
        self._latencies: deque[float] = deque(maxlen=self.WINDOW)
        self._verdicts_since_adjustment = 0

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted tokens, mean of the last verdicts."""
        return sum(self._ratios) / len(self._ratios) if self._ratios else None

    @property
    def latency_s(self) -> float:
        """95th percentile of decode latency."""
        return sorted(self._latencies)[ceil(0.95 * len(self._latencies)) - 1] if self._latencies else 0.0

    def draft_length(self, rows: Batch, queue_depth: int, now_s: float) -> int:
        if self._verdicts_since_adjustment >= self.INTERVAL:
            self._adjust(queue_depth)
            self._verdicts_since_adjustment = 0
        return self.k

    def _adjust(self, queue_depth: int) -> None:
        acceptance, latency_s = self.acceptance, self.latency_s
        assert acceptance is not None
        if acceptance < self.ACCEPTANCE[0] or queue_depth > self.QUEUE[0] or latency_s > self.LATENCY_S[0]:
            self.k = max(self.low, self.k - 1)
        elif acceptance > self.ACCEPTANCE[1] and queue_depth <= self.QUEUE[1] and latency_s < self.LATENCY_S[1]:
            self.k = min(self.high, self.k + 1)

    def observe(self, rows: Batch, verdict: Sequence[int], now_s: float) -> None:
        for row, accepted in zip(rows, verdict, strict=True):
            if row.state.k:
                self._ratios.append(accepted / row.state.k)
                self._latencies.append(now_s - row.state.last_delivery_s)
                self._verdicts_since_adjustment += 1
