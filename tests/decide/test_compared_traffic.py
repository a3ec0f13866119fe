"""The traffic of a decision: loads of each kind, lengths that vary, and traces scaled to each rate."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pdvsim
from pdvsim.bench.inputs import checked
from pdvsim.bench.length import length_of
from pdvsim.cli.advise import AdviseCommand
from pdvsim.cli.capacity import CapacityCommand
from pdvsim.cli.drafting import DraftTableCommand
from pdvsim.cli.map import MapCommand
from pdvsim.common.options import build
from pdvsim.decide.advice import Advice
from pdvsim.decide.figures import flips_figure
from pdvsim.decide.fleet import ARCHS
from pdvsim.decide.options import SPREAD, VariedOptions
from pdvsim.decide.report import lengths_note, replay_note
from pdvsim.decide.runs import Bench, at_load, at_rate, load_of, load_words, saturated, shortened
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.metrics.steady import FILL, LEAST_LOOP
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import Workload

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
    assert advice.capacity is None
    flips = advice.flips[-1]
    assert flips.axis == "concurrency"
    assert set(flips.probes) >= {1.0, 4.0, 16.0}
    assert len(flips_figure(advice).axes) == len(advice.flips)


def test_a_batch_job_is_for_the_time_to_finish() -> None:
    """All of it counts: no warm-up, and tokens per second times the time are the job's tokens, on every seed."""
    advice = batch()
    best = advice.recommended
    assert best.scoring.warmup_requests == 0
    for row in advice.rows:
        assert row["completed"] == 96
        assert row["output_throughput"] * row["duration"] == pytest.approx(row["total_output_tokens"])
    figures = {name: [row["duration"] for row in rows] for name, rows in advice.finals.rows.items()}
    assert min(figures, key=lambda name: sum(figures[name])) == advice.finals.contest.best
    assert advice.flips[-1].axis == "requests"
    assert best.server.max_num_seqs == 64  # 96 concurrent requests do not wait for batches of 8


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
    sizes = {}
    for words, traffic in kinds.items():
        whole = Bench(1).sized(Experiment(traffic=traffic))
        assert length_of(shortened(whole, 0.25)).start == length_of(whole).start  # a short run is as warm as a long one
        sizes[words] = shortened(whole, 0.25).traffic.num_prompts
    assert sizes["concurrency 8"] == FILL * 8 + LEAST_LOOP // 2
    assert sizes["a batch of 700 requests"] == 512


def test_on_several_gpus_everyone_who_can_draft_competes() -> None:
    options = {"pair": "llama-3.1-8b", "gpus": 2, "request_rate": 4}
    served, question = (build(AdviseCommand, options | more).question() for more in ({}, {"engine": "pdvsim"}))
    archs = {fleet.name.removeprefix("2x ").split()[0] for fleet in served.fleets}
    assert archs == {"autoregressive", "colocated", "pd"}, "what vLLM can serve"
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


SHORT: dict[str, Any] = {"dataset_name": "random", "input_len": 128, "output_len": 128}


def bases(**traffic: Any) -> list[Experiment]:
    """What each command that decides simulates."""
    return [
        build(AdviseCommand, {"request_rate": 5.0, **traffic}).question().base,
        build(CapacityCommand, {"goodput": "ttft:500", **traffic}).question().base,
        build(MapCommand, traffic).question().base,
        build(MapCommand, {"gpus": 2, **traffic}).question().base,
        build(DraftTableCommand, traffic).question().base,
    ]


def test_every_decision_varies_lengths_that_are_given() -> None:
    assert {base.traffic.random_range_ratio for base in bases(**SHORT)} == {SPREAD}
    assert {base.traffic.random_range_ratio for base in bases(output_len=200)} == {SPREAD}
    assert {base.traffic.random_range_ratio for base in bases(**SHORT, random_range_ratio=0.0)} == {0.0}
    assert {base.traffic.random_range_ratio for base in bases(**SHORT | {"output_len": 1})} == {0.0}  # never two
    assert {base.traffic.random_range_ratio for base in bases()} == {0.0}  # ShareGPT's own vary


def test_the_output_says_how_lengths_vary() -> None:
    notes = {lengths_note(base.traffic)[0] for base in bases(**SHORT)}
    assert [re.findall(r"\d+%?|--[a-z-]+", note) for note in notes] == [["128", "128", "30%", "--random-range-ratio"]]
    assert "all equal" in lengths_note(Traffic(**SHORT))[0]
    assert lengths_note(Traffic()) == []


@pytest.mark.parametrize("prompt", [1900, 1948])
def test_what_fits_a_context_with_equal_lengths_is_not_refused(prompt: int) -> None:
    """TinyLlama's ends at 2048: the longest request takes as much of it as there is, and no more."""

    def options(**server: str) -> VariedOptions:
        return build(VariedOptions, SHORT | {"num_prompts": 400, "input_len": prompt, "output_len": 100} | server)

    small = options(pair="tinyllama-1.1b:llama-2-7b")
    asked = small.varied_traffic()
    assert asked.random_range_ratio == (0.02 if prompt == 1900 else 0.0)
    checked(Experiment("pdv", asked, server=small.server))
    assert Workload(asked, Acceptance()).largest().prompt_tokens >= prompt
    assert options(pair="llama-3.2-1b:llama-3.1-8b").varied_traffic().random_range_ratio == SPREAD
    assert small.varied_traffic("gemma-2b:gemma-7b").random_range_ratio == SPREAD
    head = options(model="llama-3.1-8b", drafter="eagle3")
    assert head.server.pair == "eagle3-llama-3.1-8b:llama-3.1-8b"
    assert head.varied_traffic().random_range_ratio == SPREAD


def test_a_given_length_varies_around_itself_and_leaves_the_other_alone() -> None:
    own = Workload(Traffic(num_prompts=5000), Acceptance()).lengths
    traffic = Traffic(num_prompts=5000, output_len=200, random_range_ratio=0.3)
    varied = Workload(traffic, Acceptance()).lengths
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
    """One draft token at 64: +4.1% however far lengths vary, +8.7% where all are equal and plain decoding waits."""
    decided = build(MapCommand, SHORT).question().base.traffic
    assert gain(decided) == pytest.approx(gain(replace(decided, random_range_ratio=0.9)), abs=0.02)
    assert gain(replace(decided, random_range_ratio=0.0)) > 1.5 * gain(decided)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """400 requests of 100 and 10 tokens in bursts, 5 per second."""
    gaps = np.random.default_rng(0).gamma(0.4, 1 / (0.4 * 5), 399)
    times = np.concatenate([[0], np.cumsum(gaps / gaps.mean() / 5)])
    path = tmp_path_factory.mktemp("traces") / "mine.csv"
    rows = (f"{time},100,10" for time in times)
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return str(path)


def test_advice_is_for_the_rate_of_the_trace_if_none_is_given(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    def asked(**given: object) -> Traffic:
        return build(AdviseCommand, {"dataset_path": trace} | given).question().base.traffic

    for given in ({}, {"use_trace_timestamps": True}):
        traffic = asked(**given)
        assert traffic.request_rate == pytest.approx(5)
        assert traffic.use_trace_timestamps
        assert re.search(rf"{re.escape(trace)} .* 5 requests", capsys.readouterr().err)
    for given in ({}, {"use_trace_timestamps": True}):
        scaled = asked(request_rate=20.0, **given)
        assert (scaled.request_rate, scaled.use_trace_timestamps, scaled.num_prompts) == (20, True, 400)
        assert scaled.window == "by-seed"
    assert asked(request_rate=20.0, num_prompts=70).num_prompts == 70
    for other in ({"use_trace_timestamps": False}, {"burstiness": 0.5}):
        sampled = asked(request_rate=20.0, **other)
        assert (sampled.use_trace_timestamps, sampled.num_prompts, sampled.window) == (
            False,
            Traffic.usual_prompts,
            "all",
        )
    assert not asked(concurrency=4).use_trace_timestamps
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="--request-rate, not --concurrency"):
        asked(concurrency=4, use_trace_timestamps=True)


def test_a_short_log_is_repeated_whole(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at},{10 + at},5\n" for at in range(7)))
    question = build(AdviseCommand, {"dataset_path": str(path)}).question()
    assert question.base.traffic.num_prompts == 57 * 7  # about 400
    plan = build(CapacityCommand, {"dataset_path": str(path), "goodput": ["ttft:500"]}).question()
    assert plan.base.traffic.num_prompts == 57 * 7
    assert plan.base.traffic.use_trace_timestamps
    [note] = replay_note(question.base.traffic)
    assert re.search("short.csv .* 57 times", note)


def test_a_map_of_a_trace_is_around_its_own_rate(trace: str, tmp_path: Path) -> None:
    file, replayed = {"dataset_path": trace}, {"dataset_path": trace, "use_trace_timestamps": True}
    grid = build(MapCommand, replayed).question()
    assert grid == build(MapCommand, file).question()
    assert not build(MapCommand, file | {"concurrency": 1}).question().request_rate
    assert grid.request_rate == (2.5, 5, 10, 20)
    assert all(run.traffic.use_trace_timestamps for run in grid.experiments())
    assert build(MapCommand, replayed | {"request_rate": 3.0}).question().request_rate == (3.0,)
    with pytest.raises(ValueError, match="--request-rate, not --concurrency"):
        build(MapCommand, replayed | {"concurrency": 1}).question()
    untimed = tmp_path / "untimed.csv"
    untimed.write_text("prompt_tokens,output_tokens\n10,5\n")
    with pytest.raises(ValueError, match=r"untimed\.csv .* arrival"):
        build(MapCommand, replayed | {"dataset_path": str(untimed)}).question()


def test_what_has_no_rate_takes_the_lengths_alone(trace: str) -> None:
    traffic = Traffic(dataset_path=trace, use_trace_timestamps=True, request_rate=5.0)
    for run in (saturated(Experiment(traffic=traffic)), at_rate(Experiment(traffic=traffic), float("inf"))):
        assert not run.traffic.use_trace_timestamps


def test_all_drafters_get_the_same_requests(tmp_path: Path) -> None:
    """A head's context is its target's, 4096, and that of the natural draft model 2048."""
    path = tmp_path / "long.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,3000,5\n1,100,5\n2,200,5\n")
    question = build(AdviseCommand, {"dataset_path": str(path), "model": "llama-2-7b"}).question()
    ways = [one.of(question.base) for one in question.contenders]
    assert {way.context for way in ways} == {2048, 4096}
    assert {way.traffic.longest_request for way in ways} == {2048}
