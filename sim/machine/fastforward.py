"""The fast path: rounds in which nothing else happens are simulated in one loop, without events.

While the GPU has no other launch, no event is due and the KV cache has room, a round is a draft and then a verify, and
their prices follow from the sums of the batch's forecast. Start and end times are added up in the order of the event
queue, so they are equal bit for bit.

Launches on one stream that nothing else interrupts, such as a step with prompts, run to their end without events too.

Not covered: hosts that poll, looked-up drafts, and lanes on several GPUs. Their rounds are simulated one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import exp, inf
from operator import sub
from typing import Any, NamedTuple

from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.machine.device import Job, SimulatedGPU
from pdvsim.sim.machine.forecast import ROUNDS, Forecast
from pdvsim.sim.machine.kv import KvCache
from pdvsim.sim.records import Deliveries

_NO_POWER = (0.0,) * 7


class RoundPrices(NamedTuple):
    """The launches of a round by number of rows, for each lag of the drafter: log entries, prices, energy of flops."""

    by_lag: list[list[tuple[float, ...]]]
    least_s: float  # a verify without context


class FastForwardGPU(SimulatedGPU):
    """A simulated GPU that goes through rounds in which nothing else happens."""

    def __init__(self, *args: Any, blocks: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self._blocks = blocks
        self.arrivals_queue = False  # what arrives has no effect on it while no lane is idle
        self._foreseeing: tuple[KvCache, Deliveries, bool] | None = None
        self._round_prices: dict[tuple[tuple[str, str], int, int, tuple[bool, ...]], RoundPrices] = {}
        self._windowed = [model for model in self.ledger.models.values() if model.window]

    def serve(self, kv: KvCache, deliveries: Deliveries, rereads: bool, arrivals_queue: bool) -> None:
        """Batches have their KV cache there, and their tokens go there; the drafter rereads accepted tokens or not."""
        self.arrivals_queue = arrivals_queue
        if self._blocks and self.lookup is None and self.ledger.log.carried is None:
            self._foreseeing = kv, deliveries, rereads

    def take_in(self) -> None:
        """Put what was launched on its stream, or if possible run it to its end."""
        if self._blocks and not self.running and not self.coming and self._run_alone(self.fresh):
            self.fresh.clear()
        else:
            super().take_in()

    def _run_alone(self, jobs: list[Job]) -> bool:
        """Run launches of one stream to their end, if the host awaits only the last and nothing else is due before."""
        horizon_s = self.env.horizon(self, not self.arrivals_queue or self.host.idle_lanes > 0)
        lane, last = jobs[0].launch.lane, jobs[-1]
        end_s, mean_w, power, spans = self.time_s, self.mean_w, self.power, []
        for job in jobs:
            if job.launch.lane != lane or job.launch.watched != (job is last):
                return False
            start_s = job.ready_s if job.ready_s > end_s else end_s
            if start_s + job.solo_s >= horizon_s:  # it takes at least that long
                return False
            if power is None:
                end_s = start_s + job.solo_s
            else:
                mean_w = power.mean_w(mean_w, start_s - end_s, power.fit.rest_w)
                end_s, mean_w = power.run(mean_w, job.price, self.flop_factors[job.launch.role], start_s)
            if end_s >= horizon_s:
                return False
            spans.append((start_s, end_s))
        for job, (start_s, end_s) in zip(jobs, spans, strict=True):
            self.ledger.note(job.launch, start_s, end_s, job.price)
        self.time_s, self.mean_w = end_s, mean_w
        noticed_s = self.host.spend(end_s, self.host.times.completed_s(len(last.launch.rows)), "completion")
        self.env.at(noticed_s, last, self.verdict(last.launch))
        return True

    def advance(
        self, batch: Batch, k: int, lanes: tuple[str, str], depth: int, enough: Callable[[Sequence[int]], bool] | None
    ) -> int:
        """Go through rounds of `batch` that are over before anything else happens (`node.Device`).

        The last is at most the one with which the first row finishes. Where rows are handed over, that one is over when
        the host has seen its verdict. Or it is one during which a request arrives that has to wait for its end.
        """
        if self._foreseeing is None:
            return 0
        forecast = batch.foresee(k, *self._foreseeing)
        env, host, rows = self.env, self.host, len(batch)
        if self.running or self.coming or self.fresh or host.times.idle_poll_s:
            return 0
        horizon_s = arrival_s = env.horizon(self)
        if self.arrivals_queue and not host.idle_lanes:
            horizon_s = env.horizon(self, arrivals=False)
        most = min(ROUNDS, forecast.end - forecast.round)
        if most < 1 or horizon_s <= env._now:
            return 0
        prices = self._prices(lanes, rows, k, forecast.context)
        if arrival_s < inf:  # no round is shorter than its verify
            most = min(most, int((arrival_s - env._now) / prices.least_s) + (arrival_s < horizon_s))
        if most < 1 or (most := forecast.roomy(most)) < 1:
            return 0
        contexts, lags = forecast.sums(most)
        for model in self._windowed:  # rounds past the window have another price
            if not model.is_past_window(rows, contexts[0]) and model.is_past_window(rows, contexts[most - 1]):
                most = bisect_right(contexts, rows * model.window, 0, most)
                lags = lags[:most]
        if k and max(lags) >= len(prices.by_lag):
            return 0
        handed = lanes[0] != lanes[1]
        over, spent_s = self._go_through(
            batch, forecast, handed, depth, prices, contexts, lags, horizon_s, arrival_s, enough
        )
        forecast.spend(*spent_s)
        if over and env._now >= arrival_s:
            env.catch_up()
        return over

    def _prices(self, lanes: tuple[str, str], rows: int, k: int, context: int) -> RoundPrices:
        """Looked up, or made the first time."""
        past = tuple([model.is_past_window(rows, context) for model in self._windowed]) if self._windowed else ()
        key = (lanes, rows, k, past)
        prices = self._round_prices.get(key)
        if prices is None:
            ledger, factors = self.ledger, self.flop_factors
            number, verify = ledger.kind(lanes[1], "verify" if k else "decode", "target", rows, k + 1, 1, context)
            by_lag: list[list[tuple[float, ...]]] = [[(float(number), *verify, factors["target"])]]
            if k:
                by_lag *= ledger.models["draft"].widest
            for lag in range(len(by_lag) if k else 0):
                number, draft = ledger.kind(lanes[0], "draft", "draft", rows, 1 + lag, k, context)
                by_lag[lag] = [(float(number), *draft, factors["draft"]), *by_lag[lag]]
            prices = self._round_prices[key] = RoundPrices(by_lag, verify.seconds_0)
        return prices

    def _go_through(
        self,
        batch: Batch,
        forecast: Forecast,
        handed: bool,
        depth: int,
        prices: RoundPrices,
        contexts: list[float],
        lags: list[int],
        horizon_s: float,
        arrival_s: float,
        enough: Callable[[Sequence[int]], bool] | None,
    ) -> tuple[int, tuple[float, float, float]]:
        """Launch by launch, as the host and the GPU take them, until the horizon or the end of a round with an arrival.

        Returns the number of rounds; and the seconds of drafts, of waits for the verify, and of verifies.
        """
        env, host, power, times, by_lag = self.env, self.host, self.power, self.host.times, prices.by_lag
        now_s, free_s, ended_s, mean_w = env._now, host.free_at, self.time_s, self.mean_w
        launch_s, handoff_s, notify_s = times.launch_s, times.handoff_s, times.notify_s
        completion_s, parts = times.completed_s(len(batch)), len(by_lag[0])
        rest_w, limit_w, slope, settle_s, weight_j, cache_j, flop_j = _NO_POWER if power is None else power.figures
        launches: list[float] = []
        queued = float(depth)
        over_s: list[float] = []  # when the host knew of verdicts that the forecast has not passed yet
        over, wait_s = 0, 0.0
        finishing = forecast.end - forecast.round if handed else 0
        for context, lag in zip(contexts, lags, strict=False):
            at_s, now_w, free_before_s, end_s, handing_s = now_s, mean_w, free_s, ended_s, 0.0
            if handed and parts == 1:  # without a draft, rows go to the verify lane first
                free_s = (at_s if at_s > free_s else free_s) + handoff_s
                at_s = free_s + notify_s
                handing_s = at_s - now_s
            for number, solo_0, solo_1, bytes_0, bytes_1, flops_0, flops_1, factor in by_lag[lag]:
                free_s = (at_s if at_s > free_s else free_s) + launch_s
                start_s = free_s if free_s > end_s else end_s
                solo_s = solo_0 + solo_1 * context
                if power is not None:
                    if start_s > end_s:
                        now_w = rest_w + (now_w - rest_w) * exp((end_s - start_s) / settle_s)
                    cache, flops = bytes_1 * context, (flops_0 + flops_1 * context) * factor
                    weights = bytes_0 + cache - cache  # to the last bit as of launches one by one
                    watts = rest_w + (weight_j * weights + cache_j * cache + flop_j * flops) / solo_s
                    if (watts > limit_w or now_w > limit_w) and (over_w := power.over(now_w, watts, solo_s)) > 0.0:
                        solo_s *= 1.0 + slope * power.follows(weights, solo_s) * over_w
                    end_s = start_s + solo_s
                    watts = rest_w + (watts - rest_w)
                    now_w = watts + (now_w - watts) * exp((start_s - end_s) / settle_s)
                else:
                    end_s = start_s + solo_s
                launches += (number, queued, context, start_s, end_s)
                if handed:  # the host sees it through, and hands the rows over
                    waited_s, seen_s = handing_s, (end_s if end_s > free_s else free_s) + completion_s
                    free_s = seen_s + handoff_s
                    at_s = free_s + notify_s
                    handing_s = at_s - seen_s
            if not handed:
                seen_s = at_s = free_s = (end_s if end_s > free_s else free_s) + completion_s
            elif over + 1 == finishing:
                at_s = free_s = seen_s
            if at_s >= horizon_s:
                free_s = free_before_s
                del launches[-5 * parts :]
                break
            over_s.append(seen_s)
            over += 1
            now_s, ended_s, mean_w = at_s, end_s, now_w
            if handed:
                wait_s += waited_s
            if enough is not None:
                env._now = now_s
                verdict = batch.verdict()
                forecast.pass_rounds(over_s)
                over_s.clear()
                if enough(verdict):
                    break
            if at_s >= arrival_s:
                break
        if not over:
            return 0, (0.0, 0.0, 0.0)
        if over_s:
            forecast.pass_rounds(over_s)
        env._now, host.free_at = now_s, free_s
        self.time_s, self.mean_w = ended_s, mean_w
        self.ledger.extend_short(launches)
        spans_s = list(map(sub, launches[4::5], launches[3::5]))
        return over, (sum(spans_s[::2]) if parts > 1 else 0.0, wait_s, sum(spans_s[parts - 1 :: parts]))
