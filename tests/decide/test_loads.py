"""Advice for a closed loop and for a batch job, and on several GPUs who should draft."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import pdvsim
from pdvsim.cli.advise import AdviseOptions
from pdvsim.common.options import build
from pdvsim.decide.advice import Advice
from pdvsim.decide.figures import flips_figure
from pdvsim.decide.fleet import ARCHS
from pdvsim.decide.runs import at_load, least_prompts, load_of, load_words
from pdvsim.sim.config import Experiment, Traffic

FEW: dict[str, Any] = {
    "arch": ["autoregressive", "colocated"], "dataset_name": "random", "input_len": 64, "output_len": 24, "jobs": 1,
    "controller": "fixed", "max_num_seqs": 64, "num_runs": 2, "max_num_batched_tokens": 2048, "budget": 400,
}  # fmt: skip


@cache
def loop() -> Advice:
    return pdvsim.advise(concurrency=4, **FEW)


@cache
def batch() -> Advice:
    return pdvsim.advise(num_prompts=96, **FEW)


def test_a_closed_loop_has_so_many_outstanding_and_is_for_throughput() -> None:
    advice = loop()
    assert advice.question.goal.objective == "throughput"
    assert {row["max_concurrent_requests"] for row in advice.rows} == {4}
    assert "at concurrency 4" in str(advice)
    assert advice.capacity is None
    [flips, *_] = advice.flips
    assert flips.axis == "concurrency"
    assert set(flips.probes) >= {2.0, 4.0, 8.0}
    assert len(flips_figure(advice).axes) == len(advice.flips)


def test_a_batch_job_is_for_the_time_to_finish() -> None:
    """All of it counts: no warm-up, and tokens per second times the time are the job's tokens, on every seed."""
    advice = batch()
    text, best = str(advice), advice.recommended
    assert best is not None
    assert best.scoring.warmup_requests == 0
    assert "at a batch of 96 requests" in text
    assert "Time to finish (s)" in text
    for row in advice.rows:
        assert row["completed"] == 96
        assert row["output_throughput"] * row["duration"] == pytest.approx(row["total_output_tokens"])
    figures = {str(c.arch): [row["duration"] for row in rows] for c, rows in advice.finals.items()}
    assert advice.held is not None
    assert min(figures, key=lambda name: sum(figures[name])) == advice.held.best
    assert advice.flips[0].axis == "requests"
    assert best.server.max_num_seqs == 64  # 96 at once do not wait for batches of 8


def test_a_load_of_each_kind_is_moved_on_its_own_axis() -> None:
    kinds = {
        "12 req/s": Traffic(request_rate=12.0, num_prompts=500),
        "concurrency 8": Traffic(max_concurrency=8, num_prompts=200),
        "a batch of 700 requests": Traffic(num_prompts=700),
    }
    for words, traffic in kinds.items():
        here = Experiment(traffic=traffic)
        assert load_words(traffic) == words
        assert at_load(here, load_of(traffic)) == here
        twice = at_load(here, 2 * load_of(traffic)).traffic
        assert load_of(twice) == 2 * load_of(traffic)
        assert re.sub("[0-9]+", "", load_words(twice)) == re.sub("[0-9]+", "", words)
    assert at_load(Experiment(traffic=kinds["concurrency 8"]), 100).traffic.num_prompts == 400
    assert least_prompts(kinds["12 req/s"], 125) == 125
    assert least_prompts(kinds["concurrency 8"], 10) == 16
    assert least_prompts(kinds["a batch of 700 requests"], 175) == 512


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "give --request-rate, --concurrency, or --num-prompts alone"),
        (["--request-rate", "3", "--concurrency", "2"], "give one of --request-rate and --concurrency"),
        (["--num-prompts", "30", "--warmup-share", "0.1"], "--warmup-share has no effect for a batch job"),
        (["--concurrency", "0"], "concurrency must be 1 to"),
    ],
)
def test_a_load_that_is_none_is_one_line(refused: Callable[..., str], flags: list[str], says: str) -> None:
    assert says in refused(["advise", *flags])


def test_on_several_gpus_everyone_who_can_draft_competes() -> None:
    options = {"pair": "llama-3.1-8b", "gpus": 2, "request_rate": 4}
    question = build(AdviseOptions, options).question()
    names = {fleet.name for fleet in question.fleets}
    assert {"2x autoregressive", "autoregressive tp2", "2x colocated with eagle3", "colocated tp2 with ngram"} <= names
    assert "pdv-ahead on 1+1 with llama-3.2-1b" in names
    assert len(names) == len(question.fleets)
    for fleet in question.fleets:
        mine = fleet.of(question.base)
        assert question.name(mine) == fleet.name
        assert mine.arch in ARCHS
        if "eagle3" in fleet.name:
            assert mine.acceptance.acceptance_model == "sharegpt-eagle3"
        if "llama-3.2-1b" in fleet.name:
            assert mine.acceptance.by_rate
