"""A live session: the requests and records of an ordinary run, however it is driven; turned, nothing is lost."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from pdvsim.live.crew import Crew
from pdvsim.live.gauge import KEPT_S, SLOT_S, Gauge
from pdvsim.live.knobs import BURST, DROP_S, Knobs, Setup
from pdvsim.live.pace import Feed
from pdvsim.live.session import GaugedStations, Session, replay
from pdvsim.live.station import Station
from pdvsim.sim.config import Experiment, Hardware, Scoring, Server, Traffic
from pdvsim.sim.hardware.profile import builtin
from pdvsim.sim.metrics.summary import latencies_s
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.records import LANES, Columns
from pdvsim.sim.run import simulate
from pdvsim.testing import check_alike

BASE = Experiment(traffic=Traffic(request_rate=20.0, seed=3), server=Server(num_speculative_tokens=3))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_session_left_alone_is_an_ordinary_run(arch: str) -> None:
    """The same requests and the same rows, with and without a trace."""
    setup = Setup((arch,), BASE if arch != "autoregressive" else replace(BASE, server=Server()))
    [(result, _)] = replay(setup, [], 4.0, 0.0)
    assert len(result.requests["id"]) > 40
    check_alike(result, simulate(result.experiment))
    [(traced, tail)] = replay(setup, [], 2.5, 0.5)
    again = simulate(traced.experiment, traced=True)
    check_alike(traced, again)
    assert again.carried is not None
    assert tail.carried is not None
    assert 0 < len(tail.carried) < len(again.carried)
    assert list(again.carried)[-len(tail.carried) :] == list(tail.carried)
    assert len(tail.launches["kind"]) == len(tail.carried)
    assert (tail.launches["start_s"] < 2.0).sum() <= 4  # under way at the cut


def gauged(session: Session) -> list[tuple[Station, Gauge]]:
    assert isinstance(session.fleet, GaugedStations)
    return session.fleet.gauged()


def driven(rng: np.random.Generator, setup: Setup) -> Session:
    """A session of 6 s in random steps, with everything done to it."""
    session, acts = Session(setup), iter(["turn", "burst", "drop", "drafts", "controller"])
    for at_s in (0.7, 1.33, 2.0, 3.1, 4.4, 6.0):
        while session.now_s < at_s:
            session.advance(min(at_s, session.now_s + float(rng.uniform(0.001, 0.4))))
        knobs, act = session.knobs, next(acts, "")
        if act == "burst":
            session.burst()
        elif act == "drop":
            session.drop()
        elif act == "turn":
            session.turn(replace(knobs, request_rate=40.0, input_len=300, output_len=60, max_num_seqs=16))
        elif act == "drafts":
            session.turn(replace(knobs, num_speculative_tokens=0, max_num_batched_tokens=512))
        elif act == "controller":
            session.turn(replace(knobs, controller="goodput", acceptance_rate=0.9, dataset_name="random"))
    return session


def test_a_session_is_a_function_of_its_tape() -> None:
    """However it was driven: run again, it has the same rows, and the page has shown no others."""
    setup = Setup(("pdv", "colocated", "pd", "autoregressive"), BASE)
    sessions = [driven(np.random.default_rng(seed), setup) for seed in (1, 2)]
    assert sessions[0].tape == sessions[1].tape
    assert len(sessions[0].tape) == 5
    kept = [result for result, _ in replay(setup, sessions[0].tape, 6.0, 0.0)]
    for session in sessions:
        for (_, gauge), result in zip(gauged(session), kept, strict=True):
            assert gauge.total_tokens == result.deliveries["tokens"][result.deliveries["time_s"] <= 6.0].sum()
            assert gauge.total_finished == (result.requests["finish_s"] <= 6.0).sum()
    arrivals = [result.requests["prompt_tokens"] for result in kept]
    assert all(np.array_equal(arrivals[0], other) for other in arrivals)  # the same requests everywhere
    for result in kept:
        req = result.requests
        served = np.bincount(result.deliveries["request"], result.deliveries["tokens"], len(req["id"]))
        assert np.array_equal(served, req["output_tokens"])


def test_figures_agree_with_the_records() -> None:
    setup = Setup(("pdv", "colocated"), replace(BASE, scoring=Scoring(goodput=("ttft:60", "tpot:9"))))
    session = Session(setup)
    session.advance(8.0)
    for figures, (result, _) in zip(session.figures(KEPT_S), replay(setup, [], 8.0, 0.0), strict=True):
        req = result.requests
        done = req["finish_s"] <= 8.0
        finished = {name: column[done] for name, column in req.items()}
        early = {name: column[result.deliveries["time_s"] <= 8.0] for name, column in dict(result.deliveries).items()}
        exact = latencies_s(finished, _of(early, finished["id"]), 0)
        for name in ("tpot", "e2el"):
            assert figures["marks_ms"][name] == pytest.approx(1e3 * np.percentile(exact[name], (50, 95, 99)))
        first_s = req["first_token_s"]
        came = (first_s >= 0) & (first_s <= 8.0)
        ttft_s = (first_s - req["arrival_s"])[came]
        assert figures["marks_ms"]["ttft"] == pytest.approx(1e3 * np.percentile(ttft_s, (50, 95, 99)))
        assert figures["tokens_per_s"] * 8.0 == pytest.approx(early["tokens"].sum())
        assert figures["requests_per_s"] * 8.0 == pytest.approx(done.sum())
        in_time = (finished["first_token_s"] - finished["arrival_s"] <= 0.06) & (
            (finished["finish_s"] - finished["first_token_s"]) / (finished["output_tokens"] - 1).clip(1) <= 0.009
        )
        assert figures["goodput_per_s"] * 8.0 == pytest.approx(in_time.sum())
        assert figures["attainment"] == pytest.approx(in_time.mean())
        over = {name: column[result.launches["end_s"] <= 8.0] for name, column in dict(result.launches).items()}
        busy_s = sum(lane["utilisation"] for lane in figures["lanes"].values()) * 8.0
        assert busy_s == pytest.approx((over["end_s"] - over["start_s"]).sum(), rel=0.01)
        assert figures["in_system"] == ((req["arrival_s"] <= 8.0) & (req["finish_s"] > 8.0)).sum()
        assert figures["acceptance"] == pytest.approx(0.6, abs=0.03)
        assert figures["strip"]["end_s"].min() > 7.8
        assert figures["strip"]["end_s"].max() <= 8.0


@pytest.mark.parametrize(
    "hardware",
    [
        Hardware(verify_gpu=1),
        Hardware(verify_gpu=1, cards=("l4", "h200")),
        Hardware(place=("prefill=0+1", "decode=2", "verify=1")),
        Hardware(replicas=2),
    ],
)
def test_a_lane_is_as_busy_as_the_gpus_that_run_it(hardware: Hardware) -> None:
    """Each GPU by itself, by its own card's bandwidth, then the mean."""
    setup = Setup(("pdv",), replace(BASE, hardware=hardware))
    session = Session(setup)
    session.advance(4.0)
    [figures] = session.figures(KEPT_S)
    [(result, _)] = replay(setup, [], 4.0, 0.0)
    columns = ("lane", "replica", "gpu", "start_s", "end_s", "bytes")
    busy: dict[tuple[str, int, int], list[float]] = {}
    for lane, replica, gpu, start_s, end_s, moved in zip(*(result.launches[c].tolist() for c in columns), strict=True):
        if end_s <= 4.0:
            card = builtin(hardware.cards[gpu] if hardware.cards else "h200").gpu
            seconds = busy.setdefault((LANES[lane], replica, gpu), [0.0, 0.0])
            seconds[0] += end_s - start_s
            seconds[1] += moved / card.bandwidth_bytes_per_s
    for lane, shown in figures["lanes"].items():
        gpus = [seconds for (name, *_), seconds in busy.items() if name == lane]
        for name, column in (("utilisation", 0), ("bandwidth_share", 1)):
            assert shown[name] == pytest.approx(sum(s[column] for s in gpus) / len(gpus) / 4.0, rel=0.01)


def test_inter_token_latency_is_within_one_percent() -> None:
    setup = Setup(("pd",), replace(BASE, traffic=replace(BASE.traffic, request_rate=5.0)))
    session = Session(setup)
    session.advance(10.0)
    [(result, _)] = replay(setup, [], 10.0, 0.0)
    early = result.deliveries["time_s"] <= 10.0
    exact = latencies_s(result.requests, {name: result.deliveries[name][early] for name in result.deliveries}, 0)["itl"]
    marks = session.figures(KEPT_S)[0]["marks_ms"]["itl"]
    assert marks == pytest.approx(1e3 * np.percentile(exact, (50, 95, 99)), rel=0.011)


def _of(deliveries: Columns, ids: Any) -> Columns:
    mine = np.isin(deliveries["request"], ids)
    return {name: column[mine] for name, column in deliveries.items()}


def test_a_burst_and_a_drop_show() -> None:
    session = Session(Setup(("pdv", "colocated"), BASE))
    session.advance(5.0)
    before = [figures["in_system"] for figures in session.figures(5.0)]
    session.burst()
    session.advance(5.02)
    after = [figures["in_system"] for figures in session.figures(5.0)]
    assert all(b + BURST - 5 <= a <= b + BURST + 5 for b, a in zip(before, after, strict=True))
    session.advance(8.0)
    session.drop()
    session.advance(8.0 + DROP_S)
    for figures in session.figures(DROP_S - 1):
        assert figures["acceptance"] == pytest.approx(0.3, abs=0.03)
    session.advance(9.0 + DROP_S + 8.0)
    assert session.figures(8.0)[0]["acceptance"] == pytest.approx(0.6, abs=0.03)


def test_what_is_kept_does_not_grow() -> None:
    session = Session(Setup(("colocated",), replace(BASE, traffic=replace(BASE.traffic, request_rate=4.0))))
    session.advance(KEPT_S + 20)
    [(station, gauge)] = gauged(session)
    assert len(gauge.slots) <= KEPT_S / SLOT_S + 2
    assert len(station.log.deliveries) == len(station.log.launches) == 0
    assert len(gauge._inside) == len(station.client.inside) < 50
    assert set(gauge._chunks._open["request"]) <= set(gauge._inside)
    assert set(gauge._unanswered) <= set(gauge._inside)


@pytest.mark.parametrize(
    ("base", "archs", "words"),
    [
        (replace(BASE, traffic=Traffic()), ("pdv",), "finite --request-rate"),
        (replace(BASE, server=Server(num_speculative_tokens=0)), ("pdv",), "draft length of 1 or more"),
        (BASE, (), "one to 4"),
        (BASE, ("pd", "pd"), "each once"),
        (replace(BASE, server=Server(hybrid_threshold=3)), ("pdv",), "does nothing"),
    ],
)
def test_what_cannot_be_is_refused(base: Experiment, archs: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Setup(archs, base)


def test_a_refused_turn_changes_nothing() -> None:
    session = Session(Setup(("pdv", "baseline"), BASE))
    for bad in ({"input_len": 100_000}, {"request_rate": -1.0}, {"controller": "feedback"}):
        with pytest.raises(ValueError, match=r"."):
            session.turn(replace(session.knobs, **bad))  # type: ignore[arg-type]
        assert session.knobs == Knobs.of(BASE)
        assert session.tape == []
    session.advance(1.0)


def test_an_empty_window_has_no_percentiles() -> None:
    [figures] = Session(Setup(("pd",), BASE)).figures(10.0)
    assert all(math.isnan(mark) for marks in figures["marks_ms"].values() for mark in marks)


def test_a_crew_is_as_one() -> None:
    """Two processes show what one does, refuse what one does, and begin again."""
    setup = Setup(("pdv", "colocated", "pd"), BASE)
    crew = Crew(setup, 2)
    alone, together = Session(setup), Session(setup, crew)
    for session in (alone, together):
        session.advance(1.0)
        session.burst()
        session.advance(1.5)
        with pytest.raises(ValueError, match="tokens"):
            session.turn(replace(session.knobs, input_len=100_000))
        session.turn(replace(session.knobs, request_rate=30.0))
        session.advance(3.0)
    assert together.tape == alone.tape
    np.testing.assert_equal(together.figures(10.0), alone.figures(10.0))
    crew.restart()
    again = Session(setup, crew)
    again.advance(0.5)
    first = Session(setup)
    first.advance(0.5)
    np.testing.assert_equal(again.figures(10.0), first.figures(10.0))


def silent(pipe: Connection) -> None:
    """A session that never begins."""
    time.sleep(600)


def test_a_session_that_never_begins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdvsim.live.pace.START_S", 0.1)
    with pytest.raises(ValueError, match=r"nothing came from its process in 0\.1 s"):
        Feed(silent)
