"""What a policy may set for each lane: batch limits, priorities that move, weights; under any load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from pdvsim.sim.config import Arch, Experiment, Server, Traffic
from pdvsim.sim.core import KINDS, Request
from pdvsim.sim.policies import named
from pdvsim.sim.policies.base import HIGHEST, PATIENCE_S, PRIORITY
from pdvsim.sim.policies.pdv import PDV
from pdvsim.sim.run import simulate

LANED: tuple[Arch, ...] = ("pd", "pdv", "pdv-unified", "pdv-hybrid", "adaptive")
BUSY = Traffic("random", num_prompts=60, input_len=400, output_len=40, random_range_ratio=0.9, max_concurrency=24)


def largest(experiment: Experiment, kind: str) -> int:
    """Rows of the largest batch of a kind."""
    launches = simulate(experiment).launches
    return int(max(launches["rows"][launches["kind"] == KINDS.index(kind)], default=0))


@pytest.mark.parametrize("arch", LANED)
@pytest.mark.parametrize(("drafts", "verifies"), [(6, 12), (12, 6), (1, 24)])
def test_no_batch_exceeds_its_lanes_limit(arch: Arch, drafts: int, verifies: int) -> None:
    server = Server(max_num_seqs=24, max_draft_batch=drafts, max_verify_batch=verifies)
    experiment = Experiment(arch, BUSY, server=server)
    assert largest(experiment, "draft") <= drafts
    assert largest(experiment, "verify") <= verifies
    assert largest(experiment, "decode") <= verifies


@pytest.mark.parametrize("arch", LANED)
def test_limits_at_the_common_one_change_nothing(arch: Arch) -> None:
    plain = Experiment(arch, BUSY, server=Server(max_num_seqs=16))
    same = replace(plain, server=replace(plain.server, max_draft_batch=16, max_verify_batch=16))
    one, other = simulate(plain).launches, simulate(same).launches
    assert all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize("name", ["max_draft_batch", "max_verify_batch"])
def test_a_limit_above_the_common_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be at most max-num-seqs, 8, got 9"):
        Server(max_num_seqs=8, **{name: 9})


class Watched(PDV):
    """Notes the priority of every work beside what it follows from."""

    seen: ClassVar[list[tuple[str, int, float]]] = []

    def priority(self, lane: str, requests: Sequence[Request]) -> int:
        level = super().priority(lane, requests)
        first = requests[0]
        since_s = {"prefill": first.arrival_s, "verify": first.state.ready_s, "decode": first.state.last_delivery_s}[
            lane
        ]
        self.seen.append((lane, level, self.env.now - since_s))
        return level


def test_a_level_for_each_patience_and_at_most_one_more() -> None:
    """So whoever waits long enough goes before everybody, and nobody is below its lane's own level."""
    Watched.seen = []
    crowd = replace(BUSY, num_prompts=300, input_len=1000, output_len=20, max_concurrency=None)
    simulate(Experiment(named(Watched), crowd, server=Server(priority="dynamic")))
    for lane, level, age_s in Watched.seen:
        patience = int(age_s / PATIENCE_S)
        assert level in {min(HIGHEST, PRIORITY[lane] + patience + deep) for deep in (0, 1)}
        assert level == HIGHEST or age_s < HIGHEST * PATIENCE_S
    assert any(lane == "prefill" and level == HIGHEST for lane, level, _ in Watched.seen)
