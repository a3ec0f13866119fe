"""Feedback: the draft length from what is seen alone. Acceptance, the verify queue, and how long rounds take.

The time of a round is learned for each size of batch apart: a plane over the draft length and the prompt tokens that
are read beside it, fitted to the latest rounds, those of about the length in use above all. Other lengths are tried for
a round or two now and then, to keep the plane from tilting. The length in use is the one with the most expected tokens
per second. Where drafts pile up before verify, or the 95th percentile of the rounds' times rises far above what it used
to be, the longest length allowed falls step by step.

The time of a round is that of its rows, from one delivery to the next: waiting for a lane counts, idling does not.

Not modelled: acceptance that depends on a draft's position, and prompts of which only the last stretch is seen to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf, log2
from statistics import median

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.config import Server
from pdvsim.sim.core import Request
from pdvsim.sim.policies.controllers import Learner
from pdvsim.sim.workload.acceptance import expected_tokens


class Costs:
    """What a round costs by draft length, for batches of about one size, and which length is in use."""

    KEPT, RECENT = 48, 24.0  # rounds of each length that are kept, and after which one counts for a third
    MEMORY = 1000.0  # rounds of any length, likewise
    REACH = 2.0  # lengths away from the one in use at which it counts for half
    GROWTH = 0.2  # per draft, of the cost of none: believed until lengths have been tried at any size
    BELIEF, SIZE_BELIEF = 0.3, 0.03  # rounds that this is worth, and that within one size rows do not matter
    _BELIEFS = np.array([1e-3, BELIEF, BELIEF, BELIEF, SIZE_BELIEF])
    TAIL, DRIFT = 256, 1.0005  # rounds of the tail; how fast its baseline may rise a round, so that it can forget
    PATIENCE = 16  # rounds after which a trial that was never seen alone is given up

    def __init__(self, k: int, growth: float) -> None:
        self.k = k
        self.rounds = 0
        self.token_s = inf  # a prompt token's reading, at best
        self._growth = growth
        # rounds: the plane's five terms, seconds, which of all rounds it was, how many of its length came after it
        self._seen = np.empty((self.KEPT, 8))
        self._lines: dict[int, list[int]] = {}  # where those of each length are, the oldest first
        self._used = 0
        self._tail: deque[float] = deque(maxlen=self.TAIL)
        self._baseline: float | None = None
        self._fitted_at = -1
        self._plane = [0.0] * 5
        self.trial: int | None = None  # a length that is being tried
        self._left = self._patience = 0  # rounds of the trial to come
        self.due: dict[int, int] = {}  # the round before which a length is not to be tried again
        self.entry = 0.0  # rounds that are lost where drafts follow plain decoding, and the drafter must read
        self.pause = 4.0  # rounds between two trials
        self.next_trial = 6

    def note(self, k: int, rows: int, prompt_tokens: int, seconds: float) -> None:
        """A round of this length and so many rows took so long, with so many prompt tokens read beside it."""
        self.rounds += 1
        lines = self._lines.setdefault(k, [])
        if len(lines) == self.KEPT:
            line = lines.pop(0)
        else:
            line, self._used = self._used, self._used + 1
            if line == len(self._seen):
                self._seen = np.concatenate([self._seen, np.empty_like(self._seen)])
        self._seen[lines, -1] += 1
        self._seen[line] = (1.0, k, k > 0, prompt_tokens / 512, rows * (k + 1) / 512, seconds, self.rounds, 0)
        lines.append(line)
        if k == self.k and self._fitted_at > 0:
            plain, usual = self._price(0, rows, 0), self._price(k, rows, prompt_tokens)
            if usual > 0:
                self._tail.append(seconds * max(plain, 0.1 * usual) / usual)
        self._left -= k == self.trial

    def start(self, k: int, rounds: int) -> None:
        """Try a length for so many rounds."""
        self.trial, self._left, self._patience = k, rounds, self.PATIENCE

    def passed(self) -> None:
        """A round is over, whether or not it was seen alone."""
        self._patience -= 1
        if self._left <= 0 or self._patience <= 0:
            self.trial = None

    def fit(self) -> None:
        """Least squares over the rounds seen, outliers damped, with a weak belief where nothing was seen."""
        if self.rounds < self._fitted_at + (4 if self.rounds < 100 else 8):
            return
        self._fitted_at = self.rounds
        seen = self._seen[: self._used]
        x, k, (seconds, at, newer) = seen[:, :5], seen[:, 1], seen[:, 5:].T
        weight = np.exp((at - self.rounds) / self.MEMORY - newer / self.RECENT)
        weight /= 1 + ((k - self.k) / self.REACH) ** 2
        in_use = seconds[k == self.k]
        typical = _median(in_use if len(in_use) else seconds)
        base = typical / (1 + self._growth * self.k)
        reading_s = 512 * self.token_s if self.token_s < inf else 0.0
        believed = self._BELIEFS * (base, self._growth * base, 0.0, reading_s, 0.0)
        for _ in range(3):
            weighted = x.T * weight
            plane = np.linalg.solve(weighted @ x + np.diag(self._BELIEFS), weighted @ seconds + believed)
            off = np.abs(seconds - x @ plane)
            spread = max(_median(off), 0.005 * typical)
            weight *= np.minimum(1.0, 2 * spread / np.maximum(off, 1e-12))
        self._plane = plane.tolist()

    def seconds(self, low: int, high: int, rows: int) -> list[float]:
        """What rounds of these lengths take, with no prompt beside them; longer ones never take less."""
        found: list[float] = []
        for k in range(low, high + 1):
            found.append(max(self._price(k, rows, 0), 1.005 * found[-1] if found else 1e-6))
        return found

    def growth(self, rows: int) -> float:
        """What a draft adds, of the cost of none."""
        if self._fitted_at < 0:
            return self._growth
        none, one, nine = (max(self._price(k, rows, 0), 1e-6) for k in (0, 1, 9))
        return min(max((nine - one) / 8 / none, 0.05), 0.6)

    def _price(self, k: int, rows: int, prompt_tokens: int) -> float:
        base, draft, drafting, prompt, size = self._plane
        return base + draft * k + drafting * (k > 0) + prompt * prompt_tokens / 512 + size * rows * (k + 1) / 512

    def rise(self, rounds: int) -> float:
        """How far the 95th percentile of rounds' times, reduced to length 0, is above its slow baseline."""
        if len(self._tail) < 64:
            return 1.0
        tail = sorted(self._tail)[int(0.95 * len(self._tail))]
        self._baseline = tail if self._baseline is None else min(tail, self._baseline * self.DRIFT**rounds)
        return tail / self._baseline

    def weight_of(self, k: int) -> float:
        """How much is known of a length: the rounds seen at it, older ones for less."""
        at = self._seen[self._lines.get(k, []), 6]
        return float((self.RECENT / (self.RECENT + self.rounds - at)).sum())


def _median(values: NDArray[np.float64]) -> float:
    """Of an even number the upper one: numpy's own takes longer than all else in a fit."""
    middle = len(values) // 2
    return float(np.partition(values, middle)[middle])


class Feedback(Learner):
    """Learns what rounds cost and how much is accepted, uses the best length, and gives way to queues and latency."""

    HOLD = 1.015  # another length must promise so much more than the one in use
    HORIZON = 250  # rounds within which what the drafter must read after plain decoding has to pay
    TRIAL = 2  # rounds
    SLOWER, MOST_PAUSE = 1.25, 60.0  # the pause between two trials grows by this factor, to so many rounds
    NEAR, WORTH_A_TRIAL = 2, 0.8  # lengths tried are that near, and believed to be no worse than that
    BUDGET = 0.003  # of all time may go into trials that begin or end plain decoding
    PATIENCE = 8  # rounds between two looks at queue and latency
    QUEUE = 2.0  # verify queue, in batches, beyond which drafts are too long
    RISE = 3.0  # of the 95th percentile over its baseline
    SPARED = 0.015  # plain decoding spares the drafter the prompts, which rounds do not show: at a prompt token a token

    def __init__(self, settings: Server) -> None:
        super().__init__(settings)
        self.cap = self.high
        self._costs: dict[int, Costs] = {}
        self._at: Costs | None = None  # of the last round
        self._delivered_s: dict[int, float] = {}  # when a round of each length was last over
        self._last: tuple[Costs, int, int, float] | None = None  # the last round, till it is known what was read beside
        self._token_s = inf
        self._account: tuple[Costs, int, float, int, int] | None = None  # of a trial: length, start, tokens then, end
        self._crowded = 0
        self._looks = 0

    def costs(self, rows: int) -> Costs:
        """What is known of batches of about this size."""
        size = int(log2(max(1, rows) / 3.5) / 2 + 1)  # up to 3, 13, 55 and 223 rows
        found = self._costs.get(size)
        if found is None:
            growth = Costs.GROWTH if self._at is None else self._at.growth(rows)
            found = self._costs[size] = Costs(self.k, growth)
        self._at = found
        return found

    def chosen(self, rows: Sequence[Request], queue_depth: int) -> int:
        size = self.size(rows)
        self._crowded += queue_depth > self.QUEUE * size
        costs = self.costs(size)
        self.k = min(costs.k, self.cap)
        return min(self.k if costs.trial is None else costs.trial, self.cap)

    def observe(self, rows: Sequence[Request], verdict: Sequence[int], now_s: float) -> None:
        super().observe(rows, verdict, now_s)
        if self._last is not None:
            # whoever is new was read beside the round before
            last, k, size, seconds = self._last
            new = [row for row in rows if row.rounds == 1]
            tokens = sum(row.prompt_tokens for row in new)
            if new:
                self._token_s = min(self._token_s, min(row.first_token_s - row.admitted_s for row in new) / tokens)
                last.token_s = self._token_s
            last.note(k, size, tokens, seconds)
            self._last = None
        size = self.size(rows)
        costs = self.costs(size)
        lengths = {row.k for row in rows}
        for k in lengths:
            self._delivered_s[k] = now_s
        if len(lengths) == 1:
            began_s = median(row.turn_s for row in rows)
            # a round that another length's overlapped says nothing of its own
            if all(over_s <= began_s for k, over_s in self._delivered_s.items() if k not in lengths):
                self._last = (costs, rows[0].k, size, now_s - began_s)
        costs.passed()
        self._looks += 1
        if self._looks >= self.PATIENCE:
            self._look(costs)
        if costs.rounds >= 4:
            self._choose(costs, size, now_s)

    def _look(self, costs: Costs) -> None:
        """Shorter while drafts pile up or rounds take far longer than they used to; else longer again."""
        if self._crowded > self._looks // 2 or costs.rise(self._looks) > self.RISE:
            self.cap = max(self.low, min(self.cap, costs.k) - 1)
        else:
            self.cap = min(self.high, self.cap + 1)
        self._looks = self._crowded = 0

    def _settle_account(self, costs: Costs, round_s: float, round_tokens: float, now_s: float) -> None:
        """What a trial that began or ended plain decoding has cost, in rounds as usual: sets when to repeat it."""
        assert self._account is not None
        of, k, began_s, tokens, over = self._account
        if of is not costs:
            self._account = None
        elif costs.rounds >= over:
            lost = max(0.0, (now_s - began_s) / round_s - (self.tokens - tokens) / round_tokens)
            costs.due[k] = costs.rounds + int(lost / self.BUDGET)
            if not costs.k:
                costs.entry = lost
            self._account = None

    def _choose(self, costs: Costs, size: int, now_s: float) -> None:
        """Use the length that is believed best; now and then try one near it, of which least is known."""
        costs.fit()
        rate = self.estimate.rate if costs.k else self.estimate.cautious
        seconds = costs.seconds(self.low, self.high, size)
        speeds = {k: expected_tokens(rate, k) / seconds[k - self.low] for k in range(self.low, self.high + 1)}
        if 0 in speeds:
            speeds[0] *= 1 + self.SPARED * min(1.0, self.prompts)
        best = max(speeds, key=lambda k: speeds[k])
        if self._account is not None and costs.trial is None:
            round_tokens = size * expected_tokens(rate, costs.k)
            self._settle_account(costs, seconds[costs.k - self.low], round_tokens, now_s)
        if speeds[best] > (self.HOLD + (0.0 if costs.k else costs.entry / self.HORIZON)) * speeds[costs.k]:
            costs.k = best
        if costs.trial is None and costs.rounds >= costs.next_trial:
            reach = self.NEAR if costs.k else 1
            near = [
                k
                for k in speeds
                if 0 < abs(k - costs.k) <= reach
                and speeds[k] > self.WORTH_A_TRIAL * speeds[costs.k]
                and costs.due.get(k, 0) <= costs.rounds
            ]
            if near:
                trial = min(near, key=costs.weight_of)
                costs.start(trial, self.TRIAL)
                if not (trial and costs.k):
                    self._account = (costs, trial, now_s, self.tokens, costs.rounds + self.TRIAL + 2)
            costs.pause = min(costs.pause * self.SLOWER, self.MOST_PAUSE)
            costs.next_trial = costs.rounds + int(costs.pause)
