"""How launches share a GPU: the sharing rule's laws, and a planner that foresees what a GPU does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import PAIR, batch, planner

from pdvsim.sim.config import Priority
from pdvsim.sim.machine.batch import Launch
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.device import Job, SimulatedGPU
from pdvsim.sim.models.presets import pair
from pdvsim.sim.policies.planner import Planner
from pdvsim.sim.prices import costs
from pdvsim.sim.prices.contention import Sharing, max_min, max_min_of_two
from pdvsim.sim.prices.host import HostCost, SimulatedHost
from pdvsim.sim.prices.profile import ContentionFit, builtin
from pdvsim.sim.records import Launches

TINY = 1e-9
NEAR = 2e-6  # a resource within 1e-12 of full is full, so a demand near 1e-6 may be cut off 1e-6 early
PRIORITIES: tuple[Priority, ...] = ("none", "stream", "dynamic", "preemptive")
H200 = builtin("h200").contention


@dataclass(eq=False)
class Load(costs.Load):
    lane: str = "decode"
    layer_s: float = 1e-4


demands = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-6, 1.0))
used = st.floats(1e-6, 1.0)
weights = st.sampled_from([1.0, 2.0, 4.0, 16.0])
share = st.floats(0.0, 1.0)
small_kernel_shares = st.sampled_from([0.0, 0.4, 1.0])
halves = st.tuples(st.floats(0.0, 0.5), st.floats(0.0, 0.5))  # that attention over prompts fills, and leaves empty
turns_s = st.sampled_from([5e-6, 3e-5, 2e-4, 1e-3])  # per layer: a small drafter's to a long prompt's

ideal = st.just(ContentionFit())
measured = st.one_of(
    st.just(H200),
    st.builds(
        ContentionFit,
        stream_weight=st.floats(0.5, 4.0),
        crowd_weight=st.one_of(st.none(), st.floats(0.5, 4.0)),
        crowd_hold=st.floats(0.5, 1.0),
        turn_exponent=st.floats(0.1, 1.5),
        small_kernel_weight=st.floats(0.5, 4.0),
        yielding=st.floats(0.0, 1.5),
        hold=share,
        hold_compute=share,
        hold_layer_s=st.sampled_from([0.0, 1e-4, 1e-3]),
        hold_8bit=st.floats(0.5, 1.0),
        small_expert_hold=st.floats(0.8, 1.25),
        small_expert_weight=st.floats(0.8, 1.25),
    ),
)


@st.composite
def lanes_at_work(draw: st.DrawFn, fewest: int = 1) -> list[Load]:
    """Up to three lanes, as a GPU has them: one work each, decode before verify before prefill, in any order."""
    lanes = draw(st.lists(st.sampled_from(["prefill", "verify", "decode"]), min_size=fewest, max_size=3, unique=True))
    order = ("prefill", "verify", "decode")
    return [
        Load(
            draw(demands), draw(demands), order.index(lane), draw(turns_s), draw(small_kernel_shares),
            *(draw(halves) if lane == "prefill" else (0.0, 0.0)), draw(share), eight_bits=draw(st.booleans()),
        )
        for lane in lanes
    ]  # fmt: skip


def used_up(loads: Sequence[Load]) -> tuple[float, float]:
    return sum(x.rate * x.compute for x in loads), sum(x.rate * x.bandwidth for x in loads)


def hold(fit: ContentionFit, load: Load, others: Sequence[Load]) -> float:
    """What a load holds of the GPU among those that it shares turns with."""
    shrunk = 1 / (1 + load.layer_s / fit.hold_layer_s) if fit.hold_layer_s else 1.0
    held = min(1.0, 1 - (1 - fit.hold) * shrunk + fit.hold_compute * load.compute)
    held *= fit.hold_8bit if load.eight_bits else 1.0
    held *= fit.small_expert_hold**load.experts_read if load.small_kernel_share else 1.0
    held = min(1.0, held) * (1 - load.empty)
    return held * fit.crowd_hold if len(others) > 2 else held


def rates(sharing: Sharing, loads: Sequence[Load]) -> list[float]:
    """Return the loads' rates, as of launches that have just begun."""
    for load in loads:
        load.share = load.rate = 0.0
    sharing.solve(loads)
    return [load.rate for load in loads]


def lacks_something(load: Load, others: Sequence[Load], held: dict[int, float]) -> bool:
    """Whether something that the load needs is used up by itself and the launches that it shares with."""
    used_c, used_b = used_up(others)
    left = 1 - sum(x.rate * held[id(x)] for x in others)
    needs = ((load.compute, 1 - used_c), (load.bandwidth, 1 - used_b), (held[id(load)], left))
    return any(need > 0 and left <= TINY for need, left in needs)


@given(
    loads=st.lists(st.builds(Load, demands, demands), min_size=1, max_size=5), data=st.data(),
    compute=st.floats(0.1, 1.0), bandwidth=st.floats(0.1, 1.0), room=st.floats(0.0, 1.0),
)  # fmt: skip
@settings(max_examples=100)
def test_max_min_is_feasible_conserving_and_fair(
    loads: list[Load], data: st.DataObject, compute: float, bandwidth: float, room: float
) -> None:
    """No limit or capacity is exceeded; a launch held back needs a full resource, with the highest level there."""
    n = len(loads)
    weight = data.draw(st.lists(weights, min_size=n, max_size=n))
    limit = data.draw(st.lists(st.floats(0.05, 1.0), min_size=n, max_size=n))
    holds = data.draw(st.lists(demands, min_size=n, max_size=n))
    left = max_min(loads, weight, limit, compute, bandwidth, holds, room)
    used_c, used_b = used_up(loads)
    held = sum(x.rate * h for x, h in zip(loads, holds, strict=True))
    assert left == pytest.approx((compute - used_c, bandwidth - used_b, room - held), abs=TINY)
    assert used_c <= compute + TINY
    assert used_b <= bandwidth + TINY
    assert held <= room + TINY
    needs = [(x.compute, x.bandwidth, h) for x, h in zip(loads, holds, strict=True)]
    for i, load in enumerate(loads):
        assert 0 <= load.rate <= limit[i] + TINY
        if load.rate < limit[i] - TINY:
            # max-min: some full resource that it needs, of which nobody with a higher level takes part
            level = load.rate / weight[i]
            full = [d for d, rest in enumerate(left) if rest <= TINY and needs[i][d]]
            assert full
            assert any(
                all(x.rate / w <= level + 1e-6 for x, w, need in zip(loads, weight, needs, strict=True) if need[d])
                for d in full
            )


@given(
    a=st.builds(Load, used, used), b=st.builds(Load, used, used), wa=weights, wb=weights,
    held=st.tuples(*[st.one_of(st.just(0.0), used)] * 2),
)  # fmt: skip
@settings(max_examples=150)
def test_the_short_cut_for_two_is_max_min(a: Load, b: Load, wa: float, wb: float, held: tuple[float, float]) -> None:
    wa, wb = max(wa, wb), min(wa, wb)  # it takes the heavier first
    max_min_of_two(a, b, wa, wb, *held)
    short = (a.rate, b.rate)
    max_min([a, b], [wa, wb], [1.0, 1.0], 1.0, 1.0, held)
    assert short == pytest.approx((a.rate, b.rate), abs=NEAR)


@given(loads=lanes_at_work(), priority=st.sampled_from(PRIORITIES), fit=st.one_of(ideal, measured))
@settings(max_examples=100)
def test_sharing_keeps_to_the_gpu(loads: list[Load], priority: Priority, fit: ContentionFit) -> None:
    """Whatever the priority: nobody is faster than alone, and neither resource nor the room is given out twice.

    Nor is any wasted: a launch held back lacks something, and together they get on as fast as one after the other.
    """
    sharing = Sharing("fluid", priority, fit)
    speeds = rates(sharing, loads)
    assert all(0 <= rate <= 1 for rate in speeds)
    assert any(rate > 0 for rate in speeds)
    if len(loads) == 1:
        assert speeds == [1.0]
        return
    assert max(used_up(loads)) <= 1 + TINY
    equal = {id(x): [y for y in loads if y.priority == x.priority] for x in loads}
    held = {id(x): hold(fit, x, equal[id(x)] if priority == "preemptive" else loads) for x in loads}
    assert sum(x.rate * held[id(x)] for x in loads) <= 1 + TINY
    assert sum(speeds) >= 1 - NEAR
    for load in loads:
        if load.rate < 1 - NEAR:
            others = [x for x in loads if x.priority >= load.priority] if priority == "preemptive" else loads
            assert lacks_something(load, others, held)


@given(loads=lanes_at_work(2), fit=st.one_of(ideal, measured), levels=st.tuples(*[st.integers(0, 2)] * 3))
@settings(max_examples=80)
def test_preemption_is_strict(loads: list[Load], fit: ContentionFit, levels: tuple[int, int, int]) -> None:
    """Those above get on as if those below were not there, and those on one level share as without priority."""
    for load, level in zip(loads, levels, strict=False):
        load.priority = level
    sharing, alike = Sharing("fluid", "preemptive", fit), Sharing("fluid", "none", fit)
    alone = dict(zip(map(id, loads), rates(sharing, loads), strict=True))
    for level in set(levels):
        above = [load for load in loads if load.priority >= level]
        if above:
            assert rates(sharing, above) == [alone[id(load)] for load in above]
    top = [load for load in loads if load.priority == max(x.priority for x in loads)]
    assert [alone[id(load)] for load in top] == pytest.approx(rates(alike, top), abs=NEAR)


@given(loads=lanes_at_work(2), priority=st.sampled_from(["none", "stream", "preemptive"]), fit=measured)
@settings(max_examples=80)
def test_a_higher_priority_never_slows_a_work(loads: list[Load], priority: Priority, fit: ContentionFit) -> None:
    """Raising one work's priority never lowers its rate, and never gives it less than preemption grants it at most.

    Of streams that is so between two. Among three it need not be: a work that takes over another's place may leave more
    to the third, its rival.
    """
    loads = loads[:2] if priority == "stream" else loads
    weight = max(1.0, fit.stream_weight)
    fit = replace(fit, stream_weight=weight, crowd_weight=None)
    sharing = Sharing("fluid", priority, fit)
    speeds = []
    for level in range(4):
        loads[0].priority = level
        speeds.append(rates(sharing, loads)[0])
    assert np.all(np.diff(speeds) >= -NEAR)
    if priority == "none":
        assert speeds == pytest.approx([speeds[0]] * 4)
    if priority == "preemptive":
        assert speeds[-1] == 1.0  # above all others: as if alone


def test_of_three_streams_each_has_so_many_times_the_share_of_the_next() -> None:
    """All want the whole bandwidth, the verify's kernels are twice as long: 1 to 2 * 3 to 3 * 3."""
    fit = ContentionFit(stream_weight=1.0, crowd_weight=3.0, turn_exponent=1.0)
    prefill, verify, decode = Load(0.1, 1.0, 0), Load(0.1, 1.0, 1, layer_s=2e-4), Load(0.1, 1.0, 2)
    speeds = rates(Sharing("fluid", "stream", fit), [verify, decode, prefill])
    assert speeds == pytest.approx([6 / 16, 9 / 16, 1 / 16])
    speeds = rates(Sharing("fluid", "none", fit), [verify, decode, prefill])
    assert speeds == pytest.approx([2 / 4, 1 / 4, 1 / 4])


@given(loads=lanes_at_work(), fit=measured)
@settings(max_examples=80)
def test_priorities_range_from_none_to_preemptive(loads: list[Load], fit: ContentionFit) -> None:
    """A stream weight of 1 is no priority, and with it what the highest stream gets goes towards preemption.

    Of two it only grows; among three the second, whose weight grows as well, may at first take some of it.
    """
    top = max(range(len(loads)), key=lambda i: loads[i].priority)
    speeds = []
    for priority, weight in (("none", 4.0), ("stream", 1.0), ("stream", 4.0), ("stream", 1e8), ("preemptive", 4.0)):
        alike: dict[str, float] = dict.fromkeys(("expert_weight", "weight_8bit"), 1.0)
        weighed = replace(fit, stream_weight=weight, crowd_weight=None, yielding=0.0, **alike)
        speeds.append(rates(Sharing("fluid", priority, weighed), loads)[top])  # type: ignore[arg-type]
    assert speeds[0] == pytest.approx(speeds[1], abs=TINY)
    assert np.all(np.diff(speeds) >= -NEAR) or len(loads) == 3
    assert speeds[3] == pytest.approx(speeds[4], abs=1e-4)


def test_a_launch_of_small_kernels_that_goes_first_has_more_of_the_turns() -> None:
    """By hand: turns go by the root of 4 to 1; for one of higher priority, with a model that yields, all are alike.

    A launch with small kernels in part has that power of it. Without priority, and to others, it is nothing.
    """
    fit = ContentionFit(stream_weight=1.0, turn_exponent=0.5, yielding=0.5)
    draft = Load(0.0, 1.0, 1, layer_s=1e-4, small_kernel_share=1.0)
    prefill = Load(0.0, 1.0, 0, layer_s=4e-4)
    stream, none = Sharing("fluid", "stream", fit), Sharing("fluid", "none", fit)
    assert rates(none, [prefill, draft]) == pytest.approx([2 / 3, 1 / 3])
    assert rates(stream, [prefill, draft]) == pytest.approx([1 / 2, 1 / 2])
    draft.small_kernel_share = 0.5
    assert rates(stream, [prefill, draft]) == pytest.approx([1 - 2**-0.5 / (1 + 2**-0.5), 2**-0.5 / (1 + 2**-0.5)])
    draft.small_kernel_share = 0.0
    assert rates(stream, [prefill, draft]) == pytest.approx([2 / 3, 1 / 3])


def test_small_kernels_between_experts_have_more_turns_and_occupy_more() -> None:
    """By hand, with or without priority: twice the turns next to all experts, and all of the GPU for eight tenths."""
    turns = ContentionFit(stream_weight=1.0, turn_exponent=0.5, small_expert_weight=2.0)
    room = ContentionFit(stream_weight=1.0, hold=0.8, small_expert_hold=1.25)
    for small, read in ((0.1, 1.0), (0.1, 0.5), (0.0, 1.0), (0.1, 0.0)):
        weight, held = (2.0**read, 0.8 * 1.25**read) if small else (1.0, 0.8)
        for priority in ("stream", "none"):
            rows = Load(0.0, 1.0, 1, small_kernel_share=small, experts_read=read)
            shared = rates(Sharing("fluid", priority, turns), [rows, Load(0.0, 1.0, 0)])  # type: ignore[arg-type]
            assert shared == pytest.approx([weight / (1 + weight), 1 / (1 + weight)])
        rows = Load(0.1, 0.1, 1, small_kernel_share=small, experts_read=read)
        assert rates(Sharing("fluid", "none", room), [rows, Load(0.1, 0.1, 0)]) == pytest.approx([1 / (0.8 + held)] * 2)


def test_small_kernels_gain_where_two_follow_each_other() -> None:
    """By hand, without priority: a weight of 4 if all are small, 4 to the power of a quarter if half of the time is."""
    sharing = Sharing("fluid", "none", ContentionFit(turn_exponent=0.5, small_kernel_weight=4.0))
    prefill = Load(0.0, 1.0, 0, layer_s=1e-4)
    for share, weight in ((1.0, 4.0), (0.5, 4**0.25), (0.0, 1.0)):
        forward = Load(0.0, 1.0, 1, layer_s=1e-4, small_kernel_share=share)
        assert rates(sharing, [prefill, forward]) == pytest.approx([1 / (1 + weight), weight / (1 + weight)])


@given(loads=lanes_at_work(), priority=st.sampled_from(["none", "stream"]))
def test_the_ablations(loads: list[Load], priority: Priority) -> None:
    """`max`: all at full speed. `serial`: one alone, who keeps the GPU to its end; neither knows other priorities."""
    Sharing("max", priority, ContentionFit()).solve(loads)
    assert [x.rate for x in loads] == [1.0] * len(loads)
    for load in loads:
        load.rate = 0.0
    serial = Sharing("serial", priority, ContentionFit())
    serial.solve(loads)
    assert sorted(x.rate for x in loads) == [0.0] * (len(loads) - 1) + [1.0]
    chosen = next(x for x in loads if x.rate)
    expected = loads[0] if priority == "none" else max(loads, key=lambda x: x.priority)
    assert chosen is expected
    newcomer = Load(1.0, 1.0, priority=9)
    serial.solve([*loads, newcomer])
    assert chosen.rate == 1.0
    assert newcomer.rate == 0.0


# the H200's launches ------------------------------------------------------------------------------------------------


def h200(priority: Priority) -> tuple[SimulatedGPU, Planner, Launches]:
    """The GPU of the shipped profile, with a host that costs nothing, and what is planned with."""
    host, log = HostCost(0.0, 0.0, 0.0), Launches()
    plan = planner(host, priority)
    gpu = SimulatedGPU(Clock(), SimulatedHost(host), plan.models, plan.sharing, log, lambda launch: None, plan.peak)
    return gpu, plan, log


@pytest.mark.parametrize("priority", ["none", "stream", "preemptive"])
@pytest.mark.parametrize(("rows", "k"), [(1, 4), (5, 3), (16, 8), (64, 1), (128, 4)])
def test_the_planner_foresees_what_the_gpu_does(priority: Priority, rows: int, k: int) -> None:
    """A draft concurrent with the verify of an equal batch, until both are done; either may be held back."""
    gpu, plan, log = h200(priority)
    mine, others = batch(rows, 300), batch(rows, 300)
    gpu.launch(Launch("draft", "draft", "decode", mine, tokens=1, steps=k, priority=2))
    gpu.launch(Launch("verify", "target", "verify", others, tokens=k + 1, priority=1))
    gpu.env.run()
    ends = log.drain()["end_s"]
    assert len(ends) == 2
    assert ends.max() == pytest.approx(plan.overlapped_s(rows, rows * 300, k), rel=1e-12)


def co_running(gpu: SimulatedGPU, launch: Launch) -> Job:
    """The work as those that share the GPU with it see it."""
    job = gpu.launch(launch)
    gpu.demand(job)
    return job


def test_the_small_kernels_of_a_draft_are_those_of_its_steps() -> None:
    """Kernels of up to 32 tokens co-run with others; only the first of a draft's steps has two tokens per row.

    A draft's turn is a layer of one step, whatever their number.
    """
    gpu, *_ = h200("stream")
    rows = batch(20, 300)
    for tokens, steps, share in ((1, 1, 1.0), (2, 1, 0.0), (1, 4, 1.0), (2, 4, 0.75)):
        job = co_running(gpu, Launch("draft", "draft", "decode", rows, tokens, steps))
        assert job.small_kernel_share == share
        assert job.layer_s == pytest.approx(job.solo_s / (steps * pair(PAIR).draft.layers))
    assert not co_running(gpu, Launch("draft", "draft", "decode", batch(33, 300), 1, 4)).small_kernel_share
    # a large model's products take most of its time, and leave no room
    assert 0 < co_running(gpu, Launch("verify", "target", "verify", rows, 1)).small_kernel_share < 0.5
