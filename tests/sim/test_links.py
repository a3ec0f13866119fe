"""Links between GPUs: queueing, what is sent, and that the planner accounts for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdvsim.sim.assembly import ServerParts, covering_profile
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Scoring, Server, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.models.presets import pair
from pdvsim.sim.prices.links import LINKS, Fabric, LinkSpec
from pdvsim.sim.prices.profile import builtin
from pdvsim.sim.records import LANES
from pdvsim.sim.run import simulate

GEMMA = "gemma-2b:gemma-7b"


def placed(arch: Arch, *place: str, server: dict[str, Any] | None = None, **hardware: Any) -> Experiment:
    return Experiment(
        arch,
        Traffic("random", num_prompts=60, input_len=200, output_len=40, max_concurrency=16, random_range_ratio=0.5),
        server=Server(**server or {}),
        hardware=Hardware(place=place, band=False, **hardware),
    )


def test_transfers_queue_for_the_ports() -> None:
    """10 bytes per second, 1 s of latency. Out of one port and into one port, first come first served; ways differ."""
    fabric = Fabric(LinkSpec(1.0, 10.0, "made up"), 3)
    assert fabric.send(0.0, 0, 1, 20) == 3.0  # 0 -> 2, and the latency
    assert fabric.send(0.5, 0, 2, 10) == 4.0  # 0 sends until 2
    assert fabric.send(0.5, 1, 0, 10) == 2.5  # the other direction is free
    assert fabric.send(1.0, 1, 2, 10) == 5.0  # 2 receives until 3
    assert fabric.send(9.0, 0, 1, 0) == 10.0
    assert fabric.bytes == {(0, 1): 20, (0, 2): 10, (1, 0): 10, (1, 2): 10}
    assert fabric.busy_s == {(0, 1): 2, (0, 2): 1, (1, 0): 1, (1, 2): 1}


@pytest.mark.parametrize("arch", ["pdv", "pdv-hybrid"])
@pytest.mark.parametrize("place", [
    ("prefill=1", "verify=1"),
    ("decode=1",),
    ("prefill=1", "decode=0", "verify=2"),
    ("prefill=1+2", "verify=3"),
    ("decode=0+1", "verify=2", "prefill=2"),
    ("prefill=3+4", "decode=0+1+2", "verify=1"),
])  # fmt: skip
def test_what_goes_over_the_links_is_what_was_drafted_judged_and_read(arch: Arch, place: tuple[str, ...]) -> None:
    experiment = placed(arch, *place)
    result, models = simulate(experiment), pair(experiment.server.pair)
    placement, launches = experiment.placement, result.launches
    expected: dict[str, float] = {}

    def add(source: int, target: int, size: float) -> None:
        if source != target:
            expected[f"{source}->{target}"] = expected.get(f"{source}->{target}", 0) + size

    drafts, target = launches["kind"] == KINDS.index("draft"), launches["role"] == 1
    reads = (launches["kind"] == KINDS.index("prefill")) & target
    for at in range(placement.gpus):
        here = launches["gpu"] == at
        tokens = (launches["rows"] * launches["steps"])[drafts & here].sum()
        add(at, placement.verify, tokens * 4)
        add(placement.verify, at, 8 * launches["rows"][drafts & here].sum())
        add(at, placement.verify, launches["tokens"][reads & here].sum() * models.target.kv_bytes_per_token)
    expected = {way: size for way, size in expected.items() if size}
    assert {way: sent["bytes"] for way, sent in result.meta["links"].items()} == pytest.approx(expected)
    assert result.meta["gpus"] == placement.gpus
    assert set(np.unique(launches["gpu"])) == set(range(placement.gpus))


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("rested", [True, False])
def test_auto_is_no_worse_than_never_gathering_on_two_gpus(requests: int, rested: bool) -> None:
    """The planner knows that draft and verify do not share a card."""

    def speed(gather: Any) -> float:
        traffic = Traffic("random", num_prompts=2 * requests, input_len=128, output_len=64, max_concurrency=requests)
        experiment = Experiment(
            "pdv", traffic, Acceptance(0.8), Server(GEMMA, 8, verify_gather=gather),
            Hardware(place=("prefill=1", "verify=1")),
        )  # fmt: skip
        profile = covering_profile(experiment)
        run = simulate(experiment, profile=replace(profile, power=None) if rested else profile)
        return float(summarise(run)["output_throughput"])

    assert speed("auto") >= 0.995 * speed("never")


def test_the_planner_counts_transfers_and_no_contention() -> None:
    """On two GPUs, a draft alongside a verify takes as long as the longer of the two with what it is sent."""
    together = placed("pdv", server={"pair": GEMMA, "num_speculative_tokens": 8})
    apart = replace(together, hardware=replace(together.hardware, place=("prefill=1", "verify=1"), link="100gbe"))
    profile = covering_profile(together)
    one, two = ServerParts(together, profile).planner, ServerParts(apart, profile).planner
    link = LINKS["100gbe"]
    moving = 2 * link.latency_s + (64 * 8 * 4 + 64 * 8) / link.bytes_per_s
    assert two.round_s(64, 6400, 8) == pytest.approx(one.round_s(64, 6400, 8) + moving)
    assert two.round_s(64, 6400, 0) == one.round_s(64, 6400, 0)
    alone = one.round_s(64, 6400, 8) + moving
    assert alone / 2 < two.overlapped_s(64, 6400, 8) < alone


@pytest.mark.parametrize("detailed", [True, False])
def test_a_lanes_bandwidth_is_a_share_of_its_own_cards(detailed: bool) -> None:
    """Drafts move their bytes at the L4's bandwidth, which is a sixteenth of the H200's."""
    traffic = Traffic("random", num_prompts=30, input_len=64, output_len=64, max_concurrency=8)
    hardware = Hardware(place=("prefill=1", "verify=1"), cards=("l4", "h200"), band=False)
    result = simulate(Experiment("pdv", traffic, hardware=hardware))
    run = simulate(Experiment("pdv", traffic, hardware=hardware, scoring=Scoring(detailed=detailed)))
    lanes, launches = summarise(run)["lanes"], result.launches
    span_s = result.requests["finish_s"].max() - result.requests["arrival_s"].min()
    for lane, cards in (("decode", ("l4",)), ("verify", ("h200",)), ("prefill", ("l4", "h200"))):
        shares = []
        for card in cards:
            mine = (launches["lane"] == LANES.index(lane)) & (launches["gpu"] == hardware.cards.index(card))
            shares.append(launches["bytes"][mine].sum() / builtin(card).gpu.bandwidth_bytes_per_s / span_s)
            assert 0 < shares[-1] < 1
        assert lanes[lane]["bandwidth_share"] == pytest.approx(sum(shares) / len(shares))
