"""Who chooses the draft length: nobody (`fixed`), a feedback loop, or an argmax over the calibrated latency model.

A policy asks `draft_length` how many tokens to draft for the next round and shows `observe` every verdict. Rows carry
what belongs to their own round: `k`, and `turn_s`, when the round before delivered. So rounds of several batches may be
under way concurrently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import sqrt

from pdvsim.sim.config import Server
from pdvsim.sim.core import Request
from pdvsim.sim.policies.planner import Planner
from pdvsim.sim.workload.acceptance import expected_tokens


class AcceptanceEstimate:
    """Chance that a draft token is accepted, from recent verdicts: older ones fade, with a weak prior of 0.6.

    Where the last `SHORT` verdicts contradict the longer memory, that is forgotten: acceptance has changed.
    """

    SHORT = 150.0
    SURPRISE = 4.5  # standard deviations
    AFRESH = 20.0  # verdicts that are left of the memory then: the next ones are what counts

    def __init__(self, memory: float = 2000.0) -> None:
        self._keep, self._keep_short = 1 - 1 / memory, 1 - 1 / self.SHORT
        self._accepted, self._tried = 6.0, 10.0
        self._latest_accepted, self._latest_tried = 6.0, 10.0

    def observe(self, accepted: int, rejected: int) -> None:
        """`accepted` drafts passed, `rejected` were the first of their round to fail; those behind had no verdict."""
        judged = accepted + rejected
        decay, short = self._keep**judged, self._keep_short**judged
        self._accepted = self._accepted * decay + accepted
        self._tried = self._tried * decay + judged
        self._latest_accepted = self._latest_accepted * short + accepted
        self._latest_tried = self._latest_tried * short + judged
        latest, rate = self._latest_accepted / self._latest_tried, self.rate
        if (latest - rate) ** 2 * self._latest_tried > self.SURPRISE**2 * max(rate * (1 - rate), 0.05):
            self._latest_accepted *= self.AFRESH / self._latest_tried
            self._latest_tried = self.AFRESH
            self._accepted, self._tried = self._latest_accepted, self._latest_tried

    def fade(self, tried: float) -> None:
        """Trust no more than the worth of so many verdicts: the next ones count for more."""
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


def judged(rows: Sequence[Request], verdict: Sequence[int]) -> tuple[int, int] | None:
    """Drafts accepted, and rows whose next one was refused; None where nothing was drafted.

    A row for which none was found counts as refused: the next round is as likely to find none.
    """
    accepted = refused = 0
    drafted = False
    for row, passed in zip(rows, verdict, strict=True):
        if row.k:
            drafted = True
            accepted += passed
            refused += passed < row.k
        elif row.missed:
            drafted = True
            refused += 1
    return (accepted, refused) if drafted else None


class Controller:
    """Always the same draft length."""

    learns = False  # from verdicts

    def __init__(self, settings: Server) -> None:
        self.k = min(settings.num_speculative_tokens, settings.longest_draft)

    @property
    def drafting(self) -> bool:
        """Whether drafts are made these days; while not, the drafter leaves prompts unread."""
        return self.k > 0

    def draft_length(self, rows: Sequence[Request], queue_depth: int, now_s: float) -> int:
        """Draft length for the next round of `rows`, with that many requests queued for verification; 0: none."""
        return self.k

    def observe(self, rows: Sequence[Request], verdict: Sequence[int], now_s: float) -> None:
        """The target has judged the drafts of `rows`: so many of each were accepted, and are delivered now."""


class Learner(Controller):
    """A controller that learns acceptance from the verdicts, and may choose to decode plainly.

    Plain decoding teaches nothing about acceptance, so drafts are tried now and then. The drafter must first read all
    that it missed, so this happens as often as `TRY_BUDGET` allows.
    """

    learns = True
    TRY_BUDGET = 0.006  # of all rounds may be lost to trying
    TRY_LEAST = 30  # plain rounds from one try to the next
    TRY_AGAIN, PROMISING = 10, 2.0  # likewise after a try that went so many standard deviations better than expected
    TRY_LENGTH = 4
    TRY_TRUST = 60.0  # verdicts that the estimate is worth while only tries feed it

    def __init__(self, settings: Server) -> None:
        super().__init__(settings)
        self.low, self.high = settings.min_speculative_tokens, settings.max_speculative_tokens
        self.k = min(max(self.k, self.low), self.high)
        self.estimate = AcceptanceEstimate()
        self._sizes: deque[int] = deque(maxlen=4)  # rows of the last rounds
        self.tokens = 0  # delivered in all
        self._outputs, self._prompts = 1.0, 0.0  # tokens of the requests served; older ones fade
        self._plain = 0  # rounds since drafts were tried
        self._plain_s, self._plain_rows = 0.0, 1  # of the last one
        self._patience = 90.0  # plain rounds to the next try

    def draft_length(self, rows: Sequence[Request], queue_depth: int, now_s: float) -> int:
        if self.k == 0 and self._plain >= self._patience:
            self._plain = 0
            return min(self.TRY_LENGTH, self.high)
        return self.chosen(rows, queue_depth)

    def chosen(self, rows: Sequence[Request], queue_depth: int) -> int:
        """The length to use where drafts are not merely tried."""
        raise NotImplementedError

    @property
    def prompts(self) -> float:
        """Prompt tokens that are read for each token delivered, of the requests served."""
        return self._prompts / self._outputs

    def size(self, rows: Sequence[Request]) -> int:
        """Rows that a verify has these days: where lanes take turns, a batch at hand may be the smaller one."""
        return max((len(rows), *self._sizes))

    def observe(self, rows: Sequence[Request], verdict: Sequence[int], now_s: float) -> None:
        self._sizes.append(len(rows))
        delivered = len(rows) + sum(verdict)
        self.tokens += delivered
        for row in rows:
            if row.emitted == row.output_tokens:
                self._outputs = 0.99 * self._outputs + row.output_tokens
                self._prompts = 0.99 * self._prompts + row.prompt_tokens
        found = judged(rows, verdict)
        if found is None:
            self._plain += 1
            self._plain_s, self._plain_rows = now_s - rows[-1].turn_s, len(rows)
            return
        accepted, rejected = found
        if not self.k:
            self.estimate.fade(self.TRY_TRUST)
            if self._plain_s:
                spent = (now_s - rows[-1].turn_s) / self._plain_s
                lost = spent - (len(rows) + sum(verdict)) / self._plain_rows
                self._patience = max(lost / self.TRY_BUDGET, self.TRY_LEAST)
            expected, tried = self.estimate.rate, accepted + rejected
            if accepted - expected * tried > self.PROMISING * sqrt(max(expected * (1 - expected), 0.05) * tried):
                self._patience = self.TRY_AGAIN
        self.estimate.observe(accepted, rejected)


class Goodput(Learner):
    """The draft length with the most expected tokens per second for the batch at hand, by the latency model."""

    HOLD = 1.015  # another length must promise so much more than the one in use
    PERSISTENCE = 40  # rounds in a row for which it must, to begin or end plain decoding
    HORIZON_S = 2.0  # within which what the drafter must read after plain decoding has to pay

    def __init__(self, settings: Server, planner: Planner) -> None:
        super().__init__(settings)
        self.planner = planner
        self._speeds: dict[tuple[int, int, int, int], list[float]] = {}
        self._urge = 0

    def chosen(self, rows: Sequence[Request], queue_depth: int) -> int:
        count = self.size(rows)
        context = sum(row.context for row in rows) * count // max(1, len(rows))
        # the answer is flat around its best: rounding the question costs nothing and lets it be remembered
        rate = self.estimate.rate if self.k else self.estimate.cautious
        key = (count, context // (64 * count), round(rate * 100), round(10 * self.prompts))
        speeds = self._speeds.get(key)
        if speeds is None:
            rate = key[2] / 100
            speeds = self._speeds[key] = [
                self._speed(count, context, k, rate, key[3] / 10) for k in range(self.low, self.high + 1)
            ]
        best, hold = self.low + speeds.index(max(speeds)), self.HOLD
        if not self.k and speeds[best - self.low] > hold * speeds[0]:
            hold += self.planner.behind_s(rows) * count / len(rows) / self.HORIZON_S
        if speeds[best - self.low] <= hold * speeds[self.k - self.low]:
            self._urge = 0
            return self.k
        self._urge += 1
        if self.k and best:
            self.k = best
        elif self._urge > self.PERSISTENCE:
            self.k, self._urge = best, 0
        elif self.k:  # the best that drafts can do, until it is clear that none are better
            self.k = self.low + speeds.index(max(speeds[1:]))
        return self.k

    def _speed(self, rows: int, context: int, k: int, rate: float, prompts: float) -> float:
        """Expected tokens a second, with the drafter's reading of so many prompt tokens for each."""
        tokens = rows * expected_tokens(rate, k)
        reading_s = tokens * prompts * self.planner.prompt_token_s if k else 0.0
        return tokens / (self.planner.turn_s(rows, context, k, rate) + reading_s)
