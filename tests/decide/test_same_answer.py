"""Advice, maps and comparisons name the same settings and the same figures; so does capacity."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import pdvsim
from pdvsim.cli import main
from pdvsim.cli.advise import AdviseOptions
from pdvsim.cli.build import build
from pdvsim.cli.capacity import CapacityOptions
from pdvsim.cli.compare import CompareOptions
from pdvsim.cli.map import MapOptions
from pdvsim.decide.space import settings_text
from pdvsim.sim.config import Server

H200, A100 = "h200", "a100-80gb"
QUESTIONS: dict[str, dict[str, Any]] = {
    "no levels": {
        "pair": "tinyllama-1.1b:llama-2-7b", "gpu": H200, "arch": ["autoregressive", "colocated", "pd"],
        "request_rate": 30, "input_len": 64, "output_len": 12,
    },
    "long prompts": {
        "pair": "gemma-2b:gemma-7b", "gpu": A100, "arch": ["autoregressive", "colocated", "pd"],
        "request_rate": 8, "goodput": ["ttft:400", "tpot:60"], "input_len": 900, "output_len": 16,
    },
    "levels": {
        "pair": "llama-3.2-1b:llama-3.1-8b", "gpu": A100, "arch": ["colocated", "pdv"],
        "request_rate": 12, "goodput": ["ttft:300", "tpot:30"], "input_len": 128, "output_len": 24, "max_num_seqs": 64,
    },
}  # fmt: skip


@pytest.mark.usefixtures("quick_plots")
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_same_question_has_the_same_answer(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the last bit: who is taken, with which settings, by which lead."""
    ask = QUESTIONS[name] | {"dataset_name": "random", "num_prompts": 60, "jobs": 1}
    rate = ask.pop("request_rate")
    advice = pdvsim.advise(**ask, request_rate=rate)
    [cell] = pdvsim.winner_map(**ask, request_rate=[rate], acceptances=[0.6]).cells
    argv = [f"--request-rate={rate}", f"--pairs={ask.pop('pair')}", f"--gpus={ask.pop('gpu')}"]
    for option, value in ask.items():
        text = map(str, value) if isinstance(value, list) else [str(value)]
        argv += [f"--{option.replace('_', '-')}", *([",".join(text)] if option == "arch" else text)]
    assert main(["compare", *argv, "--json", "-o", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    [compared] = document["best"]
    assert advice.recommended is not None
    assert advice.held is not None
    assert cell.contest is not None
    assert advice.recommended.arch == cell.winner == compared["arch"]
    shown = {entry["arch"]: entry["settings"] for entry in document["summary"]}
    for candidate in advice.finals:
        assert candidate.server == cell.settings[candidate.arch].server
        assert shown[candidate.arch] == ", ".join(settings_text(candidate))
    assert advice.held.values == cell.contest.values
    assert advice.held.leads == cell.contest.leads
    figures = {arch: value["mean"] for arch, value in compared["contest"]["values"].items()}
    assert figures == {arch: value.mean for arch, value in advice.held.values.items()}
    assert {entry["replications"] for entry in document["summary"]} == {advice.held.seeds}


def test_capacity_holds_what_advice_says_it_does() -> None:
    """Asked about the settings that were recommended, on as many requests as it takes by itself."""
    ask = QUESTIONS["long prompts"] | {"dataset_name": "random", "jobs": 1}
    advice = pdvsim.advise(**ask, num_prompts=60)
    del ask["request_rate"]
    best = advice.recommended
    assert best is not None
    assert advice.capacity is not None
    opened = ("num_speculative_tokens", "controller", "max_num_seqs", "max_num_batched_tokens")
    given = {name: getattr(best.server, name) for name in opened if best.speculates or name.startswith("max")}
    found = pdvsim.capacity(**ask | {"arch": [best.arch]}, **given)
    assert [row["rate"] for row in found.rows] == [row["rate"] for row in advice.capacity.rows]


def test_what_is_asked_by_default_is_the_same() -> None:
    """As many requests at a rate, the same warm-up, seeds, indifference and settings to try."""
    asks = [
        build(AdviseOptions, {"request_rate": 4}).question().base.traffic.num_prompts,
        build(MapOptions, {"request_rate": [4]}).grid().base.traffic.num_prompts,
        build(CompareOptions, {"request_rate": [4]}).comparison().base.traffic.num_prompts,
    ]
    assert len(set(asks)) == 1
    assert build(MapOptions, {}).grid().base.traffic.num_prompts == 200  # closed loops scatter less
    for name in ("num_runs", "warmup_share", "indifference", "attainment", "server", "acceptance", "host"):
        given = [
            getattr(options(), name) for options in (AdviseOptions, MapOptions, CompareOptions, CapacityOptions)
            if name in {field.name for field in fields(options)}
        ]  # fmt: skip
        if name == "server":
            assert len({server.given() for server in given}) == 1
            assert given[0].given() == Server()
        else:
            assert all(value == given[0] for value in given)
