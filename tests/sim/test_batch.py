"""A batch whose rounds are fast-forwarded is a batch like any other, to a policy that reads or changes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import Chunk
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.machine.kv import KvCache
from pdvsim.sim.machine.paths import path_of
from pdvsim.sim.policies import named
from pdvsim.sim.policies.base import Process
from pdvsim.sim.policies.colocated import Colocated
from pdvsim.sim.policies.hybrid import Adaptive
from pdvsim.sim.policies.pd import PD
from pdvsim.sim.policies.pdv import PDV
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.options import Acceptance
from pdvsim.sim.workload.requests import make_requests
from pdvsim.testing import check_alike, check_counts

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


@pytest.mark.parametrize(("policy", "hardware"), [(Curious, Hardware()), (Curious, SCARCE), (Restless, Hardware())])
def test_reading_or_reordering_rows_gives_the_same_run(policy: type[Colocated], hardware: Hardware) -> None:
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
    check_counts(at_once, requests["output_tokens"].tolist(), requests["arrival_s"].tolist())
    assert hardware is not SCARCE or requests["preemptions"].sum() > 0


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


class OwnVerdict:
    """Mixed in, not derived from a policy."""

    def settle(self, rows: Batch, verdict: Sequence[int]) -> Batch:
        return super().settle(rows, verdict)  # type: ignore[misc, no-any-return]


@pytest.mark.parametrize(("bases", "own", "asked"), [
    ((Colocated,), {}, "on change"),
    ((Colocated,), {"admits": Colocated.admits}, "while waiting"),
    ((Colocated,), {"admits": Colocated.admits, "verify": Colocated.verify}, "every round"),
    ((Colocated,), {"asked": "on change", "verify": Colocated.verify}, "on change"),
    ((OwnVerdict, Colocated), {}, "every round"),
    ((PDV,), {}, "on change"),
    ((PDV,), {"gathers": PDV.gathers}, "every round"),
    ((Adaptive,), {}, "every round"),
])  # fmt: skip
def test_a_policy_is_asked_as_often_as_its_own_methods_need(
    bases: tuple[type, ...], own: dict[str, object], asked: str
) -> None:
    assert type("Mine", bases, dict(own)).asked == asked  # type: ignore[attr-defined]


@pytest.mark.parametrize("acceptance", [Acceptance(0.7), Acceptance(synthetic_acceptance_rates=(0.8, 0.3))])
@pytest.mark.parametrize("rereads", [False, True])
@pytest.mark.parametrize("k", [1, 4])
def test_rounds_are_the_same_whether_worked_out_together_or_one_by_one(
    acceptance: Acceptance, rereads: bool, k: int
) -> None:
    requests = make_requests(Traffic(num_prompts=300), acceptance)
    kv = KvCache(1 << 20, k, paged=True)
    for request in requests:
        request.state.emitted, request.state.context = 1, request.prompt_tokens
        together, first, last = path_of(request, k, rereads, kv)
        request.drawn = None
        alone, _, rounds = path_of(request, k, rereads, kv)
        if request.output_tokens > 1:
            assert together.gains[first:last] == alone.gains
            assert len(alone.gains) == rounds
            assert np.array_equal(together.contexts[first : last + 1], alone.contexts)
            assert np.array_equal(together.held[first:last], alone.held[:rounds])
            assert np.array_equal(together.lags[first:last], alone.lags)
