"""The fast path: rounds in which nothing else happens are simulated in one loop, without events.

While the GPU has no other launch, no event is due and the KV cache has room, a round is a draft and then a verify, and
their prices follow from the sums of the batch's forecast. Start and end times are added up in the order of the event
queue, so they are equal bit for bit.

Not covered: hosts that poll, n-gram drafts, and lanes on several GPUs. Their rounds are simulated one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from typing import Any, NamedTuple

from pdvsim.sim.hardware.latency import Shape
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.machine.device import SimulatedGPU
from pdvsim.sim.machine.forecast import ROUNDS


class RoundPrices(NamedTuple):
    """The launches of a round by number of rows: their log entries and prices, drafts by their catch-up tokens."""

    draft_numbers: list[int]
    drafts: list[Shape]
    verify_number: int
    verify: Shape


class FastForwardGPU(SimulatedGPU):
    """A simulated GPU that goes through rounds in which nothing else happens."""

    def __init__(self, *args: Any, blocks: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.foresees = blocks and self.has_draft is None and self.ledger.log.carried is None
        self._round_prices: dict[tuple[tuple[str, str], int, int, tuple[bool, ...]], RoundPrices] = {}
        self._windowed = [model for model in self.ledger.models.values() if model.window]

    def advance(self, batch: Batch, lanes: tuple[str, str], depth: int, most: int = ROUNDS) -> int:
        """Go through `most` rounds of `batch` that are over before anything else happens; returns how many.

        The last is at most the one with which the first row finishes; where rows are handed over, the one before it.
        """
        env, host, handed, forecast, rows = self.env, self.host, lanes[0] != lanes[1], batch.forecast, len(batch)
        if forecast is None or self.running or self.coming or self.fresh or host.times.idle_poll_s:
            return 0
        prices = self._prices(lanes, rows, forecast.k, forecast.context)
        horizon_s = env.horizon(self)
        most = min(most, forecast.end - forecast.round - handed)
        if horizon_s < inf:  # no round is shorter than its verify
            most = min(most, int((horizon_s - env._now) / prices.verify.solo_0))
        if most < 1 or (most := forecast.roomy(most)) < 1:
            return 0
        contexts, lags = forecast.sums(most)
        for model in self._windowed:  # rounds past the window have another price
            if not model.is_past_window(rows, contexts[0]) and model.is_past_window(rows, contexts[-1]):
                most = bisect_right(contexts, rows * model.window)
                contexts, lags = contexts[:most], lags[:most]
        if forecast.k and max(lags) >= len(prices.drafts):
            return 0
        over_s, spent_s = self._go_through(rows, handed, depth, prices, contexts, lags, horizon_s)
        if over_s:
            forecast.pass_rounds(over_s, spent_s)
        return len(over_s)

    def _prices(self, lanes: tuple[str, str], rows: int, k: int, context: int) -> RoundPrices:
        """Looked up, or made the first time."""
        key = (lanes, rows, k, tuple([model.is_past_window(rows, context) for model in self._windowed]))
        prices = self._round_prices.get(key)
        if prices is None:
            ledger = self.ledger
            numbers, drafts = [], []
            for lag in range(ledger.models["draft"].widest if k else 0):
                number, shape = ledger.kind(lanes[0], "draft", "draft", rows, 1 + lag, k, context)
                numbers.append(number)
                drafts.append(shape)
            number, verify = ledger.kind(lanes[1], "verify" if k else "decode", "target", rows, k + 1, 1, context)
            prices = self._round_prices[key] = RoundPrices(numbers, drafts, number, verify)
        return prices

    def _go_through(
        self,
        rows: int,
        handed: bool,
        depth: int,
        prices: RoundPrices,
        contexts: list[int],
        lags: list[int],
        horizon_s: float,
    ) -> tuple[list[float], tuple[float, float, float]]:
        """Launch by launch, as the host and the GPU take them, until the horizon.

        Returns when the host knew of each verdict; and the seconds of drafts, of waits for the verify, and of verifies.
        """
        env, host, power, times = self.env, self.host, self.power, self.host.times
        now_s, at_s, free_s, ended_s, mean_w = env._now, env._now, host.free_at, self.time_s, self.mean_w
        launch_s, handoff_s, notify_s = times.launch_s, times.handoff_s, times.notify_s
        completion_s = times.completed_s(rows)
        drafts, draft_numbers, verify_number, drafting = (
            prices.drafts, prices.draft_numbers, prices.verify_number, bool(prices.drafts)
        )  # fmt: skip
        solo_0, solo_1, bytes_0, bytes_1, flops_0, flops_1 = prices.verify
        target_factor, draft_factor = self.flop_factors["target"], self.flop_factors.get("draft", 1.0)
        launches: list[float] = []
        over_s: list[float] = []
        draft_s = wait_s = verify_s = drafted_s = waited_s = 0.0
        for context, lag in zip(contexts, lags, strict=True):
            now_w, free_before_s, entries, end_s = mean_w, free_s, len(launches), ended_s
            if drafting:
                shape = drafts[lag]
                free_s = (at_s if at_s > free_s else free_s) + launch_s
                start_s = free_s if free_s > end_s else end_s
                solo_s = shape[0] + shape[1] * context
                if power is None:
                    end_s = start_s + solo_s
                else:
                    cache = shape[3] * context
                    end_s, now_w = power.spent(
                        now_w, start_s - end_s, start_s, solo_s, shape[2] + cache, cache,
                        (shape[4] + shape[5] * context) * draft_factor,
                    )  # fmt: skip
                launches += (draft_numbers[lag], depth, context, start_s, end_s)
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
                cache = bytes_1 * context
                end_s, now_w = power.spent(
                    now_w, start_s - end_s, start_s, solo_s, bytes_0 + cache, cache,
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
                del launches[entries:]
                break
            over_s.append(seen_s)
            ended_s, mean_w, now_s = end_s, now_w, at_s
            draft_s, wait_s = draft_s + drafted_s, wait_s + waited_s
            verify_s += end_s - start_s
        if over_s:
            env._now, host.free_at = now_s, free_s
            self.time_s, self.mean_w = ended_s, mean_w
            self.ledger.extend_short(launches)
        return over_s, (draft_s, wait_s, verify_s)
