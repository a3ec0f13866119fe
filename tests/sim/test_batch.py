"""A batch whose rounds pass at once is a list of requests like any other, to a policy that reads or changes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pdvsim.sim.config import Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import KINDS, Chunk, Request
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

    def __init__(self, *args: object) -> None:
        self.seen: list[tuple[float, tuple[tuple[int, ...], ...]]] = []
        super().__init__(*args)  # type: ignore[arg-type]

    def next_chunks(self, budget: int) -> tuple[Chunk, ...]:
        rows = tuple(
            (row.id, row.state.emitted, row.state.context, row.state.drafter_lag, row.taken.rounds, row.taken.accepted)
            for row in self.running
        )
        self.seen.append((self.env.now, rows))
        return super().next_chunks(budget)


class Restless(PD):
    """Changes the order of its rows in every way that a list allows, which is of no consequence."""

    def decode_worker(self) -> Process:
        rows: list[Request] = []
        turn = 0
        while True:
            rows += self.decode.take(self.settings.round_batch - len(rows))
            if not rows:
                yield self.decode.wait()
                continue
            turn += 1
            if turn % 5 == 0:
                rows.reverse()
            elif turn % 5 == 1:
                rows.append(rows.pop(0))
            elif turn % 5 == 2:
                rows.sort(key=lambda row: row.state.context)
            elif turn % 5 == 3:
                last = rows[-1]
                rows.remove(last)
                rows.insert(0, last)
            else:
                rows[:] = rows[1:] + rows[:1]
            k = self.controller.draft_length(rows, 0, self.env.now)
            rows = self.hold(rows, k)
            if rows:
                rows = yield from self.rounds(rows, k)


class Counting(PDV):
    """Has a say in every verdict, so it must be asked for each."""

    verdicts = 0

    def settle(self, rows: list[Request], verdict: Sequence[int]) -> list[Request]:
        Counting.verdicts += len(verdict)
        assert all(0 <= accepted <= row.state.k for row, accepted in zip(rows, verdict, strict=True))
        return super().settle(rows, verdict)


@pytest.mark.parametrize(("policy", "hardware"), [(Curious, Hardware()), (Curious, SCARCE), (Restless, Hardware())])
def test_whoever_looks_or_changes_the_list_gets_the_same_run(policy: type[Colocated], hardware: Hardware) -> None:
    experiment = Experiment(named(policy), TRAFFIC, server=Server(num_speculative_tokens=3), hardware=hardware)
    at_once, one_by_one = simulate(experiment), simulate(experiment, blocks=False)
    check_alike(at_once, one_by_one)
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
        def next_chunks(self, budget: int) -> tuple[Chunk, ...]:
            nonlocal asked
            asked += 1
            return super().next_chunks(budget)

    class Step(Asked):
        def hold(self, rows: list[Request], k: int) -> list[Request]:
            return super().hold(rows, k)

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
