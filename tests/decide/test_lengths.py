"""Lengths of what is decided on: those that are given vary, since equal ones keep the requests of a loop in step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdvsim.cli.advise import AdviseOptions
from pdvsim.cli.capacity import CapacityOptions
from pdvsim.cli.draft_table import DraftTableOptions
from pdvsim.cli.map import MapOptions
from pdvsim.decide.options import SPREAD, TunedServer, VariedTraffic
from pdvsim.decide.report import lengths_note
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Scoring, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import Workload
from pdvsim.study.inputs import checked

SHORT: dict[str, Any] = {"dataset_name": "random", "input_len": 128, "output_len": 128}
GOODPUT = Scoring(goodput=("ttft:500",))


def bases(**traffic: Any) -> list[Experiment]:
    """What each command that decides simulates."""
    return [
        AdviseOptions(request_rate=5.0, traffic=VariedTraffic(**traffic)).question().base,
        CapacityOptions(traffic=VariedTraffic(**traffic), scoring=GOODPUT).plan().base,
        MapOptions(traffic=VariedTraffic(**traffic)).grid().base,
        MapOptions(traffic=VariedTraffic(**traffic), gpus=2).grid().base,
        DraftTableOptions(traffic=VariedTraffic(**traffic)).question().base,
    ]


def test_every_decision_varies_lengths_that_are_given() -> None:
    assert {base.traffic.random_range_ratio for base in bases(**SHORT)} == {SPREAD}
    assert {base.traffic.random_range_ratio for base in bases(output_len=200)} == {SPREAD}
    assert {base.traffic.random_range_ratio for base in bases(**SHORT, random_range_ratio=0.0)} == {0.0}
    assert {base.traffic.random_range_ratio for base in bases(**SHORT | {"output_len": 1})} == {0.0}  # never two
    assert {base.traffic.random_range_ratio for base in bases()} == {0.0}  # ShareGPT's own vary


def test_the_output_says_how_lengths_vary() -> None:
    said = {lengths_note(base.traffic)[0] for base in bases(**SHORT)}
    assert said == {"lengths: random 128 tokens in, 128 out ±30% (--random-range-ratio)"}
    assert "all equal" in lengths_note(Traffic(**SHORT))[0]
    assert lengths_note(Traffic()) == []


@pytest.mark.parametrize("prompt", [1900, 1948])
def test_what_fits_a_context_with_equal_lengths_is_not_refused(prompt: int) -> None:
    """TinyLlama's ends at 2048: the longest request takes as much of it as there is, and no more."""
    traffic = VariedTraffic("random", num_prompts=400, input_len=prompt, output_len=100)
    server = Server("tinyllama-1.1b:llama-2-7b")
    asked = traffic.asked(500, server)
    assert asked.random_range_ratio == (0.02 if prompt == 1900 else 0.0)
    assert checked(Experiment("pdv", asked, server=server)).largest().prompt_tokens >= prompt
    assert traffic.asked(500, Server("llama-3.2-1b:llama-3.1-8b")).random_range_ratio == SPREAD
    assert traffic.asked(500, server, "gemma-2b:gemma-7b").random_range_ratio == SPREAD
    assert TunedServer("llama-3.1-8b", drafter="eagle3").given().pair == "eagle3-llama-3.1-8b:llama-3.1-8b"
    assert traffic.asked(500, TunedServer("llama-3.1-8b", drafter="eagle3").given()).random_range_ratio == SPREAD


def test_a_given_length_varies_around_itself_and_leaves_the_other_alone() -> None:
    own = np.concatenate(list(Workload(Traffic(num_prompts=5000), Acceptance()).lengths()))
    for chunk in (300, 4096):
        traffic = Traffic(num_prompts=5000, output_len=200, random_range_ratio=0.3)
        varied = np.concatenate(list(Workload(traffic, Acceptance(), chunk).lengths()))
        assert np.array_equal(varied[:, 0], own[:, 0])
        assert (varied[:, 1].min(), varied[:, 1].max()) == (140, 260)
        assert varied[:, 1].mean() == pytest.approx(200, abs=2)


def gain(traffic: Traffic) -> float:
    """Of one draft token over plain decoding, at 64 concurrent requests."""
    rates = []
    for arch, k in (("colocated", 1), ("autoregressive", Server.num_speculative_tokens)):
        traffic = replace(traffic, max_concurrency=64, num_prompts=320)
        server, hardware = Server(num_speculative_tokens=k), Hardware(band=False)
        experiment = Experiment(arch, traffic, server=server, hardware=hardware)
        scoring = replace(experiment.scoring, warmup_requests=64)
        rates.append(summarise(simulate(replace(experiment, scoring=scoring)))["output_throughput"])
    return float(rates[0] / rates[1] - 1)


def test_a_lead_does_not_rest_on_requests_that_run_in_step() -> None:
    """One draft token at 64: +6.5% however far lengths vary, +14% where all are equal and plain decoding waits."""
    decided = MapOptions(traffic=VariedTraffic(**SHORT)).grid().base.traffic
    assert gain(decided) == pytest.approx(gain(replace(decided, random_range_ratio=0.9)), abs=0.02)
    assert gain(replace(decided, random_range_ratio=0.0)) > gain(decided) + 0.05
