"""Adaptive verification in decisions: where it competes, and the commands that deploy it."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from pdvsim.common.options import build
from pdvsim.decide.deploy import deployment
from pdvsim.decide.options import DecisionOptions
from pdvsim.decide.space import ADAPTIVE, ADAPTIVE_LENGTH, complexity, settings_text
from pdvsim.sim.config import Experiment, Server

HEAD: dict[str, Any] = {"pair": "llama-3.1-8b", "drafter": "eagle3"}


def served(**more: Any) -> Experiment:
    return Experiment("colocated", server=Server(**HEAD | {"controller": ADAPTIVE, "num_speculative_tokens": 7} | more))


@pytest.mark.parametrize(
    ("server", "competes"),
    [
        (HEAD, True),
        ({"pair": "pard-llama-3.2-1b:llama-3.1-8b"}, True),
        ({}, False),  # a draft model would draft k tokens in every step, one forward each
        (HEAD | {"controller": "goodput"}, False),
        (HEAD | {"num_speculative_tokens": 4}, False),
    ],
)
def test_it_competes_where_drafts_are_cheap_and_nothing_else_is_asked(server: dict[str, Any], competes: bool) -> None:
    asked = build(DecisionOptions, server)
    space = asked.space(("colocated", "pdv"))
    colocated, pdv = (Experiment(arch, server=asked.server) for arch in ("colocated", "pdv"))
    tried = [way.server for way in space.others(colocated, "controller") if way.server.controller == ADAPTIVE]
    assert [way.num_speculative_tokens for way in tried] == [ADAPTIVE_LENGTH] * competes
    assert not any(way.server.controller == ADAPTIVE for way in space.others(pdv, "controller"))


def test_it_is_tried_where_it_is_asked_for() -> None:
    asked = build(DecisionOptions, HEAD | {"controller": ADAPTIVE})
    for arch in ("colocated", "pdv"):
        ways = asked.space((arch,)).others(Experiment(arch, server=served().server), "controller")
        assert {(way.server.controller, way.server.num_speculative_tokens) for way in ways} == {(ADAPTIVE, 8)}


def test_a_fixed_length_is_simpler() -> None:
    fixed, adaptive = served(controller="fixed"), served()
    assert complexity(fixed, fixed) < complexity(adaptive, fixed)
    assert settings_text(adaptive)[0] == "k=7 adaptive-verification"


def command(experiment: Experiment, label: str) -> str:
    [text] = [block.text for block in deployment(experiment) if block.label.startswith(label)]
    return text


@pytest.mark.parametrize(("context_len", "environment"), [(8192, []), (0, []), (65_536, ["65536"])])
def test_the_vllm_command_enables_it(context_len: int, environment: list[str]) -> None:
    words = shlex.split(command(served(adaptive_verification_profile_context_len=context_len), "vLLM"))
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["enable_adaptive_verification"] is True
    assert config["num_speculative_tokens"] == 7
    name = "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN="
    assert [word.removeprefix(name) for word in words if word.startswith(name)] == environment
    assert words[: words.index("vllm")] == ["VLLM_USE_V2_MODEL_RUNNER=1", *(f"{name}{value}" for value in environment)]
    plain = shlex.split(command(served(controller="fixed"), "vLLM"))
    assert "enable_adaptive_verification" not in plain[plain.index("--speculative-config") + 1]


def test_other_commands_say_what_they_do() -> None:
    blocks = {block.label.partition(" ")[0]: block for block in deployment(served())}
    assert not blocks["SGLang"].text
    assert "adaptive verification" in blocks["SGLang"].notes[0]
    for label in ("pdvsim", "realrun"):
        assert f"--controller {ADAPTIVE}" in blocks[label].text
