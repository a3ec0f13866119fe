"""How launches on different streams share one GPU: the progress rate of each, where 1 is its speed alone.

A launch has two demands from its roofline: the shares of the GPU's arithmetic and bandwidth that it uses alone. Rates
come from weighted max-min sharing of both: all rise together until one resource is full, launches that need it stop,
and the others continue. No rate exceeds 1 and no resource its capacity. As measured, a launch also occupies a part of
the GPU that others cannot use; all launches together occupy at most the whole GPU. This holds for every priority:

- `none` and `stream` are what the hardware does; `dynamic` is `stream` with priorities that a policy sets per launch;
- `preemptive` is ideal: a lane gets all it can use of what the lanes above it leave, of both resources and of the
  room. Preemption is free and immediate, even in the middle of a kernel.

Not modelled: the GPU's caches, the order of thread blocks inside a kernel, and demands that change within a launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdvsim.sim.core import Contention, Priority
from pdvsim.sim.prices.costs import Load
from pdvsim.sim.prices.profile import ContentionFit

_FULL = 1e-12


def max_min(
    loads: Sequence[Load],
    weights: Sequence[float],
    limits: Sequence[float],
    compute: float,
    bandwidth: float,
    holds: Sequence[float] = (),
    room: float = 1.0,
) -> tuple[float, float, float]:
    """Set the loads' rates, whose `holds` take `room` at most; return what is left of compute, bandwidth and room."""
    for load in loads:
        load.rate = 0.0

    def still(rising: Iterable[int]) -> list[int]:
        """Return the loads below their limit that lack nothing that is used up."""
        return [
            i
            for i in rising
            if loads[i].rate < limits[i] - _FULL
            and not (compute <= _FULL and loads[i].compute > 0)
            and not (bandwidth <= _FULL and loads[i].bandwidth > 0)
            and not (room <= _FULL and holds and holds[i] > 0)
        ]

    rising, before = still(range(len(loads))), len(loads) + 1
    while rising and len(rising) < before:  # as many as before: no progress left to make at this precision
        need_c = sum(weights[i] * loads[i].compute for i in rising)
        need_b = sum(weights[i] * loads[i].bandwidth for i in rising)
        need = sum(weights[i] * holds[i] for i in rising) if holds else 0.0
        step = min((limits[i] - loads[i].rate) / weights[i] for i in rising)
        if need_c * step > compute:
            step = compute / need_c
        if need_b * step > bandwidth:
            step = bandwidth / need_b
        if need * step > room:
            step = room / need
        compute = max(0.0, compute - need_c * step)
        bandwidth = max(0.0, bandwidth - need_b * step)
        room = max(0.0, room - need * step)
        for i in rising:
            loads[i].rate = min(limits[i], loads[i].rate + weights[i] * step)
        rising, before = still(rising), len(rising)
    return compute, bandwidth, room


def max_min_of_two(
    first: Load,
    second: Load,
    first_weight: float,
    second_weight: float,
    first_hold: float = 0.0,
    second_hold: float = 0.0,
) -> None:
    """The same for two loads that use both resources, the heavier first, without the loop: the most common case."""
    level = 1.0 / first_weight  # at which the first reaches full speed
    full = min(
        1.0 / (first_weight * first.compute + second_weight * second.compute),
        1.0 / (first_weight * first.bandwidth + second_weight * second.bandwidth),
    )
    held = first_weight * first_hold + second_weight * second_hold
    if held * full > 1.0:
        full = 1.0 / held
    if full < level:  # a resource that both need is full before
        first.rate = first_weight * full
        second.rate = second_weight * full
        return
    first.rate = 1.0
    left = min((1.0 - first.compute) / second.compute, (1.0 - first.bandwidth) / second.bandwidth)
    if second_hold * left > 1.0 - first_hold:
        left = (1.0 - first_hold) / second_hold
    second.rate = 1.0 if left > 1.0 else left if left > 0.0 else 0.0


class Sharing:
    """The contention model of one GPU: sets the rates of whatever runs together."""

    def __init__(self, model: Contention, priority: Priority, fit: ContentionFit) -> None:
        self.model = model
        # a partition is not modelled: what plans for one plans for streams
        self.priority = "stream" if priority in ("dynamic", "partition") else priority
        self.fit = fit
        self._measured = fit.turn_exponent > 0
        self._crowd_weight = fit.stream_weight if fit.crowd_weight is None else fit.crowd_weight

    def solve(self, loads: Sequence[Load]) -> None:
        """Set each load's `rate`."""
        if self.model == "max":
            for load in loads:
                load.rate = 1.0
        elif self.model == "serial":
            self._serial(loads)
        elif len(loads) == 1:
            loads[0].rate = 1.0
        elif self.priority == "preemptive":
            self._levels(loads)
        else:
            self._turns(loads)

    def _serial(self, loads: Sequence[Load]) -> None:
        """Run one launch at a time to its end; then the highest priority, first come first served."""
        running = next((load for load in loads if load.rate > 0), None)
        chosen = running or max(loads, key=lambda load: load.priority if self.priority != "none" else 0)
        for load in loads:
            load.rate = 0.0
        chosen.rate = 1.0

    def _levels(self, loads: Sequence[Load]) -> None:
        """Preemption: level by level, each shares as without priority what those above it leave, which may be none."""
        compute = bandwidth = room = 1.0  # left
        for level in sorted({load.priority for load in loads}, reverse=True):
            group = [load for load in loads if load.priority == level]
            shares = [self._share(load) for load in group] if len(group) > 1 else [1.0]
            crowd = self.fit.crowd_hold if len(group) > 2 else 1.0
            holds = [self._hold(load) * crowd for load in group]
            compute, bandwidth, room = max_min(group, shares, [1.0] * len(group), compute, bandwidth, holds, room)

    def _turns(self, loads: Sequence[Load]) -> None:
        """Share as the hardware does: streams take turns, with or without a preference."""
        if len(loads) > 2:
            holds = [self._hold(load) * self.fit.crowd_hold for load in loads]
            max_min(loads, self._weights(loads, self._crowd_weight), [1.0] * len(loads), 1.0, 1.0, holds)
            return
        (a, b), (heavy, light) = loads, self._weights(loads, self.fit.stream_weight)  # by far the most common case
        if heavy < light or (heavy == light and a.priority < b.priority):
            a, b, heavy, light = b, a, light, heavy
        pair_holds = self._hold(a), self._hold(b)
        if a.compute and a.bandwidth and b.compute and b.bandwidth:
            max_min_of_two(a, b, heavy / light, 1.0, *pair_holds)
        else:
            max_min((a, b), (heavy, light), (1.0, 1.0), 1.0, 1.0, pair_holds)

    def _weights(self, loads: Sequence[Load], weight: float) -> list[float]:
        """The launches' shares of turns, where a stream's against the next lower one is `weight`."""
        weights, levels = [self._share(load) for load in loads], sorted({load.priority for load in loads})
        if self.priority != "stream" or len(levels) == 1:
            return weights
        for i, load in enumerate(loads):
            if level := levels.index(load.priority):
                below = [other for other in loads if other.priority < load.priority]
                weights[i] *= weight**level * max([self._preference(load, other) for other in below])
                if load.small_kernel_share and load.priority == levels[-1]:
                    longest_s = max([other.layer_s * other.wait_ratio for other in below])
                    weights[i] *= self._first(load, longest_s, weight)
        return weights

    def _preference(self, load: Load, below: Load) -> float:
        """Return the weight of a launch's higher priority over one `below`, if that has short blocks."""
        if below.experts_read:
            large = 1.0 - load.small_kernel_share * load.small_kernel_share
            return float(self.fit.expert_weight ** (large * below.experts_read))
        return self.fit.weight_8bit if below.eight_bits else 1.0

    def _share(self, load: Load) -> float:
        """The share of turns of a launch, constant over its life."""
        if not load.share:
            load.share = 1.0
            if self._measured:
                load.share *= (load.layer_s * load.wait_ratio) ** self.fit.turn_exponent * (1.0 - load.empty)
                if load.small_kernel_share:  # two small kernels in a row gain: after a large one the other is next
                    load.share *= self.fit.small_kernel_weight ** (load.small_kernel_share * load.small_kernel_share)
                    load.share *= self.fit.small_expert_weight**load.experts_read
        return load.share

    def _first(self, load: Load, other_s: float, weight: float) -> float:
        """Factor on the share of a launch with small kernels on the stream that goes first, beyond its `weight`.

        It is scheduled before the next blocks of the other, whose turns of `other_s` count for less.
        """
        if not load.layer_s or not other_s:
            return 1.0
        share = (other_s / load.layer_s) ** self.fit.yielding
        return float((share / weight) ** load.small_kernel_share) if share > weight else 1.0

    def _hold(self, load: Load) -> float:
        """The part of the GPU that a launch occupies at full speed; at most all, so that sharing beats taking turns."""
        fit = self.fit
        free = 1.0 - fit.hold
        if fit.hold_layer_s:
            free /= 1.0 + load.layer_s / fit.hold_layer_s
        held = 1.0 - free + fit.hold_compute * load.compute
        if held > 1.0:
            held = 1.0
        if load.eight_bits:
            held *= fit.hold_8bit
        if load.experts_read and load.small_kernel_share:
            held *= fit.small_expert_hold**load.experts_read
        held *= load.room_ratio
        return (held if held < 1.0 else 1.0) * (1.0 - load.empty)
