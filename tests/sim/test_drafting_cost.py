"""What drafting costs an engine besides its kernels: one price, in simulations, formulas and the choice of k."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdvsim.decide.formula import Formula
from pdvsim.sim.assembly import ServerParts
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.engines.profiles import engine_profile
from pdvsim.sim.prices.profile import Profile
from pdvsim.sim.run import simulate

ROUND_S, DRAFT_S = 3e-3, 5e-4
LENGTHS = range(9)
K = 3


def served(k: int, rate: float = 0.7, clients: int = 1, engine: str = "vllm") -> Experiment:
    """Llama-3.1-8B with its EAGLE-3 head on an H100."""
    traffic = Traffic("random", num_prompts=4 * clients, max_concurrency=clients, input_len=100, output_len=200)
    hardware = Hardware("h100-sxm", engine=engine, band=False)
    server = Server("eagle3-llama-3.1-8b:llama-3.1-8b", num_speculative_tokens=k)
    return Experiment("colocated", traffic, Acceptance(rate) if k else Acceptance(), server, hardware)


def profile(experiment: Experiment, round_s: float, draft_s: float) -> Profile:
    """The engine's profile with other costs of drafting."""
    own = engine_profile(experiment.hardware.predicted_engine, "h100-sxm")
    step = replace(own.step, round_s=round_s, draft_s=draft_s)
    return replace(own, step=step).covering(experiment.pair)


def formula(experiment: Experiment, round_s: float, draft_s: float) -> Formula:
    result = Formula(experiment)
    result.__dict__["planner"] = ServerParts(experiment, profile(experiment, round_s, draft_s)).planner
    return result


@pytest.mark.parametrize("rows", [1, 16, 200])
def test_a_verify_takes_a_round_more_and_a_draft_each_of_its_forwards(rows: int) -> None:
    experiment = served(K)
    free, paid = (profile(experiment, *cost) for cost in ((0.0, 0.0), (ROUND_S, DRAFT_S)))
    for width, more_s in ((1, 0.0), (2, ROUND_S), (K + 1, ROUND_S), (40, ROUND_S)):
        target = [one.cost_model(experiment.pair.target).price(rows, width).seconds_0 for one in (free, paid)]
        assert target[1] - target[0] == pytest.approx(more_s, abs=1e-9)
    for steps in (1, 2, 7):
        draft = [one.cost_model(experiment.pair.draft).price(rows, 2, steps).seconds_0 for one in (free, paid)]
        assert draft[1] - draft[0] == pytest.approx(steps * DRAFT_S, abs=1e-9)


@pytest.mark.parametrize("clients", [1, 8])
def test_simulation_and_formula_pay_the_same_per_round(clients: int) -> None:
    """A run takes longer by its rounds times their cost, and by the drafter's prefills; a round of the formula too."""
    experiment = served(K, clients=clients)
    free, paid = (simulate(experiment, profile=profile(experiment, *cost)) for cost in ((0, 0), (ROUND_S, DRAFT_S)))
    for run in (free, paid):
        assert len(run.requests["id"]) == 4 * clients
    kind = np.asarray(paid.launches["kind"])
    drafts, steps = kind == KINDS.index("draft"), np.asarray(paid.launches["steps"])
    wide = np.isin(kind, [KINDS.index("verify"), KINDS.index("decode")]) & (np.asarray(paid.launches["width"]) > 1)
    assert drafts.sum() == wide.sum() > 0
    if clients == 1:  # the same rounds, one after the other
        spent_s = DRAFT_S * steps[drafts].sum() + ROUND_S * wide.sum()
        prefills_s = 4 * DRAFT_S
        more_s = paid.requests["finish_s"].max() - free.requests["finish_s"].max()
        assert more_s == pytest.approx(spent_s + prefills_s, rel=0.01)
    by_formula = [formula(experiment, *cost).round_s(clients, K) for cost in ((0.0, 0.0), (ROUND_S, DRAFT_S))]
    assert by_formula[1] - by_formula[0] == pytest.approx(ROUND_S + K * DRAFT_S, rel=1e-6)


def test_drafts_are_no_longer_where_each_costs_more() -> None:
    """Draft lengths by formula for one request: with the shipped cost per forward, at most those without."""
    step = engine_profile("vllm", "h100-sxm").step
    chosen = []
    for rate in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        experiment = served(K, rate)
        costs = ((step.round_s, 0.0), (step.round_s, step.draft_s), (step.round_s, 2 * step.draft_s + 1e-3))
        chosen.append([formula(experiment, *cost).ranked(LENGTHS)[0].k for cost in costs])
    assert all(lengths == sorted(lengths, reverse=True) for lengths in chosen)
    assert any(free > dear for free, _, dear in chosen)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_search_that_finds_nothing_costs_no_round(engine: str) -> None:
    """n-gram drafts of one request: rounds without a draft are plain, in simulation and formula."""
    hardware = Hardware("h100-sxm", engine=engine, band=False)
    server = Server("ngram:llama-3.1-8b", num_speculative_tokens=K)
    experiment = replace(served(K), acceptance=Acceptance(0.3), server=server, hardware=hardware)
    run = simulate(experiment)
    kind = np.asarray(run.launches["kind"])
    assert (kind == KINDS.index("decode")).sum() > 0
    assert (kind == KINDS.index("verify")).sum() > 0
    decode_s = (run.requests["finish_s"] - run.requests["first_token_s"]).sum()
    predicted = Formula(experiment)
    rounds = np.isin(kind, [KINDS.index("verify"), KINDS.index("decode")]).sum()
    assert decode_s / rounds == pytest.approx(predicted.round_s(1, K), rel=0.03)
