"""Verifies of rows with unequal numbers of drafts: adaptive verification on the real engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_serving import MACHINE, experiment, launched_shapes, serve_and_compare

from pdvsim.realrun.engine.buckets import ROW_BUCKETS, packed_size, packed_sizes
from pdvsim.realrun.site import serve
from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.policies import verification
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

ARCHS: tuple[Arch, ...] = ("baseline", "colocated", "pd", "pdv-unified")


def adaptive(arch: Arch, **server: Any) -> Experiment:
    return experiment(arch, controller="adaptive-verification", num_speculative_tokens=5, **server)


def ragged(result: Result) -> int:
    """Verifies whose rows do not all have as many tokens."""
    launches = result.launches
    verifies = (launches["role"] == 1) & (launches["width"] == 6) & (launches["prompt_start"] == 0)
    return int((launches["tokens"][verifies] < 6 * launches["rows"][verifies]).sum())


@pytest.fixture
def random_widths(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Estimates at random and a budget at random: every mixture of widths occurs, none included."""

    def reset() -> None:
        rng = np.random.default_rng(7)
        monkeypatch.setattr(
            verification.AdaptiveVerification, "estimates", lambda self, rows, k: rng.random((len(rows), k))
        )
        monkeypatch.setattr(
            verification, "best_budget", lambda scores, sure, costs_s: int(rng.integers(len(scores) + 1))
        )

    reset()
    return reset


@pytest.mark.parametrize(("arch", "noise"), [*((arch, 0.2) for arch in ARCHS), ("pdv", 0.0)])
@pytest.mark.usefixtures("random_widths")
def test_unequal_widths_change_no_token(arch: Arch, noise: float) -> None:
    """Each request reads as if it had been alone, whichever of its drafts are verified."""
    result = serve_and_compare(adaptive(arch), noise, output_len=15)
    assert ragged(result) > 3
    accepted, drafted = result.requests["accepted"].sum(), result.requests["drafted"].sum()
    assert accepted == drafted if noise == 0 else accepted < drafted


@pytest.mark.usefixtures("random_widths")
def test_unequal_widths_of_early_drafts_change_no_token() -> None:
    assert ragged(serve_and_compare(adaptive("colocated", async_scheduling=True), output_len=25)) > 3


def test_both_clocks_have_the_same_launches(random_widths: Callable[[], None]) -> None:
    chosen = adaptive("colocated", max_num_seqs=9, max_num_batched_tokens=256)
    chosen = replace(
        chosen, traffic=replace(chosen.traffic, input_len=12, num_prompts=24, request_rate=math.inf, output_len=30)
    )
    real = serve(chosen, MACHINE)
    random_widths()
    simulated = simulate(chosen)
    assert ragged(real) > 3
    for name in ("kind", "role", "rows", "tokens", "steps", "width", "context", "prompt_start"):
        np.testing.assert_array_equal(real.launches[name], simulated.launches[name], name)


@pytest.mark.usefixtures("random_widths")
def test_every_ragged_launch_finds_its_graph_prepared() -> None:
    chosen = adaptive("colocated", max_num_batched_tokens=150)
    chosen = replace(chosen, traffic=replace(chosen.traffic, input_len=150, output_len=12, num_prompts=12))
    [(launched, prepared)] = [both for (_, role), both in launched_shapes(chosen).items() if role == "target"]
    assert launched <= prepared
    assert {shape.packed > 0 for shape in launched if shape.chunk} == {False, True}


def test_the_simulator_pads_as_the_engine_does() -> None:
    """Wherever the engine packs, the layers of both compute as many tokens."""
    terms = ForwardTerms(row_buckets=ROW_BUCKETS)
    for rows in ROW_BUCKETS:
        sizes = packed_sizes(rows, 8)
        for tokens in range(rows, 8 * rows + 1):
            size = packed_size(rows, 8, tokens)
            assert (size or 8 * rows) >= tokens
            assert not size or (size in sizes and size == terms.padded_packed(rows, tokens))


@pytest.mark.parametrize("arch", ["colocated", "pdv"])
def test_a_table_with_0_in_it_changes_no_token(arch: Arch) -> None:
    """At draft length 0 the drafter drafts a token that is not verified, and continues from there later."""
    table = experiment(arch, controller="table", num_speculative_tokens_per_batch_size=("1:3", "2:0", "4:2"))
    result = serve_and_compare(table, output_len=25)
    verifies = (result.launches["role"] == 1) & (result.launches["rows"] > 0)
    assert {1, 4} <= set(result.launches["width"][verifies].tolist())
