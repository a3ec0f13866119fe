"""Feedback: the draft length from what is seen alone. Acceptance, the verify queue, and how long rounds take.

The time of a round is learned by draft length, for each size of batch apart: a scale, which follows the latest rounds,
times a shape, which is learned by trying other lengths for a few rounds. The length in use is the one with the most
expected tokens per second; where drafts pile up before verify, or the 95th percentile of the scale rises far above what
it used to be, the longest length allowed falls step by step.

The time of a round is that of its rows, from one delivery to the next, so waiting for a lane counts and idling does not.
Of several rounds the lower quartile is taken: prompts that are read beside a round cost the same at every length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf, log2
from statistics import fmean, median

from pdvsim.sim.acceptance import expected_tokens
from pdvsim.sim.config import Server
from pdvsim.sim.controllers import Learner
from pdvsim.sim.core import Request


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which that share lies, read between neighbours by a straight line."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


class Prompts:
    """What a prompt token that is read beside a round adds to its time, from rounds of one length behind each other.

    Where all have as many beside them, that tells nothing; then the fastest reading of prompts yet seen is believed.
    """

    KEEP = 0.98
    BELIEF = 2.0 * 512**2  # tokens squared: the weight of that belief

    def __init__(self) -> None:
        self._before: tuple[int, float, int] | None = None
        self._together = self._square = 0.0
        self._fastest_s = inf

    def without(self, k: int, seconds: float, new: Sequence[Request]) -> float:
        """What a round would have taken alone, without the prompts of the `new` rows."""
        tokens = sum(row.prompt_tokens for row in new)
        if new:
            self._fastest_s = min(self._fastest_s, min(row.first_token_s - row.admitted_s for row in new) / tokens)
        if self._before is not None and self._before[0] == k:
            more_s, more = seconds - self._before[1], tokens - self._before[2]
            if more:
                self._together = self._together * self.KEEP + more_s * more
                self._square = self._square * self.KEEP + more * more
        self._before = (k, seconds, tokens)
        if not tokens:
            return seconds
        return min(max(seconds - tokens * self.token_s, 0.3 * seconds), seconds)

    @property
    def token_s(self) -> float:
        if self._fastest_s == inf:
            return 0.0
        return max(0.0, (self._together + self.BELIEF * self._fastest_s) / (self._square + self.BELIEF))


class Costs:
    """What a round costs by draft length, for batches of about one size, and which length is in use."""

    GROWTH = 0.2  # of the cost at length 0, per draft: believed until two lengths have been tried
    FEW, MANY = 3, 8  # rounds of a trial: the first, and where their times scatter the later ones
    NOISY = 1.03  # upper over lower quartile
    STEADY, UPSET = 1.12, 1.4  # what these may differ by, to be trusted for long, and at all
    AGREE = 0.12  # what two trials of a length may differ by
    SOON, OFTEN, SELDOM = 10, 40, 640  # rounds to the next trial: of one not to be trusted, of the first, of the last
    BUDGET = 0.005  # of all time may go into repeating a trial
    TAIL_ROUNDS = 256
    DRIFT = 1.0005  # a round: how fast the tail's baseline may rise, so that it forgets what no longer is

    def __init__(self, k: int, shape: dict[int, float]) -> None:
        self.k = k
        self.shape = shape  # relative cost by length, of those tried
        self.due: dict[int, int] = {}  # the round at which a length tried in earnest is to be tried again
        self._wait: dict[int, int] = {}  # and the rounds in between
        self._times: dict[int, int] = {}  # trials that a cost is the mean of
        self.rounds = 0
        self.sweep = 0  # the round at which lengths farther off are looked at again
        self.trial: int | None = None
        self._judging: int | None = None  # tried; the rounds after it are awaited
        self.sure: set[int] = set()  # lengths tried while all else stayed as it was
        self._doubts = 0
        self._worth = 1.0
        self.entry = 0.0  # rounds that are lost where drafts follow plain decoding, and the drafter must read
        self._needs = self.FEW
        self._tried: list[tuple[int, float]] = []  # rows, and seconds of a round
        self._before: list[tuple[int, float]] = []  # rows and scale, likewise
        self._recent: deque[tuple[int, float]] = deque(maxlen=self.MANY)
        self._tail: deque[float] = deque(maxlen=self.TAIL_ROUNDS)
        self._baseline: float | None = None
        self.shape.setdefault(k, 1.0)

    def of(self, k: int) -> float:
        """The relative cost of a length: as tried, or by the straight line through the two nearest that were."""
        known = self.shape.get(k)
        if known is not None:
            return known
        near = sorted(self.shape, key=lambda tried: abs(tried - k))[:2]
        first = self.shape[near[0]]
        if len(near) == 1:
            return first * (1 + self.GROWTH * k) / (1 + self.GROWTH * near[0])
        slope = (self.shape[near[1]] - first) / (near[1] - near[0])
        return max(first + max(slope, 0.02 * first) * (k - near[0]), 0.1 * first)

    def note(self, k: int, rows: int, seconds: float) -> None:
        """A round of this length and so many rows took so long."""
        self.rounds += 1
        if k == self.trial:
            self._tried.append((rows, seconds))
            if len(self._tried) == self._needs:
                self.trial, self._judging = None, k
                self._before = list(self._recent)
                self._recent.clear()
        elif k == self.k:
            scale = seconds / self.of(k)
            self._recent.append((rows, scale))
            self._tail.append(scale)
            if self._judging is not None and len(self._recent) > self._needs:
                self._conclude(self._judging)
                self._judging = None

    def hasty(self) -> tuple[int, float] | None:
        """A length that has been tried and not yet been judged, and its relative cost by the rounds before alone."""
        if self._judging is None or self._recent or self._judging in self.sure:
            return None
        before, tried = (quantile((s for _, s in each), 0.25) for each in (self._before, self._tried))
        return self._judging, tried / before

    def adopt(self, k: int, cost: float) -> None:
        """Use a length whose trial left no doubt."""
        self.k, self._judging = k, None
        self._set(k, cost)
        self.due[k] = self.rounds

    def _conclude(self, k: int) -> None:
        """Hold the trial against the rounds before and after it; where those differ, something else has changed."""
        before, after, tried = (quantile((s for _, s in each), 0.25) for each in (self._before, self._recent, self._tried))
        sizes = [rows for rows, _ in (*self._before, *self._recent, *self._tried)]
        change = max(max(before, after) / min(before, after), max(sizes) / min(sizes))
        alike = change < self.STEADY
        if change > self.UPSET and self._doubts < 2:
            self._doubts += 1
            self.due[k] = self.rounds
            return
        self._doubts = 0
        found = 2 * tried / (before + after)
        usual_s = fmean(scale for _, scale in self._before) * self.of(self.k)
        spent_s = sum(seconds for _, seconds in self._tried) + sum(scale for _, scale in self._recent) * self.of(self.k)
        lost = spent_s / usual_s - len(self._recent) - len(self._tried) * self._worth
        if not self.k:
            self.entry = max(lost, 0.0)
        known = self.shape.get(k)
        if known is not None and k in self._wait:
            agree = abs(found / known - 1) < self.AGREE
            self._wait[k] = min(2 * self._wait[k], self.SELDOM) if agree else self.OFTEN
            self._times[k] = min(self._times[k] + 1, 5) if agree else 1
            found = known + (found - known) / self._times[k]
        self._wait.setdefault(k, self.OFTEN)
        self._times.setdefault(k, 1)
        self._set(k, found)
        (self.sure.add if alike else self.sure.discard)(k)
        self.due[k] = self.rounds + int(max(self._wait[k] if alike else self.SOON, lost / self.BUDGET))

    def _set(self, k: int, cost: float) -> None:
        self.shape[k] = cost
        for other, known in self.shape.items():  # longer drafts cost more: what says otherwise is out of date
            if (other < k and known > cost) or (other > k and known < cost):
                self.shape[other] = cost
                self.due.pop(other, None)
                self._wait.pop(other, None)
                self._times.pop(other, None)
                self.sure.discard(other)

    def start(self, k: int, worth: float) -> None:
        """Try a length; a round of it brings `worth` times the tokens of one of the length in use."""
        self.trial, self._worth = k, worth
        self._tried = []
        scales = [scale for _, scale in self._recent]
        scatter = quantile(scales, 0.75) / quantile(scales, 0.25)
        self._needs = self.MANY if scatter > self.NOISY and k in self._times else self.FEW

    @property
    def idle(self) -> bool:
        """Whether a trial may start."""
        return self.trial is None and self._judging is None and len(self._recent) > self.FEW

    def rise(self) -> float:
        """The 95th percentile of the scale over its slow baseline."""
        if len(self._tail) < self.TAIL_ROUNDS // 2:
            return 1.0
        tail = quantile(self._tail, 0.95)
        if self._baseline is None or tail < self._baseline:
            self._baseline = tail
        return tail / self._baseline

    def drift(self, rounds: int) -> None:
        if self._baseline is not None:
            self._baseline *= self.DRIFT**rounds


class Feedback(Learner):
    """Learns what rounds cost and how much is accepted, uses the best length, and gives way to queues and latency."""

    HOLD = 1.015  # another length must promise so much more than the one in use
    HORIZON = 250  # rounds within which what the drafter must read after plain decoding has to pay
    # plain decoding also spares the drafter the prompts, which a few rounds do not show: at a prompt token a token
    SPARED = 0.015
    SWEEP = 150  # rounds after which one of the others is looked at again, unless it is believed to be far worse
    WORTH_A_LOOK = 0.75
    OBVIOUS = 1.25  # so much better needs no second look
    HOPE, STALE_HOPE = 1.1, 1.03  # what a length may turn out better than believed: in doubt, or tried long ago
    PATIENCE = 8  # rounds between two looks at queue and latency
    QUEUE = 2.0  # verify queue, in batches, beyond which drafts are too long
    RISE = 3.0  # of the 95th percentile over its baseline

    def __init__(self, settings: Server) -> None:
        super().__init__(settings)
        self.cap = self.high
        self._costs: dict[int, Costs] = {}
        self._size = 0
        self._delivered_s: dict[int, float] = {}  # when a round of each length was last over
        self._last: tuple[Costs, int, int, float] | None = None  # the last round, till it is known what was read beside
        self._prompts = Prompts()
        self._crowded = 0
        self._looks = 0

    def costs(self, rows: int) -> Costs:
        """What is known of batches of about this size; of a new size, what was learned at the last one is believed."""
        size = int(log2(max(1, rows) / 3.5) / 2 + 1)
        found = self._costs.get(size)
        if found is None:
            last = self._costs.get(self._size)
            found = self._costs[size] = Costs(self.k, dict(last.shape) if last else {})
        self._size = size
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
            last.note(k, size, self._prompts.without(k, seconds, new))
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
        self._looks += 1
        if self._looks >= self.PATIENCE:
            self._look(costs)
        hasty = costs.hasty()
        if hasty is not None:
            (k, cost), rate = hasty, self.estimate.rate
            if expected_tokens(rate, k) / cost > self.OBVIOUS * expected_tokens(rate, costs.k) / costs.of(costs.k):
                costs.adopt(k, cost)
        if costs.idle:
            self._choose(costs)

    def _look(self, costs: Costs) -> None:
        """Shorter while drafts pile up or rounds take far longer than they used to; else longer again."""
        if self._crowded > self._looks // 2 or costs.rise() > self.RISE:
            self.cap = max(self.low, min(self.cap, costs.k) - 1)
        else:
            self.cap = min(self.high, self.cap + 1)
        costs.drift(self._looks)
        self._looks = self._crowded = 0

    def _choose(self, costs: Costs) -> None:
        """Use the best of the lengths tried; then see whether one that was not, or not lately, deserves a trial."""
        rate = self.estimate.rate if costs.k else self.estimate.cautious
        speeds = {k: expected_tokens(rate, k) / costs.of(k) for k in range(self.low, self.high + 1)}
        if 0 in speeds:
            speeds[0] *= 1 + self.SPARED * min(1.0, self.prompts)
        best = max(costs.shape.keys() & speeds.keys(), key=lambda k: speeds[k])
        if speeds[best] > (self.HOLD if costs.k else self.HOLD + costs.entry / self.HORIZON) * speeds[costs.k]:
            costs.k = best
        due = [k for k in speeds if k != costs.k and costs.due.get(k, 0) <= costs.rounds]
        hopes = {k: speeds[k] * (self.STALE_HOPE if k in costs.sure else self.HOPE) for k in due}
        likely = max(due, key=lambda k: hopes[k], default=costs.k)
        if not due or hopes[likely] < speeds[costs.k]:
            # a neighbour that a poor measurement has put in the shade would stay there
            likely = next((k for k in (costs.k + 1, costs.k - 1) if k in due), costs.k)
            if likely == costs.k and costs.rounds >= costs.sweep and costs.k:
                likely = max(due, key=lambda k: speeds[k], default=costs.k)
                if speeds[likely] < self.WORTH_A_LOOK * speeds[costs.k]:
                    likely = costs.k
                costs.sweep = costs.rounds + self.SWEEP
        if likely != costs.k:
            costs.start(likely, expected_tokens(rate, likely) / expected_tokens(rate, costs.k))
