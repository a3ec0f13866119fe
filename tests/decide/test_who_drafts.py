"""A model alone: who may draft for it, and advice that compares them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pdvsim
from pdvsim.decide.fleet import drafters
from pdvsim.decide.runs import Bench, without_band
from pdvsim.sim.config import Acceptance, Experiment, Server, Traffic
from pdvsim.study.sweep import Point, run_point

ARCHS = ("autoregressive", "colocated", "pdv")
FIGURES = ("output_throughput", "mean_ttft_ms", "mean_e2el_ms", "foundation", "total_output_tokens")


@pytest.mark.parametrize(
    ("target", "pair"),
    [
        ("llama-3.1-8b", "llama-3.2-1b:llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.2-1b:llama-3.3-70b"),
        ("gemma-7b", "gemma-2b:gemma-7b"),
        ("qwen3-8b", "qwen3-0.6b:qwen3-8b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-0.6b:qwen3-30b-a3b"),
        ("qwen3-30b-a3b-fp8", "qwen3-0.6b:qwen3-30b-a3b-fp8"),
        ("gpt-oss-120b", "eagle3-gpt-oss-120b:gpt-oss-120b"),  # the 20b takes as many weights per token, but for 30%
        ("mixtral-8x7b", "eagle3-mixtral-8x7b:mixtral-8x7b"),  # no smaller one of its tokens is known
        ("tinyllama-1.1b", "eagle3-tinyllama-1.1b:tinyllama-1.1b"),
    ],
)
def test_a_target_alone_has_its_natural_drafter(target: str, pair: str) -> None:
    assert Server(target).pair == pair


def test_a_draft_model_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(ValueError, match="no preset drafts for mixtral-8x7b; write --pair draft:target"):
        Server("mixtral-8x7b", drafter="model")


def test_everyone_competes_once_in_each_architecture() -> None:
    base = Experiment("colocated", Traffic(), server=Server("llama-3.1-8b"))
    ways = drafters(base, "llama-3.1-8b", ARCHS, None)
    drafting = [f"{arch} with {who}" for who in ("llama-3.2-1b", "eagle3", "ngram") for arch in ARCHS[1:]]
    assert {way.name for way in ways} == {"autoregressive", *drafting}
    assert len(ways) == 7
    for way in ways:
        assert way.named(way.of(base)) == way.name


def test_acceptance_is_recorded_or_said_to_be_assumed() -> None:
    base = Experiment("colocated", Traffic("random", input_len=128), server=Server("llama-3.1-8b"))
    texts = {way.acceptance_text for way in drafters(base, "llama-3.1-8b", ARCHS, None)}
    assert texts == {
        "llama-3.2-1b: 0.6, assumed",
        "eagle3: recorded with Llama-3.1-8B, sharegpt-eagle3",
        "ngram: recorded with Llama-3.1-8B, sharegpt-ngram",
    }
    mine = drafters(base, "llama-3.1-8b", ARCHS, Acceptance(0.7))
    assert {way.acceptance_text.partition(": ")[2] for way in mine} == {"0.7, as given"}


def test_what_drafts_nothing_is_simulated_once_for_all_drafters() -> None:
    """Each row is the one of a bench of its own, under the name of its own pair."""
    traffic = Traffic("random", num_prompts=8, input_len=32, output_len=8, request_rate=20.0)
    pairs = ("llama-3.2-1b:llama-3.1-8b", "eagle3-llama-3.1-8b:llama-3.1-8b")
    servers = [Server(pair, num_speculative_tokens=k) for pair in pairs for k in (0, 2)]
    runs = [Experiment("colocated", traffic, server=server) for server in servers]
    bench = Bench(1)
    rows = bench.rows(runs)
    assert bench.runs == 3
    assert [row["pair"] for row in rows] == [run.server.pair for run in runs]
    for run, row in zip(runs, rows, strict=True):
        alone = run_point(0, Point("request_rate", 20.0, 0, without_band(run)))
        assert {name: row[name] for name in FIGURES} == {name: alone[name] for name in FIGURES}


def test_an_assumed_acceptance_is_noted_for_its_drafter_and_only_where_it_decides() -> None:
    load = {"request_rate": 8, "num_prompts": 40, "num_runs": 2, "budget": 90, "jobs": 1}
    advice = pdvsim.advise(model="llama-3.1-8b", arch=["autoregressive", "colocated"], **load)
    assert advice.held is not None
    note = "note: acceptance 0.6 is assumed for llama-3.2-1b:"
    finalists = {advice.question.name(c): c for c in advice.finals}
    noted = {}
    for name, candidate in finalists.items():
        alone = replace(advice, recommended=candidate, held=replace(advice.held, best=name, alike=()))
        noted[name] = note in str(alone).partition("Expected\n")[0]
    assert noted == {name: "eagle3" not in name and "ngram" not in name for name in finalists}
    assert {"autoregressive", "colocated with eagle3", "colocated with llama-3.2-1b"} <= set(noted)
    eagle3 = finalists["colocated with eagle3"]
    tie = replace(advice.held, best="colocated with eagle3", alike=("colocated with llama-3.2-1b",))
    assert note in str(replace(advice, recommended=eagle3, held=tie)).partition("Expected\n")[0]
