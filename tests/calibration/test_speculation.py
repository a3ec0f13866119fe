"""Measured pairs of servers, without and with speculation: what they say, and how near predictions come."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pdvsim.calibration.validate.speculation import (
    FIGURES,
    SIDES,
    PredictedPair,
    best_lengths,
    has_sign,
    joined,
    predicted,
    rates_of,
    read_pairs,
)
from pdvsim.decide.error import gain_note
from pdvsim.sim.config import Experiment, Hardware, Server
from pdvsim.sim.engines.vllm import VLLM

PAIRS = read_pairs()


def test_pairs_have_settings_and_sources() -> None:
    """Every pair can be simulated, its ratio is that of its figures, and a third is held out."""
    assert len(PAIRS) >= 430
    assert 0.25 < sum(pair.held_out for pair in PAIRS) / len(PAIRS) < 0.4
    for pair in PAIRS:
        assert pair.source
        assert pair.drafted.experiment.longest_draft > 0 == pair.drafted.without.experiment.longest_draft
        side, other = SIDES if pair.of_tpot else SIDES[::-1]
        name = FIGURES[0] if pair.of_tpot else FIGURES[1]
        ratio = pair.measured[f"{name}_{side}"] / pair.measured[f"{name}_{other}"]
        assert math.isnan(ratio) or pair.measured["speedup"] == pytest.approx(ratio, rel=0.02)


def test_an_acceptance_length_is_met_at_any_draft_length() -> None:
    for length, k in ((1.6, 1), (2.4, 3), (3.9, 7), (5.0, 4)):
        assert 1 + sum(rates_of(length, k)) == pytest.approx(length, abs=0.01)


def test_a_tree_without_branches_is_a_chain() -> None:
    """And a wider one, at the same acceptance length, gains less."""
    chain = next(p for p in PAIRS if "qwen3-30b-a3b" in p.drafted.experiment.server.pair and not p.drafted.topk)
    trees = [
        chain.drafted._replace(topk=topk, verified_tokens=tokens)
        for topk, tokens in ((1, chain.drafted.experiment.longest_draft + 1), (4, 60))
    ]
    plain, narrow, wide = (
        predicted(chain._replace(drafted=side)).predicted["speedup"] for side in (chain.drafted, *trees)
    )
    assert narrow == pytest.approx(plain)
    assert wide < 0.95 * plain


@pytest.mark.parametrize(
    ("method", "median", "signs"), [("model", 0.15, 1.0), ("ngram", 0.15, 0.75), ("eagle3", 0.1, 0.9)]
)
def test_ratios_of_a_method_are_near_on_pairs_held_out(method: str, median: float, signs: float) -> None:
    """On vLLM, of at most 12 pairs at low concurrency; those of a slow host are left out (`data/h200/vllm`)."""
    pairs = [
        pair
        for pair in PAIRS
        if pair.held_out and pair.method == method and pair.drafted.experiment.hardware.engine == "vllm"
        if pair.drafted.experiment.traffic.max_concurrency <= 8 and "h200/vllm" not in pair.source
    ]
    predictions = [predicted(pair) for pair in pairs[:: max(1, len(pairs) // 12)]]
    assert np.median([abs(one.errors["speedup"]) for one in predictions]) < median
    assert np.mean([has_sign(one) for one in predictions]) >= signs


def test_the_loss_of_a_draft_length_is_that_of_its_measured_speed() -> None:
    one = next(pair for pair in PAIRS if pair.drafted.experiment.longest_draft == 1)

    def at(k: int, measured: float, foreseen: float) -> PredictedPair:
        server = replace(one.drafted.experiment.server, num_speculative_tokens=k)
        drafted = one.drafted._replace(experiment=replace(one.drafted.experiment, server=server))
        pair = one._replace(drafted=drafted, measured=one.measured | {"speedup": measured}, of_tpot=True)
        return joined(pair, ((foreseen, 1.0), (1.0, 1.0)))

    [choice] = best_lengths([at(1, 1.5, 1.4), at(2, 2.0, 1.6), at(3, 1.8, 1.7)])
    assert (choice["measured"], choice["predicted"]) == (2, 3)
    assert choice["loss"] == pytest.approx(0.1)


def test_a_gain_within_the_error_of_its_method_has_no_certain_sign() -> None:
    hardware, server = Hardware("h100-sxm", engine="vllm"), Server("eagle3-llama-3.1-8b:llama-3.1-8b")
    notes = [gain_note(Experiment(server=server, hardware=hardware), [gain])[0] for gain in (0.5, 1.05, 2.0)]
    assert ["not certain" in note for note in notes] == [False, True, False]


def test_drafters_that_end_asynchronous_scheduling() -> None:
    """As vLLM 0.22.1's log says; its price is that of a plain server without it."""
    plain, sync = VLLM.serving("0.22.1", "none", None), VLLM.serving("0.22.1", "none", asynchronous=False)
    assert sync.step_s - plain.step_s == pytest.approx(plain.sync_s)
    for kind in ("model", "ngram"):
        assert VLLM.serving("0.22.1", kind, None).step_s == sync.step_s  # type: ignore[arg-type]
        assert not VLLM.can_schedule(kind, asynchronous=True)  # type: ignore[arg-type]
    assert VLLM.serving("0.22.1", "eagle3", None).step_s == plain.step_s
    assert VLLM.serving("0.10.2", "model", None).step_s == VLLM.era("0.10.2").step.step_s
