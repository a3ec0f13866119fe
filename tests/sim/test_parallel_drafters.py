"""Drafters that make all their draft tokens in one forward: its price, and what follows for the best draft length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.models.presets import drafted_by, drafter, model, pair

KINDS = ("pard", "p-eagle", "dflash")
TARGETS = {"pard": "llama-3.1-8b", "p-eagle": "gpt-oss-120b", "dflash": "qwen3-8b"}


def asked(kind: str, k: int = 4, **hardware: Any) -> Experiment:
    server = Server(drafted_by(kind, TARGETS[kind]), k)  # type: ignore[arg-type]
    return Experiment(
        "colocated", Traffic(max_concurrency=4, num_prompts=40), server=server, hardware=Hardware(**hardware)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("gpu", "rows"), [("h200", 1), ("h200", 16), ("h100-sxm", 4)])
def test_a_draft_costs_one_forward_of_as_many_tokens_and_not_as_many_forwards(kind: str, gpu: str, rows: int) -> None:
    """Its price is that of one forward of the model as a target, with logits of the drafts alone."""
    experiment = asked(kind, gpu=gpu)
    spec = experiment.pair.draft
    profile = covering_profile(experiment)
    latency, chain = profile.cost_model(spec), profile.cost_model(replace(spec, parallel=False))
    for k in (2, 4, 8):
        one, many = latency.price(rows, 1, k), chain.price(rows, 1, k)
        forward = chain.price(rows, k, 1)
        assert one.bytes_0 == pytest.approx(forward.bytes_0)
        assert one.seconds_0 == pytest.approx(forward.seconds_0, rel=0.15)  # a head as target has fewer logits
        assert one.seconds_0 < 0.8 * many.seconds_0
        assert one.flops_0 < latency.price(rows, 1, k + 1).flops_0
        assert one.flops_0 < latency.price(rows, 3, k).flops_0  # two accepted tokens are read again


def test_parallel_heads_are_as_published() -> None:
    head = drafter("p-eagle", model("gpt-oss-120b"))
    assert head.is_head
    assert (head.layers, head.parallel, head.rereads, head.fused_inputs) == (4, True, True, 3 * 2880)
    (first, [one, *_]), (others, [later, *_]) = head.layer_kinds
    assert (first, one[0], others, later[0]) == (1, 2 * 2880, 3, 2880)
    block = drafter("dflash", model("qwen3-8b"))
    assert (block.layers, block.vocab, block.fused_inputs) == (5, model("qwen3-8b").vocab, 5 * 4096)
    assert pair("pard-llama-3.2-1b:llama-3.1-8b").draft == replace(model("llama-3.2-1b"), parallel=True)
