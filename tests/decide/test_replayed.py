"""Traces in decisions: they are the load of advise, capacity and map, scaled in time to each rate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdvsim.cli.advise import AdviseOptions
from pdvsim.cli.map import MapOptions
from pdvsim.common.options import build
from pdvsim.decide.options import TunedServer, VariedTraffic
from pdvsim.decide.runs import at_rate, saturated
from pdvsim.sim.config import Experiment, Traffic


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
        return build(AdviseOptions, {"dataset_path": trace} | given).question().base.traffic

    for given in ({}, {"use_trace_timestamps": True}):
        traffic = asked(**given)
        assert traffic.request_rate == pytest.approx(5)
        assert traffic.use_trace_timestamps
        assert f"{trace} is replayed at its own rate of 5 requests per second" in capsys.readouterr().err
    assert not asked(request_rate=20.0).use_trace_timestamps
    scaled = asked(request_rate=20.0, use_trace_timestamps=True)
    assert (scaled.request_rate, scaled.use_trace_timestamps, scaled.num_prompts) == (20, True, 500)
    assert capsys.readouterr().err == ""


def test_a_map_of_a_trace_is_around_its_own_rate(trace: str, tmp_path: Path) -> None:
    traffic = VariedTraffic(dataset_path=trace, use_trace_timestamps=True)
    grid = MapOptions(traffic=traffic).grid()
    assert grid.request_rate == (2.5, 5, 10, 20)
    assert all(run.traffic.use_trace_timestamps for run in grid.experiments())
    assert MapOptions(traffic=traffic, request_rate=(3.0,)).grid().request_rate == (3.0,)
    with pytest.raises(ValueError, match="give --request-rate, not --concurrency"):
        MapOptions(traffic=traffic, concurrency=(1,)).grid()
    untimed = tmp_path / "untimed.csv"
    untimed.write_text("prompt_tokens,output_tokens\n10,5\n")
    with pytest.raises(ValueError, match=r"untimed\.csv has no arrival times to replay"):
        MapOptions(traffic=VariedTraffic(dataset_path=str(untimed), use_trace_timestamps=True)).grid()


def test_what_has_no_rate_takes_the_lengths_alone(trace: str) -> None:
    traffic = Traffic(dataset_path=trace, use_trace_timestamps=True, request_rate=5.0)
    for run in (saturated(Experiment(traffic=traffic)), at_rate(Experiment(traffic=traffic), float("inf"))):
        assert not run.traffic.use_trace_timestamps


def test_all_drafters_get_the_same_requests(tmp_path: Path) -> None:
    """A head's context is its target's, 4096, and that of the natural draft model 2048."""
    path = tmp_path / "long.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,3000,5\n1,100,5\n2,200,5\n")
    question = AdviseOptions(traffic=VariedTraffic(dataset_path=str(path)), server=TunedServer("llama-2-7b")).question()
    ways = [way.of(question.base) for way in question.ways]
    assert {way.context for way in ways} == {2048, 4096}
    assert {way.traffic.longest_request for way in ways} == {2048}
