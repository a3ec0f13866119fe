"""What a policy may set for each lane: batch limits, priorities that move, weights; under any load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simpy.events import Event

from pdvsim.sim.config import Arch, Experiment, Server, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.machine.batch import Launch
from pdvsim.sim.machine.device import SimulatedGPU
from pdvsim.sim.machine.lane import HIGHEST, PATIENCE_S, PRIORITY
from pdvsim.sim.run import simulate

LANED: tuple[Arch, ...] = ("pd", "pdv", "pdv-unified", "pdv-hybrid", "adaptive")
BUSY = Traffic("random", num_prompts=60, input_len=400, output_len=40, random_range_ratio=0.9, max_concurrency=24)


def largest(experiment: Experiment) -> dict[str, int]:
    """Rows of the largest batch of each kind."""
    launches = simulate(experiment).launches
    return {kind: int(max(launches["rows"][launches["kind"] == at], default=0)) for at, kind in enumerate(KINDS)}


@pytest.mark.parametrize("arch", LANED)
@pytest.mark.parametrize(("drafts", "verifies"), [(6, 12), (12, 6), (1, 24)])
def test_no_batch_exceeds_its_lanes_limit(arch: Arch, drafts: int, verifies: int) -> None:
    server = Server(max_num_seqs=24, max_draft_batch=drafts, max_verify_batch=verifies)
    rows = largest(Experiment(arch, BUSY, server=server))
    assert rows["draft"] <= drafts
    assert max(rows["verify"], rows["decode"]) <= verifies


def test_a_level_for_each_patience_and_at_most_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a launch that waits long enough is scheduled first, and none is below its lane's own level."""
    seen: list[tuple[str, int, float]] = []
    enter = SimulatedGPU.launch

    def watched(gpu: SimulatedGPU, launch: Launch) -> Event:
        first = launch.rows[0] if launch.rows else launch.chunks[0].request
        since_s = {
            "prefill": first.arrival_s, "verify": first.state.ready_s, "decode": first.state.last_delivery_s,
        }[launch.lane]  # fmt: skip
        seen.append((launch.lane, launch.priority, gpu.env.now - since_s))
        return enter(gpu, launch)

    monkeypatch.setattr(SimulatedGPU, "launch", watched)
    crowd = replace(BUSY, num_prompts=300, input_len=1000, output_len=20, max_concurrency=None)
    simulate(Experiment("pdv", crowd, server=Server(priority="dynamic")))
    for lane, level, age_s in seen:
        patience = int(age_s / PATIENCE_S)
        assert level in {min(HIGHEST, PRIORITY[lane] + patience + deep) for deep in (0, 1)}
        assert level == HIGHEST or age_s < HIGHEST * PATIENCE_S
    assert any(lane == "prefill" and level == HIGHEST for lane, level, _ in seen)
