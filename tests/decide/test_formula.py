"""Draft lengths by formula: its rounds are those of the answers, and what it finds promising holds the best."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdvsim.decide.formula import Formula
from pdvsim.decide.space import PROMISING, Space
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.acceptance import expected_tokens

LENGTHS = Space.draft_lengths
LLAMA, QWEN = "tinyllama-1.1b:llama-2-7b", "qwen2-1.5b:qwen2-7b"
TRAFFIC = Traffic("random", num_prompts=300, input_len=64, output_len=150, max_concurrency=8)


def at(acceptance: float, arch: Arch = "colocated", pair: str = LLAMA, traffic: Traffic = TRAFFIC) -> Formula:
    return Formula(Experiment(arch, traffic, Acceptance(acceptance_rate=acceptance), Server(pair=pair)))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_tokens_a_round_are_leviathans(rate: float) -> None:
    """At a constant acceptance a round of k drafts yields (1 - a^(k+1)) / (1 - a) tokens in the mean (2023, eq. 1)."""
    formula = at(rate)
    for k in LENGTHS:
        assert formula.tokens_per_round(k) == pytest.approx(expected_tokens(rate, k), rel=0.02)
    assert formula.acceptance == pytest.approx(rate, abs=0.01)


@given(rates=st.lists(st.floats(0, 1), min_size=2, max_size=4, unique=True), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_more_acceptance_or_more_drafts_never_yield_less(rates: list[float], seed: int) -> None:
    """The same coins against a higher threshold: position by position at least as many drafts pass."""
    traffic = replace(TRAFFIC, num_prompts=20, seed=seed)
    yields = [[at(rate, traffic=traffic).tokens_per_round(k) for k in LENGTHS] for rate in sorted(rates)]
    for less, more in pairwise(yields):
        assert all(a <= b for a, b in zip(less, more, strict=True))
    for mine in yields:
        assert all(a <= b for a, b in pairwise(mine))
        assert mine[0] == 1


@pytest.mark.parametrize("rate", [0.3, 0.9])
def test_rounds_are_those_of_the_answers(rate: float) -> None:
    """Counted answer by answer: the first token comes with the prompt, and the last round may yield too many."""
    formula = at(rate)
    for k in LENGTHS:
        counted = 0
        for request in formula.requests:
            position = 1
            while position < request.output_tokens:
                position += 1 + min(request.accept_runs[position], k)
                counted += 1
        assert formula.rounds(k) == pytest.approx(counted / len(formula.requests), rel=0.01)


@pytest.mark.parametrize("concurrency", [1, 8, 64])
def test_the_better_the_drafter_the_longer_its_drafts(concurrency: int) -> None:
    traffic = replace(TRAFFIC, max_concurrency=concurrency)
    best = [at(rate, traffic=traffic).ranked(LENGTHS)[0].k for rate in (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)]
    assert best == sorted(best)
    assert best[0] == 0


def test_what_a_closed_loop_does_not_reach_is_not_kept_up_with() -> None:
    """Between half and twice the rate at which 64 concurrent requests leave: Little's law, with a batch limit of 64."""
    server = Server(max_num_seqs=64, num_speculative_tokens=2)
    loop = Experiment("colocated", replace(TRAFFIC, max_concurrency=64), server=server)
    per_s = Formula(loop).at(2).tokens_per_s / Formula(loop).output_tokens
    for share, keeps_up in ((0.5, True), (2.0, False)):
        open_loop = replace(loop.traffic, max_concurrency=None, request_rate=share * per_s)
        predicted = Formula(replace(loop, traffic=open_loop)).at(2)
        assert predicted.keeps_up is keeps_up
        if keeps_up:  # Little: those there are those who come, times how long each takes
            assert predicted.rows == pytest.approx(
                share * per_s * predicted.seconds_per_token * loop.traffic.output_len
            )


@pytest.mark.parametrize(("pair", "arch"), [(LLAMA, "colocated"), (LLAMA, "pdv"), (QWEN, "pd"), (QWEN, "pdv")])
def test_the_most_promising_hold_the_best_by_simulation(pair: str, arch: Arch) -> None:
    """Within 1%, over loads (closed loops, and 10 per second) and acceptance rates."""
    for load in (1, 8, 10.0):
        closed = isinstance(load, int)
        traffic = Traffic("random", num_prompts=max(12, 4 * int(load)), input_len=64, output_len=96)
        traffic = replace(traffic, max_concurrency=load) if closed else replace(traffic, request_rate=load)
        for rate in (0.3, 0.6, 0.9):
            experiment = Experiment(arch, traffic, Acceptance(acceptance_rate=rate), Server(pair=pair))
            name = "output_throughput" if closed else "mean_e2el_ms"
            rows = {
                k: summarise(
                    simulate(applicable(replace(experiment, server=Server(pair=pair, num_speculative_tokens=k))))
                )
                for k in LENGTHS
            }
            speed = {k: row[name] if closed else 1 / row[name] for k, row in rows.items()}
            promising = [p.k for p in Formula(experiment).ranked(LENGTHS)[:PROMISING]]
            best = max(speed[k] for k in promising)
            assert best >= 0.99 * max(speed.values()), (load, rate, promising, speed)


def test_a_drafter_that_leaves_no_room_for_the_batch_is_not_promising() -> None:
    """A 7B drafter with a 34B target, on as much memory as an 80 GB card has: without it many times as many fit."""
    traffic = Traffic("random", num_prompts=64, input_len=256, output_len=256, max_concurrency=32)
    hardware = Hardware(gpu_memory_utilization=0.55)
    pair = Server(pair="llama-2-7b:codellama-34b")
    little = Formula(Experiment("colocated", traffic, Acceptance(acceptance_rate=0.8), pair, hardware))
    assert little.fits(0) > 4 * little.fits(1) > 0
    assert little.ranked(LENGTHS)[0].k == 0
    assert Formula(replace(little.experiment, hardware=Hardware())).ranked(LENGTHS)[0].k > 0


@pytest.mark.parametrize("answers", [True, False])
def test_cached_prefixes_are_not_prefilled(answers: bool) -> None:
    """The cached tokens are those of a run without evictions; an answer on another GPU is not cached."""
    traffic = Traffic(
        "random", num_prompts=200, request_rate=8.0, prefix_len=2000, input_len=100, output_len=40, num_turns=4
    )
    hardware = Hardware() if answers else Hardware(place=("prefill=1",))
    experiment = Experiment("pd", traffic, hardware=hardware)
    formula, run = Formula(experiment), simulate(experiment).requests
    assert formula.cached_tokens == pytest.approx(run["num_cached_tokens"].mean(), rel=0.01)
    off = replace(experiment, server=replace(experiment.server, enable_prefix_caching=False))
    assert Formula(off).cached_tokens == 0
    assert formula.prompt_s(2) < 0.3 * Formula(off).prompt_s(2)
