"""Advice and maps name the same settings and the same figures; so does capacity."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

import pdvsim
from pdvsim.cli.advise import AdviseOptions
from pdvsim.cli.capacity import CapacityOptions
from pdvsim.cli.map import MapOptions
from pdvsim.common.options import build
from pdvsim.decide.hazards import CLOSE
from pdvsim.sim.config import Server

LEVELS: dict[str, Any] = {
    "pair": "gemma-2b:gemma-7b", "gpu": "a100-80gb", "arch": ["autoregressive", "colocated"],
    "goodput": ["ttft:400", "tpot:60"], "dataset_name": "random", "input_len": 500, "output_len": 8, "jobs": 1,
    "request_rate": 8, "controller": "fixed", "num_runs": 2,
}  # fmt: skip
QUESTIONS: dict[str, dict[str, Any]] = {
    "levels": LEVELS,
    "no levels": LEVELS | {
        "pair": "tinyllama-1.1b:llama-2-7b", "gpu": "h200", "goodput": [], "input_len": 64, "request_rate": 30,
        "output_len": 16, "arch": ["colocated", "pdv"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_same_question_has_the_same_answer(name: str) -> None:
    """To the last bit: who is taken, with which settings, by which lead; and capacity, as closely, what advice says."""
    ask = QUESTIONS[name] | {"num_prompts": 60}
    advice = pdvsim.advise(**ask, budget=200)  # enough for all but the flips
    [cell] = (winner_map := pdvsim.winner_map(**ask | {"request_rate": [ask["request_rate"]]}, acceptances=[0.6])).cells
    best = advice.recommended
    assert best is not None
    assert advice.held is not None
    assert cell.contest is not None
    assert best.arch == cell.winner
    for candidate in advice.finals:
        assert candidate.server == cell.settings[candidate.arch].server
    assert advice.held.values == cell.contest.values
    assert advice.held.leads == cell.contest.leads
    assert len(winner_map.rows) == sum(map(len, advice.finals.values()))
    if advice.capacity is None:
        return
    del ask["request_rate"], ask["num_prompts"]  # capacity takes as many requests as it needs by itself
    opened = ("num_speculative_tokens", "controller", "max_num_seqs", "max_num_batched_tokens")
    given = {name: getattr(best.server, name) for name in opened if best.speculates or name.startswith("max")}
    held = pdvsim.capacity(**ask | {"arch": [best.arch]}, **given, tolerance=CLOSE)
    assert [row["rate"] for row in held.rows] == [row["rate"] for row in advice.capacity.rows]


def test_what_is_asked_by_default_is_the_same() -> None:
    """As many requests at a rate, the same warm-up, seeds, indifference and settings to try."""
    asked = build(AdviseOptions, {"request_rate": 4}).question().base.traffic.num_prompts
    assert asked == build(MapOptions, {"request_rate": [4]}).grid().base.traffic.num_prompts
    assert build(MapOptions, {}).grid().base.traffic.num_prompts == 200  # closed loops scatter less
    for name in ("num_runs", "warmup_share", "indifference", "attainment", "server", "acceptance", "host"):
        given = [
            getattr(options(), name) for options in (AdviseOptions, MapOptions, CapacityOptions)
            if name in {field.name for field in fields(options)}
        ]  # fmt: skip
        if name == "server":
            assert {server.given() for server in given} == {Server()}
        else:
            assert all(value == given[0] for value in given)
