"""The fast path: rounds in which nothing else happens are simulated many at a time.

A policy that announces that its rows continue (`Policy.rounds`) need not be asked after every round. While the GPU has
no other launch, no event is due and the KV cache has room, a round is a draft and then a verify, and their prices
follow from the batch's sums. Start and end times are one running sum, added in the order of the event queue, so they
are equal bit for bit. Short sequences of rounds, and those of a GPU near its power limit, are simulated launch by
launch.

Not covered: hosts that poll, n-gram drafts, and lanes on several GPUs. Their rounds are simulated one by one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import exp, inf
from operator import sub
from typing import Any, NamedTuple

from pdvsim.sim.core import Role
from pdvsim.sim.hardware.costs import AffineCost
from pdvsim.sim.machine.batch import ROUNDS, RunningBatch
from pdvsim.sim.machine.device import SimulatedGPU

FEW = 3  # rounds, for which sums do not pay
FORGOTTEN = 40  # times the memory of the mean draw, of which e**-40 is left

Joules = tuple[float, float]  # that a launch draws besides the GPU's rest: a constant, and per cached token


class RoundPrices(NamedTuple):
    """The launches of a round by number of rows: their log entries and prices, drafts by their catch-up tokens."""

    draft_numbers: list[int]
    drafts: list[AffineCost]
    verify_number: int
    verify: AffineCost
    draft_joules: list[Joules]
    verify_joules: Joules


class PassedRounds(NamedTuple):
    """Rounds gone through: the host's and the GPU's state after them, and what to write down."""

    over_s: list[float]  # when the host knew of each verdict
    now_s: float
    free_s: float
    ended_s: float
    mean_w: float
    launches: Any  # short rows of the log
    spent_s: tuple[float, float, float]  # by drafts, waiting for the verify, and verifies


class ForeseeingGPU(SimulatedGPU):
    """A simulated GPU with the fast path for rounds."""

    def __init__(self, *args: Any, blocks: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.foresees = blocks and self.has_draft is None and self.books.log.carried is None
        self._round_prices: dict[tuple[tuple[str, str], int, int, tuple[bool, ...]], RoundPrices] = {}
        self._windowed = [model for model in self.books.models.values() if model.window]

    def pass_rounds(self, batch: RunningBatch, lanes: tuple[str, str], depth: int, most: int = ROUNDS) -> int:
        """Go through `most` rounds of `batch` that are over before anything else happens; returns how many.

        The last is at most the one with which the first row finishes; where rows are handed over, the one before it.
        """
        env, host, handed = self.env, self.host, lanes[0] != lanes[1]
        if self.running or self.coming or self.fresh or host.times.idle_poll_s:
            return 0
        prices = self._prices(lanes, len(batch), batch.k, batch.context)
        horizon_s = env.horizon(self)
        most = min(most, batch.end - batch.round - handed)
        if horizon_s < inf:  # no round is shorter than its verify
            most = min(most, int((horizon_s - env._now) / prices.verify.seconds_0))
        if most < 1 or (most := batch.roomy(most)) < 1:
            return 0
        contexts, owed = batch.sums(most)
        for model in self._windowed:  # rounds past the window have another price
            if not model.is_past_window(len(batch), contexts[0]) and model.is_past_window(len(batch), contexts[-1]):
                most = bisect_right(contexts, len(batch) * model.window)
                contexts, owed = contexts[:most], owed[:most]
        if batch.k and max(owed) >= len(prices.drafts):
            return 0
        passed = _in_one(self, len(batch), handed, depth, prices, contexts, owed, horizon_s) if most > FEW else None
        if passed is None:
            passed = _one_by_one(self, len(batch), handed, depth, batch.k, prices, contexts, owed, horizon_s)
        if passed.over_s:
            env._now, host.free_at = passed.now_s, passed.free_s
            self.time_s, self.mean_w = passed.ended_s, passed.mean_w
            self.books.extend_short(passed.launches)
            batch.pass_rounds(passed.over_s, passed.spent_s)
        return len(passed.over_s)

    def _prices(self, lanes: tuple[str, str], rows: int, k: int, context: int) -> RoundPrices:
        """Looked up, or made the first time."""
        key = (lanes, rows, k, tuple([model.is_past_window(rows, context) for model in self._windowed]))
        prices = self._round_prices.get(key)
        if prices is None:
            books = self.books
            numbers, drafts = [], []
            for owed in range(books.models["draft"].widest if k else 0):
                number, cost = books.kind(lanes[0], "draft", "draft", rows, 1 + owed, k, context)
                numbers.append(number)
                drafts.append(cost)
            number, verify = books.kind(lanes[1], "verify" if k else "decode", "target", rows, k + 1, 1, context)
            draft_joules = [self._joules(cost, "draft") for cost in drafts]
            joules = self._joules(verify, "target")
            prices = RoundPrices(numbers, drafts, number, verify, draft_joules, joules)
            books.joules_of |= dict(zip([*numbers, number], [*draft_joules, joules], strict=True))
            self._round_prices[key] = prices
        return prices

    def _joules(self, cost: AffineCost, role: Role) -> Joules:
        return (0.0, 0.0) if self.power is None else self.power.joules(cost, self.flop_factors[role])


def _in_one(
    gpu: ForeseeingGPU,
    rows: int,
    handed: bool,
    depth: int,
    prices: RoundPrices,
    contexts: list[int],
    owed: list[int],
    horizon_s: float,
) -> PassedRounds | None:
    """All rounds by one running sum; None where launches do not simply follow each other, or may be throttled."""
    times, drafting = gpu.host.times, bool(prices.drafts)
    begin_s = max(gpu.env._now, gpu.host.free_at)
    completion_s = times.completed_s(rows)
    before, after = [times.launch_s], [completion_s]  # spans of the host about the verify
    if handed:
        before, after = [times.handoff_s, times.notify_s, *before], [*after, times.handoff_s, times.notify_s]
    drafts_s, draft_s, wait_s = [], 0.0, 0.0
    if drafting:
        lines = [shape[:2] for shape in prices.drafts]
        drafts_s = [
            lines[behind][0] + lines[behind][1] * context for context, behind in zip(contexts, owed, strict=True)
        ]
        if handed:
            before = [times.launch_s, 0.0, completion_s, *before]
        elif min(drafts_s) < times.launch_s:
            return None
        else:  # the host launches the verify while the draft runs
            before = [times.launch_s, 0.0]
    if gpu.time_s > begin_s or not _is_calm(gpu, prices, contexts[0], contexts[-1]):
        return None
    solo_0, solo_1 = prices.verify[:2]
    verifies_s = [solo_0 + solo_1 * context for context in contexts]
    verify_at = len(before)
    spans = [*before, 0.0, *after]
    width = len(spans)
    spans *= len(verifies_s)
    spans[verify_at::width] = verifies_s
    if drafting:
        spans[1::width] = drafts_s
    at_s = list(accumulate(spans, initial=begin_s))  # when each span begins; the last one's end
    count = bisect_left(at_s[width::width], horizon_s)
    stop = count * width

    def column(first: int) -> list[float]:
        return at_s[first : first + stop : width]

    cached = contexts[:count]
    starts_s, ends_s = column(verify_at), column(verify_at + 1)
    size = 10 if drafting else 5
    launches: list[float] = [0.0, depth, 0.0, 0.0, 0.0] * (count * size // 5)
    launches[size - 5 :: size] = [prices.verify_number] * count
    launches[size - 3 :: size], launches[size - 2 :: size], launches[size - 1 :: size] = cached, starts_s, ends_s
    if drafting:
        launches[::10] = [prices.draft_numbers[behind] for behind in owed[:count]]
        launches[2::10], launches[3::10], launches[4::10] = cached, column(1), column(2)
        draft_s = _total_s(column(1), column(2))
    if handed:
        handed_at = 3 if drafting else 0
        wait_s = _total_s(column(handed_at), column(handed_at + 2))
        if count and not drafting:
            wait_s += begin_s - gpu.env._now  # the rows were ready while the host was busy
    passed = PassedRounds(
        column(verify_at + 2), at_s[stop], at_s[stop - 1] if handed else at_s[stop], ends_s[-1] if count else 0.0,
        gpu.mean_w, launches, (draft_s, wait_s, _total_s(starts_s, ends_s)),
    )  # fmt: skip
    return passed._replace(mean_w=_mean_w(gpu, launches)) if count and gpu.power is not None else passed


def _total_s(starts_s: list[float], ends_s: list[float]) -> float:
    return float(sum(map(sub, ends_s, starts_s)))


def _is_calm(gpu: ForeseeingGPU, prices: RoundPrices, first: int, last: int) -> bool:
    """Whether no launch is throttled; what launches of one shape draw rises or falls all the way with the context."""
    if gpu.power is None:
        return True
    fit = gpu.power.fit
    most_w = fit.limit_w - fit.rest_w
    costs = ((prices.verify, prices.verify_joules), *zip(prices.drafts, prices.draft_joules, strict=True))
    return gpu.mean_w <= fit.limit_w and all(
        joules[0] + joules[1] * context <= most_w * (cost[0] + cost[1] * context)
        for cost, joules in costs
        for context in (first, last)
    )


def _mean_w(gpu: ForeseeingGPU, launches: list[float]) -> float:
    """The mean draw after these launches; what lies further back than `FORGOTTEN` times its memory does not count."""
    assert gpu.power is not None
    fit, kinds = gpu.power.fit, gpu.books.joules_of
    since_s, more_w = gpu.time_s, gpu.mean_w - fit.rest_w
    first = 5 * bisect_left(launches[4::5], launches[-1] - FORGOTTEN * fit.settle_s)
    if first:
        since_s, more_w = launches[first - 1], 0.0
    rows = zip(
        launches[first::5], launches[first + 2 :: 5], launches[first + 3 :: 5], launches[first + 4 :: 5], strict=True
    )
    for number, context, start_s, end_s in rows:
        constant, per_token = kinds[number]
        watts = (constant + per_token * context) / (end_s - start_s)
        more_w = watts + (more_w * exp((since_s - start_s) / fit.settle_s) - watts) * exp(
            (start_s - end_s) / fit.settle_s
        )
        since_s = end_s
    return fit.rest_w + more_w


def _one_by_one(
    gpu: ForeseeingGPU,
    rows: int,
    handed: bool,
    depth: int,
    k: int,
    prices: RoundPrices,
    contexts: list[int],
    owed: list[int],
    horizon_s: float,
) -> PassedRounds:
    """Launch by launch, as the host and the GPU take them."""
    host, power, times = gpu.host, gpu.power, gpu.host.times
    now_s, at_s, free_s, ended_s, mean_w = gpu.env._now, gpu.env._now, host.free_at, gpu.time_s, gpu.mean_w
    launch_s, handoff_s, notify_s = times.launch_s, times.handoff_s, times.notify_s
    completion_s = times.completed_s(rows)
    verify_number = prices.verify_number
    solo_0, solo_1, bytes_0, bytes_1, flops_0, flops_1 = prices.verify
    target_factor, draft_factor = gpu.flop_factors["target"], gpu.flop_factors.get("draft", 1.0)
    launches: list[float] = []
    over_s: list[float] = []
    draft_s = wait_s = verify_s = 0.0
    for context, behind in zip(contexts, owed, strict=True):
        now_w, free_before_s, row, end_s = mean_w, free_s, len(launches), ended_s
        drafted_s = waited_s = 0.0
        if k:
            shape = prices.drafts[behind]
            free_s = (at_s if at_s > free_s else free_s) + launch_s
            start_s = free_s if free_s > end_s else end_s
            solo_s = shape[0] + shape[1] * context
            if power is None:
                end_s = start_s + solo_s
            else:
                end_s, now_w = power.spent(
                    now_w, start_s - end_s, start_s, solo_s, shape[2] + shape[3] * context,
                    shape[3] * context, (shape[4] + shape[5] * context) * draft_factor,
                )  # fmt: skip
            launches += (prices.draft_numbers[behind], depth, context, start_s, end_s)
            drafted_s = end_s - start_s
            if handed:
                at_s = free_s = (end_s if end_s > free_s else free_s) + completion_s
        if handed:
            made_s = at_s
            free_s = (at_s if at_s > free_s else free_s) + handoff_s
            at_s = free_s + notify_s
            waited_s = at_s - made_s
        free_s = (at_s if at_s > free_s else free_s) + launch_s
        start_s = free_s if free_s > end_s else end_s
        solo_s = solo_0 + solo_1 * context
        if power is None:
            end_s = start_s + solo_s
        else:
            end_s, now_w = power.spent(
                now_w, start_s - end_s, start_s, solo_s, bytes_0 + bytes_1 * context, bytes_1 * context,
                (flops_0 + flops_1 * context) * target_factor,
            )  # fmt: skip
        launches += (verify_number, depth, context, start_s, end_s)
        at_s = free_s = (end_s if end_s > free_s else free_s) + completion_s
        seen_s = at_s
        if handed:
            free_s = at_s + handoff_s
            at_s = free_s + notify_s
        if at_s >= horizon_s:
            free_s = free_before_s
            del launches[row:]
            break
        over_s.append(seen_s)
        ended_s, mean_w, now_s = end_s, now_w, at_s
        draft_s, wait_s = draft_s + drafted_s, wait_s + waited_s
        verify_s += end_s - start_s
    return PassedRounds(over_s, now_s, free_s, ended_s, mean_w, launches, (draft_s, wait_s, verify_s))
