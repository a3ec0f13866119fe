"""How works share a GPU: the sharing rule's laws, and schedules on one simulated GPU worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdvsim.sim.clock import Clock
from pdvsim.sim.config import Contention, Priority
from pdvsim.sim.contention import Sharing, max_min, max_min_of_two
from pdvsim.sim.core import Request, Work
from pdvsim.sim.device import SimulatedGPU
from pdvsim.sim.host import HostTimes, SimulatedHost
from pdvsim.sim.latency import ForwardFit, Latency
from pdvsim.sim.models import MODELS
from pdvsim.sim.profile import ContentionFit
from pdvsim.sim.records import LANES, WRITTEN_DTYPES, Table, launch_columns

TINY = 1e-9
PRIORITIES: tuple[Priority, ...] = ("none", "stream", "preemptive", "partition")
SHARES = {"decode": 0.5, "verify": 0.3, "prefill": 0.2}


@dataclass
class Load:
    compute: float
    bandwidth: float
    priority: int = 0
    lane: str = "decode"
    kind: str = "draft"
    rate: float = 0.0


demands = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-6, 1.0))
used = st.floats(1e-6, 1.0)
weights = st.sampled_from([1.0, 2.0, 4.0, 16.0])
share = st.floats(0.0, 1.0)


@st.composite
def lanes_at_work(draw: st.DrawFn) -> list[Load]:
    """Up to three lanes, as a GPU has them: one work each, decode before verify before prefill."""
    lanes = draw(st.lists(st.sampled_from(["prefill", "verify", "decode"]), min_size=1, max_size=3, unique=True))
    kinds = {"prefill": "prefill", "verify": "verify", "decode": "draft"}
    order = ("prefill", "verify", "decode")
    return [Load(draw(demands), draw(demands), order.index(lane), lane, kinds[lane]) for lane in lanes]


def used_up(loads: Sequence[Load]) -> tuple[float, float]:
    return sum(x.rate * x.compute for x in loads), sum(x.rate * x.bandwidth for x in loads)


@given(
    loads=st.lists(st.builds(Load, demands, demands), min_size=1, max_size=5),
    data=st.data(),
    compute=st.floats(0.1, 1.0),
    bandwidth=st.floats(0.1, 1.0),
)
@settings(max_examples=300)
def test_max_min_is_feasible_conserving_and_fair(
    loads: list[Load], data: st.DataObject, compute: float, bandwidth: float
) -> None:
    """No limit or capacity is exceeded; whoever is held back needs a full resource, with the highest level there."""
    n = len(loads)
    weight = data.draw(st.lists(weights, min_size=n, max_size=n))
    limit = data.draw(st.lists(st.floats(0.05, 1.0), min_size=n, max_size=n))
    left = max_min(loads, weight, limit, compute, bandwidth)
    used_c, used_b = used_up(loads)
    assert left == pytest.approx((compute - used_c, bandwidth - used_b), abs=TINY)
    assert used_c <= compute + TINY
    assert used_b <= bandwidth + TINY
    for i, load in enumerate(loads):
        assert 0 <= load.rate <= limit[i] + TINY
        if load.rate < limit[i] - TINY:
            # max-min: some full resource that it needs, of which nobody with a higher level takes part
            level = load.rate / weight[i]
            full = [
                d for d, rest in (("compute", left[0]), ("bandwidth", left[1])) if rest <= TINY and getattr(load, d)
            ]
            assert full
            assert any(
                all(other.rate / w <= level + 1e-6 for other, w in zip(loads, weight, strict=True) if getattr(other, d))
                for d in full
            )


@given(a=st.builds(Load, used, used), b=st.builds(Load, used, used), wa=weights, wb=weights, cap=st.floats(0.3, 1.0))
@settings(max_examples=500)
def test_the_short_cut_for_two_is_max_min(a: Load, b: Load, wa: float, wb: float, cap: float) -> None:
    wa, wb = max(wa, wb), min(wa, wb)  # it takes the heavier first
    max_min_of_two(a, b, wa, wb, cap)
    short = (a.rate, b.rate)
    max_min([a, b], [wa, wb], [1.0, 1.0], cap, cap)
    # a resource within 1e-12 of full is full, so a demand near 1e-6 may be cut off 1e-6 early
    assert short == pytest.approx((a.rate, b.rate), abs=2e-6)


@given(loads=lanes_at_work(), priority=st.sampled_from(PRIORITIES), efficient=st.booleans())
@settings(max_examples=300)
def test_fluid_sharing_keeps_to_the_gpu(loads: list[Load], priority: Priority, efficient: bool) -> None:
    """Rates are at most 1, capacities hold, and without a partition the GPU as a whole is never slower than serial."""
    pairs = {} if efficient else {"draft+verify": 0.9, "draft+prefill": 0.8, "prefill+verify": 0.7}
    sharing = Sharing("fluid", priority, ContentionFit(efficiency=pairs), SHARES)
    sharing.solve(loads)
    kinds = sorted(x.kind for x in loads)
    capacity = min([1.0, *(pairs.get(f"{a}+{b}", 1.0) for i, a in enumerate(kinds) for b in kinds[i + 1 :])])
    assert all(0 <= x.rate <= 1 for x in loads)
    if priority == "preemptive":  # who is below cannot cost those above anything
        assert max(used_up(loads)) <= 1 + TINY
        top = [x for x in loads if x.priority == max(y.priority for y in loads)]
        beside = [x.rate for x in top]
        sharing.solve(top)
        assert beside == pytest.approx([x.rate for x in top], abs=TINY)
        return
    assert max(used_up(loads)) <= capacity + TINY or len(loads) == 1
    if priority != "partition":
        assert sum(x.rate for x in loads) >= capacity - TINY
        for load in loads:
            held_back = [d for d, rest in zip(("compute", "bandwidth"), used_up(loads), strict=True)
                         if rest >= capacity - TINY and getattr(load, d)]  # fmt: skip
            assert load.rate >= 1 - TINY or held_back


@given(loads=lanes_at_work(), priority=st.sampled_from(["none", "stream"]), held=st.tuples(share, share, share))
@settings(max_examples=300)
def test_works_together_hold_the_gpu_at_most_once(
    loads: list[Load], priority: Priority, held: tuple[float, float, float]
) -> None:
    """What a work holds leaves no room to others; sharing is still never slower than one after the other."""
    fit = ContentionFit(hold=held[0], hold_compute=held[1], hold_bandwidth=held[2], crowd_weight=2.0)
    Sharing("fluid", priority, fit).solve(loads)
    holds = [min(1.0, held[0] + held[1] * x.compute + held[2] * x.bandwidth) for x in loads]
    assert all(0 <= x.rate <= 1 for x in loads)
    if len(loads) == 1:
        assert loads[0].rate == 1
        return
    assert sum(x.rate * h for x, h in zip(loads, holds, strict=True)) <= 1 + TINY
    assert sum(x.rate for x in loads) >= 1 - 1e-6


@given(loads=lanes_at_work(), priority=st.sampled_from(["none", "stream", "preemptive"]))
@settings(max_examples=200)
def test_a_higher_priority_never_slows_a_work(loads: list[Load], priority: Priority) -> None:
    """Raising one work's priority never lowers its rate, and never gives it less than preemption grants it at most."""
    assume(len(loads) > 1)
    sharing = Sharing("fluid", priority, ContentionFit())
    rates = []
    for level in range(4):
        loads[0].priority = level
        sharing.solve(loads)
        rates.append(loads[0].rate)
    assert np.all(np.diff(rates) >= -1e-6)
    if priority == "none":
        assert rates == pytest.approx([rates[0]] * 4)
    if priority == "preemptive":
        assert rates[-1] == 1.0  # above all others: as if alone


@given(loads=lanes_at_work())
@settings(max_examples=100)
def test_priorities_range_from_none_to_preemptive(loads: list[Load]) -> None:
    """A stream weight of 1 is no priority, and what the highest stream gets grows with it, towards preemption."""
    top = max(loads, key=lambda x: x.priority)
    rates = []
    for priority, weight in (("none", 4.0), ("stream", 1.0), ("stream", 4.0), ("stream", 1e6), ("preemptive", 4.0)):
        Sharing("fluid", priority, ContentionFit(stream_weight=weight)).solve(loads)  # type: ignore[arg-type]
        rates.append(top.rate)
    assert rates[0] == pytest.approx(rates[1], abs=TINY)
    assert np.all(np.diff(rates) >= -1e-6)
    assert rates[3] == pytest.approx(rates[4], abs=1e-4)


@given(loads=lanes_at_work())
@settings(max_examples=100)
def test_a_partition_keeps_works_apart(loads: list[Load]) -> None:
    """A work takes no more than its share of the SMs, and all of it unless the shared bandwidth is full."""
    reach = 2.0
    Sharing("fluid", "partition", ContentionFit(partition_bandwidth_reach=reach), SHARES).solve(loads)
    for load in loads:
        share = SHARES[load.lane]
        assert load.rate * load.compute <= share + TINY
        assert load.rate * load.bandwidth <= min(1.0, reach * share) + TINY
        limits = [1.0, share / load.compute if load.compute else 1.0]
        limits.append(min(1.0, reach * share) / load.bandwidth if load.bandwidth else 1.0)
        full = used_up(loads)[1] >= 1 - TINY and load.bandwidth
        assert full or load.rate == pytest.approx(min(limits), abs=1e-6)


def test_partition_limits_by_hand() -> None:
    load = Load(compute=0.8, bandwidth=0.5, lane="prefill", kind="prefill")
    Sharing("fluid", "partition", ContentionFit(partition_bandwidth_reach=2.0), SHARES).solve([load])
    assert load.rate == pytest.approx(0.2 / 0.8)  # a fifth of the SMs for a work that could use four
    load = Load(compute=0.1, bandwidth=0.8, lane="prefill", kind="prefill")
    Sharing("fluid", "partition", ContentionFit(partition_bandwidth_reach=2.0), SHARES).solve([load])
    assert load.rate == pytest.approx(0.4 / 0.8)  # a fifth of the SMs draws two fifths of the bandwidth


@given(loads=lanes_at_work(), priority=st.sampled_from(PRIORITIES))
def test_the_ablations(loads: list[Load], priority: Priority) -> None:
    """`max`: all at full speed. `serial`: one alone, who keeps the GPU to its end."""
    Sharing("max", priority, ContentionFit(), SHARES).solve(loads)
    assert [x.rate for x in loads] == [1.0] * len(loads)
    for load in loads:
        load.rate = 0.0
    serial = Sharing("serial", priority, ContentionFit(), SHARES)
    serial.solve(loads)
    assert sorted(x.rate for x in loads) == [0.0] * (len(loads) - 1) + [1.0]
    chosen = next(x for x in loads if x.rate)
    expected = loads[0] if priority == "none" else max(loads, key=lambda x: x.priority)
    assert chosen is expected
    newcomer = Load(1.0, 1.0, priority=9)
    serial.solve([*loads, newcomer])
    assert chosen.rate == 1.0
    assert newcomer.rate == 0.0


# one simulated GPU --------------------------------------------------------------------------------------------------

BANDWIDTH, FLOPS = 1e12, 1e15


class Bench:
    """A GPU on which a prefill of n tokens takes n milliseconds alone, bound by `bound` and using none of the other."""

    def __init__(
        self, contention: Contention, priority: Priority, bound: str = "memory", launch_s: float = 0.0
    ) -> None:
        self.env = Clock()
        self.log = Table(WRITTEN_DTYPES)
        sharing = Sharing(contention, priority, ContentionFit(stream_weight=3.0), SHARES)
        model = Latency(MODELS["llama-2-7b"], ForwardFit(0.0, 0.0, 1e-3, 0.0, 0.0, 0.0, 0.0))
        self.gpu = SimulatedGPU(
            self.env, SimulatedHost(HostTimes(launch_s=launch_s)), {"target": model}, sharing, self.log,
            lambda work: None, (FLOPS, BANDWIDTH),
        )  # fmt: skip
        solo = self.gpu.price

        def price(work: Work) -> tuple[float, float, float, int]:
            solo_s = solo(work)[0]
            return (solo_s, solo_s * BANDWIDTH, 0.0, 0) if bound == "memory" else (solo_s, 0.0, solo_s * FLOPS, 0)

        self.gpu.price = price  # type: ignore[method-assign]

    def submit(self, at_s: float, lane: str, milliseconds: int) -> None:
        priority = {"decode": 2, "verify": 1, "prefill": 0}[lane]
        request = Request(0, 0.0, milliseconds, 1, b"")
        work = Work("verify", "target", lane, [request], tokens=milliseconds, priority=priority)
        at = self.env.timeout(at_s)
        assert at.callbacks is not None
        at.callbacks.append(lambda _: self.gpu.launch(work, self.env.now))

    def run(self) -> list[tuple[str, float, float]]:
        """Lane, start and end in milliseconds, in order of ending."""
        self.env.run()
        c = launch_columns(self.log.columns())
        rows = zip(c["lane"].tolist(), (c["start_s"] * 1e3).tolist(), (c["end_s"] * 1e3).tolist(), strict=True)
        return [(LANES[lane], pytest.approx(start), pytest.approx(end)) for lane, start, end in rows]


def test_two_memory_bound_works_share_the_bandwidth() -> None:
    """10 ms of decode from 0, 6 ms of verify from 4, equal priority, both wanting all the bandwidth.

    0-4 decode alone (6 left). From 4 each at half speed: both have 6 left, both end at 4 + 12 = 16.
    """
    bench = Bench("fluid", "none")
    bench.submit(0.000, "decode", 10)
    bench.submit(0.004, "verify", 6)
    assert sorted(bench.run(), key=lambda row: row[0]) == [("decode", 0, 16), ("verify", 4, 16)]


def test_the_survivor_speeds_up_again() -> None:
    """10 ms of decode from 0, 2 ms of verify from 4: half speed each until verify ends at 8 (decode: 4 left), 12."""
    bench = Bench("fluid", "none")
    bench.submit(0.000, "decode", 10)
    bench.submit(0.004, "verify", 2)
    assert bench.run() == [("verify", 4, 8), ("decode", 0, 12)]


def test_stream_priority_weighs_the_shares() -> None:
    """8 ms of verify from 0, 3 ms of decode from 4, one level above: weight 3 to 1, decode has 3/4 of the bandwidth.

    Decode takes 3 / (3/4) = 4, to 8; verify has done 4 + 4/4 = 5 by then, and ends at 11.
    """
    bench = Bench("fluid", "stream")
    bench.submit(0.000, "verify", 8)
    bench.submit(0.004, "decode", 3)
    assert bench.run() == [("decode", 4, 8), ("verify", 0, 11)]


def test_preemption_stops_the_lower_work() -> None:
    """8 ms of verify from 0, 3 ms of decode from 4: decode as if alone to 7, verify stands still and ends at 11."""
    bench = Bench("fluid", "preemptive")
    bench.submit(0.000, "verify", 8)
    bench.submit(0.004, "decode", 3)
    assert bench.run() == [("decode", 4, 7), ("verify", 0, 11)]


def test_serial_lets_the_running_work_end_and_then_the_highest() -> None:
    """8 ms of prefill from 0; verify and decode come at 2 and 3 and wait to 8: decode goes first, the last to come."""
    bench = Bench("serial", "stream")
    bench.submit(0.000, "prefill", 8)
    bench.submit(0.002, "verify", 2)
    bench.submit(0.003, "decode", 4)
    assert bench.run() == [("prefill", 0, 8), ("decode", 8, 12), ("verify", 12, 14)]


def test_max_lets_everything_overlap_for_free() -> None:
    bench = Bench("max", "none")
    bench.submit(0.000, "decode", 10)
    bench.submit(0.004, "verify", 6)
    bench.submit(0.005, "decode", 1)
    # the second decode still waits for the first: they share a stream
    assert sorted(bench.run(), key=lambda row: row[0]) == [("decode", 0, 10), ("decode", 10, 11), ("verify", 4, 10)]


def test_a_partition_holds_a_work_back_even_alone() -> None:
    """A prefill that could use all SMs has a fifth of them: 2 ms of work take 10."""
    bench = Bench("fluid", "partition", bound="compute")
    bench.submit(0.000, "prefill", 2)
    bench.submit(0.001, "decode", 3)  # half the SMs: 6 ms
    assert bench.run() == [("decode", 1, 7), ("prefill", 0, 10)]


def test_the_host_launches_one_work_at_a_time() -> None:
    """A launch costs 1 ms of the host: the second of two submissions reaches the GPU at 2, not at 1."""
    bench = Bench("max", "none", launch_s=0.001)
    bench.submit(0.000, "decode", 5)
    bench.submit(0.000, "verify", 5)
    assert bench.run() == [("decode", 1, 6), ("verify", 2, 7)]
