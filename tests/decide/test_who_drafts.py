"""A model alone: who may draft for it, and advice that compares them."""

from __future__ import annotations

import json

import pytest

from pdvsim.cli import main
from pdvsim.decide.drafters import Drafted, acceptance_text, drafters
from pdvsim.sim.config import Acceptance, Experiment, Server, Traffic

ARCHS = ("autoregressive", "colocated", "pdv")


@pytest.mark.parametrize(
    ("target", "pair"),
    [
        ("llama-3.1-8b", "llama-3.2-1b:llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.2-1b:llama-3.3-70b"),
        ("gemma-7b", "gemma-2b:gemma-7b"),
        ("qwen3-8b", "eagle3-qwen3-8b:qwen3-8b"),  # no smaller one of its tokens is known
        ("tinyllama-1.1b", "eagle3-tinyllama-1.1b:tinyllama-1.1b"),
    ],
)
def test_a_target_alone_has_its_natural_drafter(target: str, pair: str) -> None:
    assert Server(target).pair == pair


def test_a_draft_model_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(ValueError, match="no preset drafts for qwen3-8b; write --pair draft:target"):
        Server("qwen3-8b", drafter="model")


def test_everyone_competes_once_in_each_architecture() -> None:
    base = Experiment("colocated", Traffic(), server=Server("llama-3.1-8b"))
    ways = drafters(base, "llama-3.1-8b", ARCHS, None)
    drafting = [f"{arch} with {who}" for who in ("llama-3.2-1b", "eagle3", "ngram") for arch in ARCHS[1:]]
    assert {way.name for way in ways} == {"autoregressive", *drafting}
    assert len(ways) == 7
    for way in ways:
        assert Drafted.named(way.of(base)) == way.name


def test_acceptance_is_recorded_or_said_to_be_assumed() -> None:
    base = Experiment("colocated", Traffic("random", input_len=128), server=Server("llama-3.1-8b"))
    texts = {acceptance_text(way) for way in drafters(base, "llama-3.1-8b", ARCHS, None)}
    assert texts == {
        "llama-3.2-1b: 0.6, assumed",
        "eagle3: recorded with Llama-3.1-8B, sharegpt-eagle3",
        "ngram: recorded with Llama-3.1-8B, sharegpt-ngram",
    }
    mine = drafters(base, "llama-3.1-8b", ARCHS, Acceptance(0.7))
    assert {acceptance_text(way).partition(": ")[2] for way in mine} == {"0.7, as given"}


def test_advice_on_a_model_names_the_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--arch", "autoregressive,colocated", "--request-rate", "8", "--num-prompts", "40", "--budget", "90"]
    assert main(["advise", "--model", "llama-3.1-8b", *asked, "--num-runs", "2", "--jobs", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    finalists = {one["described"].partition(",")[0] for one in document["finalists"]}
    assert "autoregressive" in finalists
    assert finalists <= {"autoregressive", *(f"colocated with {who}" for who in ("llama-3.2-1b", "eagle3", "ngram"))}
    assert len(finalists) > 1
