"""A batch whose rounds pass at once is a batch like any other, to a policy that reads or changes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from pdvsim.sim.config import Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import KINDS, Chunk
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.policies import named
from pdvsim.sim.policies.base import Process
from pdvsim.sim.policies.colocated import Colocated
from pdvsim.sim.policies.pd import PD
from pdvsim.sim.policies.pdv import PDV
from pdvsim.sim.run import simulate
from pdvsim.testing import check_alike, check_books

TRAFFIC = Traffic("random", num_prompts=60, input_len=150, output_len=60, random_range_ratio=0.9, request_rate=30.0)
SCARCE = Hardware(kv_capacity_tokens=1500)


class Curious(Colocated):
    """Looks at every row before each decision, and keeps what it saw."""

    seen: ClassVar[dict[tuple[int, int], tuple[float, ...]]] = {}  # by request and tokens delivered

    def next_chunks(self, budget: int, worker: int = 0) -> tuple[Chunk, ...]:
        assert self.running.context == sum(row.state.context for row in self.running)
        for row in self.running:
            state = row.state
            figures = (state.context, state.held_tokens, state.drafter_lag, state.pinned, state.last_delivery_s)
            self.seen[row.id, state.emitted] = figures
        return super().next_chunks(budget, worker)


class Restless(PD):
    """Changes the order of its rows in every way, which is of no consequence."""

    def decode_worker(self) -> Process:
        rows = Batch()
        turn = 0
        while True:
            rows.add(self.decode.take(self.settings.round_batch - len(rows)))
            if not rows:
                yield self.decode.wait()
                continue
            turn += 1
            if turn % 5 == 0:
                rows = Batch(reversed(rows))
            elif turn % 5 == 1:
                first = rows.take(1)
                rows.add(first)
            elif turn % 5 == 2:
                rows = Batch(sorted(rows, key=lambda row: row.state.context))
            elif turn % 5 == 3:
                last = rows[-1]
                rows.remove(last)
                rows, others = Batch([last]), rows
                rows.add(others)
            else:
                first, rows = rows[:1], rows[1:]
                rows.add(first)
            k = self.controller.draft_length(rows, 0, self.env.now)
            rows = yield from self.rounds(self.reserve(rows, k), k)


class Counting(PDV):
    """Has a say in every verdict, so it must be asked for each."""

    verdicts = 0

    def settle(self, rows: Batch, verdict: Sequence[int]) -> Batch:
        Counting.verdicts += len(verdict)
        assert all(0 <= accepted <= row.state.k for row, accepted in zip(rows, verdict, strict=True))
        return super().settle(rows, verdict)


@pytest.mark.parametrize(("policy", "hardware"), [(Curious, Hardware()), (Curious, SCARCE), (Restless, Hardware())])
def test_whoever_looks_at_rows_or_reorders_them_gets_the_same_run(policy: type[Colocated], hardware: Hardware) -> None:
    experiment = Experiment(named(policy), TRAFFIC, server=Server(num_speculative_tokens=3), hardware=hardware)
    Curious.seen.clear()
    at_once, seen = simulate(experiment), dict(Curious.seen)
    Curious.seen.clear()
    one_by_one = simulate(experiment, blocks=False)
    check_alike(at_once, one_by_one)
    assert len(seen) > 100 or policy is Restless
    for moment, figures in seen.items():
        assert figures == pytest.approx(Curious.seen[moment], rel=1e-9)
    requests = at_once.requests
    check_books(at_once, requests["output_tokens"].tolist(), requests["arrival_s"].tolist())
    assert hardware is not SCARCE or requests["preemptions"].sum() > 0


@pytest.mark.parametrize("arch", ["pdv", "pdv-hybrid"])
def test_rows_handed_over_without_drafts_wait_for_a_busy_host(arch: Arch) -> None:
    traffic = Traffic(num_prompts=60, request_rate=20.0)
    experiment = Experiment(arch, traffic, server=Server(num_speculative_tokens=0))
    quick, slow = (simulate(experiment, blocks=blocks).requests["wait_s"] for blocks in (True, False))
    assert quick.max() > 0
    assert quick.tolist() == pytest.approx(slow.tolist(), abs=1e-12)


def test_rounds_pass_without_the_policy_being_asked() -> None:
    """Else nothing here would be tested: a request that is alone is decided for a few times, not in every round."""
    asked = 0

    class Asked(Colocated):
        def next_chunks(self, budget: int, worker: int = 0) -> tuple[Chunk, ...]:
            nonlocal asked
            asked += 1
            return super().next_chunks(budget, worker)

    class Step(Asked):
        def reserve(self, rows: Batch, k: int) -> Batch:
            return super().reserve(rows, k)

    counts = []
    for policy in (Asked, Step):  # one with a part of its own is asked in every round
        asked = 0
        one = Traffic("random", num_prompts=3, input_len=50, output_len=200, max_concurrency=1)
        result = simulate(Experiment(named(policy), one))
        counts.append((asked, int(result.requests["rounds"].sum())))
    (few, rounds), (many, same) = counts
    assert rounds == same > 100
    assert few < 15
    assert many >= rounds


def test_a_say_in_every_verdict_is_had() -> None:
    Counting.verdicts = 0
    result = simulate(Experiment(named(Counting), TRAFFIC))
    assert Counting.verdicts == np.sum(result.requests["rounds"])


@pytest.mark.parametrize("arch", ["colocated", "pd", "pdv"])
def test_a_learning_controller_decides_the_same_in_blocks(arch: str) -> None:
    """After every round it is told the verdict and asked for the next draft length, which changes on the way."""
    server = Server(controller="goodput", num_speculative_tokens=1)
    experiment = Experiment(arch, TRAFFIC, server=server)
    at_once, one_by_one = simulate(experiment), simulate(experiment, blocks=False)
    check_alike(at_once, one_by_one)
    drafts = at_once.launches["steps"][at_once.launches["kind"] == KINDS.index("draft")]
    assert len(np.unique(drafts)) > 1
