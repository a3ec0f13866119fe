"""The host thread: what idle lanes that poll cost the others, and when an idle lane learns of work."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Arch, Experiment, Host, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.prices.host import HostCost, SimulatedHost
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate

P, C, LOOK = 10e-6, 30e-6, 1e-6


def spent(idle_lanes: float, cost_s: float, period_s: float = P, look_s: float = LOOK) -> float:
    """The time of an operation on a host that `lanes` idle lanes poll."""
    host = SimulatedHost(HostCost(0.0, 0.0, 0.0, idle_poll_s=period_s, idle_poll_cost_s=look_s))
    host.idle(idle_lanes)  # type: ignore[arg-type]  # parts of a lane, to see that nothing jumps between whole ones
    return host.spend(0.0, cost_s, "launch")


@pytest.mark.parametrize("cost_s", [1e-7, 1e-6, C, 1e-3])
def test_more_polling_lanes_cost_more_and_nothing_jumps(cost_s: float) -> None:
    """By fine steps of the number of lanes, across where their looks fill the thread (11): no step stands out."""
    taken = [spent(lanes / 100, cost_s) for lanes in range(2500)]
    steps = [b - a for a, b in pairwise(taken)]
    assert min(steps) >= -1e-18
    # 1 / (1 - share of the thread) gets steep for short operations, and no steeper than one look a lane in all
    assert max(steps) <= 0.01 * LOOK * max(1.0, (P + LOOK) / cost_s) + 1e-18
    assert all(time <= cost_s + lanes / 100 * LOOK + 1e-18 for lanes, time in enumerate(taken))


@pytest.mark.parametrize(("lanes", "cost_s", "period_s", "expected_s"), [
    # lanes that look for 1 us out of every 11 leave an operation, short against the period, the rest
    *((lanes, 1e-7, P, 1e-7 / (1 - lanes * LOOK / (P + LOOK))) for lanes in (1, 2, 5)),
    # as on a thread that serves all in turn, it waits for one look of each lane at most, also if polls never pause
    *((lanes, C, P, C + lanes * LOOK) for lanes in (11, 12, 100)),
    (3, C, 1e-12, C + 3 * LOOK),
    (100, 0.0, P, 0.0),
])  # fmt: skip
def test_what_polling_lanes_take_of_the_thread(lanes: int, cost_s: float, period_s: float, expected_s: float) -> None:
    assert spent(lanes, cost_s, period_s=period_s) == pytest.approx(expected_s)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_woken_lane_starts_later_by_the_time_it_takes_to_wake(arch: Arch) -> None:
    """One prompt, whose first token is all that is asked for: the lane that admits was asleep when it came."""
    traffic = Traffic("random", num_prompts=1, input_len=64, output_len=1)
    at_once, woken = (
        simulate(Experiment(arch, traffic, host=Host(notify_s=notify_s))).requests["first_token_s"][0]
        for notify_s in (0.0, 50e-6)
    )
    assert woken - at_once == pytest.approx(50e-6, rel=1e-6)


@pytest.mark.parametrize("drafted_by", ["none", "ngram", "suffix"])
def test_operations_are_logged_by_what_they_are_not_by_what_they_cost(drafted_by: str) -> None:
    """All three cost the same, so that only their names differ; a search has a cost of its own."""
    traffic = Traffic("random", num_prompts=12, input_len=50, output_len=20, max_concurrency=4)
    server = Server(drafter=drafted_by)
    host = Host(launch_s=1e-5, completion_s=1e-5, handoff_s=1e-5)
    result = simulate(Experiment("pdv", traffic, server=server, host=host), traced=True)
    spans = Counter(what for _, what, *_ in result.host or ())
    assert spans["launch"] == len(result.launches["start_s"])
    assert 0 < spans["completion"] <= spans["launch"]
    assert spans["handoff"] > 0
    assert (spans["lookup"] > 0) == (drafted_by != "none")
    assert spans.total() == sum(spans[what] for what in ("launch", "completion", "handoff", "lookup"))
    taken_s = [end_s - start_s for _, what, start_s, end_s in result.host or () if what != "lookup"]
    assert taken_s == pytest.approx([1e-5] * len(taken_s))


@pytest.mark.parametrize("arch", ["autoregressive", "colocated", "pd", "pdv"])
@pytest.mark.parametrize("chunk", [256, 2048])
def test_a_request_enters_once_however_many_launches_carry_its_prompt(arch: Arch, chunk: int) -> None:
    """The first token of one request comes later by the time of entering, by no more with chunks or with a drafter."""
    traffic = Traffic("random", num_prompts=1, input_len=700, output_len=8)
    server = Server(max_num_batched_tokens=chunk, num_speculative_tokens=2 if arch != "autoregressive" else 4)
    experiment = applicable(Experiment(arch, traffic, server=server))
    usual = covering_profile(experiment)
    ttft_s = [
        summarise(simulate(experiment, profile=replace(usual, host=replace(usual.host, join_s=join_s))))["mean_ttft_ms"]
        for join_s in (0.0, 1e-3)
    ]
    assert ttft_s[1] - ttft_s[0] == pytest.approx(1.0, abs=0.02)  # ms; a little is lost to the card that cools
