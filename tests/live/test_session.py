"""A live session: the requests and records of an ordinary run, however it is driven; turned, nothing is lost."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdvsim.live.gauge import KEPT_S, SLOT_S, grows
from pdvsim.live.knobs import BURST, Action, Knobs, Setup
from pdvsim.live.pace import MOST_UNREAD, Feed, Pacer
from pdvsim.live.parts import lines
from pdvsim.live.session import Session, replay
from pdvsim.sim.config import Experiment, Hardware, Scoring, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.records import rows_of
from pdvsim.sim.run import simulate
from pdvsim.testing import check_alike

BASE = Experiment("pdv", traffic=Traffic(request_rate=20.0, seed=3), server=Server("tinyllama-1.1b:llama-2-7b", 3))


@pytest.mark.parametrize(("arch", "users"), [*((arch, None) for arch in ARCHS), ("colocated", 6), ("pdv-ahead", 6)])
def test_a_session_left_alone_is_an_ordinary_run(arch: str, users: int | None) -> None:
    """The same requests and the same rows, also with a client that holds requests back."""
    base = replace(BASE, traffic=replace(BASE.traffic, max_concurrency=users))
    setup = Setup((arch,), base if arch != "autoregressive" else replace(base, server=Server()))
    [result] = replay(setup, [], 2.5)
    assert len(result.requests["id"]) > 30
    check_alike(result, simulate(result.experiment))


def driven(rng: np.random.Generator, setup: Setup) -> Session:
    """A session of 6 s in random steps, with everything done to it."""
    session, actions = Session(setup), iter(["turn", "burst", "drafts", "controller"])
    for at_s in (0.7, 1.33, 3.1, 4.4, 6.0):
        while session.now_s < at_s:
            session.advance(min(at_s, session.now_s + float(rng.uniform(0.001, 0.4))))
        knobs, action = session.knobs, next(actions, "")
        if action == "burst":
            session.burst()
        elif action == "turn":
            session.change(replace(knobs, request_rate=40.0, input_len=300, output_len=60, max_num_seqs=16))
        elif action == "drafts":
            session.change(replace(knobs, num_speculative_tokens=0, max_num_batched_tokens=512))
        elif action == "controller":
            session.change(replace(knobs, controller="goodput", acceptance_rate=0.9, dataset_name="random"))
    return session


def test_a_session_is_a_function_of_its_tape() -> None:
    """However it was driven: run again, it has the same rows, and the page has shown no others."""
    setup = Setup(("pdv", "colocated", "autoregressive"), BASE)
    sessions = [driven(np.random.default_rng(seed), setup) for seed in (1, 2)]
    assert sessions[0].actions == sessions[1].actions
    assert len(sessions[0].actions) == 4
    replayed = replay(setup, sessions[0].actions, 6.0)
    for session in sessions:
        for (_, gauge), result in zip(session.gauged(), replayed, strict=True):
            assert gauge.total_tokens == result.deliveries["tokens"][result.deliveries["time_s"] <= 6.0].sum()
            assert gauge.total_finished == (result.requests["finish_s"] <= 6.0).sum()
    arrivals = [result.requests["prompt_tokens"] for result in replayed]
    assert all(np.array_equal(arrivals[0], other) for other in arrivals)  # the same requests everywhere
    for result in replayed:
        req = result.requests
        served = np.bincount(result.deliveries["request"], result.deliveries["tokens"], len(req["id"]))
        assert np.array_equal(served, req["output_tokens"])


@pytest.mark.parametrize(
    "hardware",
    [
        Hardware(),
        Hardware(place=("prefill=1", "verify=1"), cards=("l4", "h200")),
        Hardware(place=("prefill=0+1", "decode=2", "verify=1")),
        Hardware(replicas=2),
    ],
)
def test_figures_are_the_metrics_of_the_run(hardware: Hardware) -> None:
    """Of all its requests, when they are served: rates are per second of the session, not of the run's own window."""
    scoring = Scoring(goodput=("ttft:60", "tpot:9"), metric_percentiles=(95.0, 99.0))
    setup = Setup(("pdv",), replace(BASE, scoring=scoring, hardware=hardware))
    session = Session(setup)
    session.advance(3.0)
    session.change(replace(session.knobs, request_rate=1e-6))  # the last arrivals
    session.advance(20.0)
    [figures], [result] = session.figures(KEPT_S), replay(setup, session.actions, 20.0)
    metrics = summarise(result)
    assert figures["total_finished"] == metrics["completed"] > 40
    assert figures["tokens_per_s"] * 20.0 == pytest.approx(metrics["total_output_tokens"])
    assert figures["goodput_per_s"] * 20.0 == pytest.approx(metrics["request_goodput"] * metrics["duration"])
    assert figures["attainment"] == pytest.approx(metrics["request_goodput"] / metrics["request_throughput"])
    assert 100 * figures["acceptance"] == pytest.approx(metrics["spec_decode_judged_acceptance_rate"])
    assert figures["kinds"] == {kind: pytest.approx(figure) for kind, figure in metrics["kinds"].items()}
    for lane, figure in metrics["lanes"].items():
        for name in ("utilisation", "bandwidth_share"):
            assert figures["lanes"][lane][name] * 20.0 == pytest.approx(figure[name] * metrics["duration"])
    for name, marks in figures["marks_ms"].items():
        exact = [metrics[f"{mark}_{name}_ms"] for mark in ("median", "p95", "p99")]
        assert marks == pytest.approx(exact, rel=0.01 if name == "itl" else 1e-9)
    assert figures["in_system"] == 0


def test_figures_of_a_window_are_of_what_happened_in_it() -> None:
    session = Session(Setup(("pdv",), BASE))
    session.advance(8.0)
    [figures], [result] = session.figures(2.0), replay(session.setup, [], 8.0)
    requests, deliveries = result.requests, result.deliveries

    def inside(times_s: Any) -> Any:
        return (times_s > 6.0) & (times_s <= 8.0)

    assert figures["tokens_per_s"] * 2.0 == pytest.approx(deliveries["tokens"][inside(deliveries["time_s"])].sum())
    assert figures["requests_per_s"] * 2.0 == pytest.approx(inside(requests["finish_s"]).sum())
    ttft_s = (requests["first_token_s"] - requests["arrival_s"])[inside(requests["first_token_s"])]
    assert figures["marks_ms"]["ttft"] == pytest.approx(1e3 * np.percentile(ttft_s, (50, 95, 99)))
    assert figures["in_system"] == ((requests["arrival_s"] <= 8.0) & (requests["finish_s"] > 8.0)).sum()
    assert 7.8 < figures["strip"]["end_s"].min() <= figures["strip"]["end_s"].max() <= 8.0
    empty = Session(session.setup).figures(10.0)[0]
    assert all(math.isnan(mark) for marks in empty["marks_ms"].values() for mark in marks)


def test_hits_in_the_prefix_cache_show() -> None:
    """Two thirds of each prompt is the same prefix, which is computed once; without one there is no rate."""
    shared = Traffic("random", request_rate=20.0, prefix_len=160, input_len=80, output_len=16, seed=3)
    session = Session(Setup(("colocated",), replace(BASE, traffic=shared)))
    session.advance(4.0)
    [figures] = session.figures(10.0)
    count = figures["total_finished"]
    assert figures["hit_rate"] == pytest.approx((count - 1) * 160 / (count * 240))
    assert "prefix cache hits (%)" in {line.name for line in lines([figures])}
    plain = Session(Setup(("colocated",), BASE))
    plain.advance(4.0)
    assert "prefix cache hits (%)" not in {line.name for line in lines(plain.figures(10.0))}


TALKS = Traffic(
    "random", num_prompts=300, num_turns=4, think_time_s=0.5, request_rate=12.0, prefix_len=100, input_len=100,
    output_len=40, seed=3,
)  # fmt: skip


def test_conversations_are_those_of_an_ordinary_run() -> None:
    """A turn follows the answer to the last one; conversations begin at their own times."""
    base = replace(BASE, arch="colocated", traffic=TALKS)
    [session] = replay(Setup(("colocated",), base), [], 10.0)
    live, plain = (rows_of(r, r["finish_s"] <= 10.0) for r in (session.requests, simulate(base).requests))
    assert (plain["turn"] == 3).sum() > 10
    for name in ("session", "turn", "num_cached_tokens"):
        assert live[name].tolist() == plain[name].tolist()
    for name in ("arrival_s", "finish_s"):
        assert live[name] == pytest.approx(plain[name])


def test_conversations_show_who_uses_the_kv_cache() -> None:
    """All of a small cache is used or cached at last; it evicts, and so hits less often than an endless one."""
    endless = (96 + 224 + 368 + 512) / (200 + 340 + 480 + 620)  # whole blocks of the prefix, then of all before
    base = replace(BASE, traffic=TALKS, hardware=replace(BASE.hardware, kv_capacity_tokens=4000))
    session = Session(Setup(("colocated", "pdv"), base))
    session.advance(6.0)
    session.change(replace(session.knobs, request_rate=16.0))  # a new sample: its conversations are new as well
    session.advance(12.0)
    for figures in session.figures(5.0):
        shown = {line.name: line.values for line in lines([figures])}
        shares = [shown[f"KV {words} (%)"][0] for words in ("shared by requests", "of one request")]
        assert sum(shares) == pytest.approx(100 * figures["kv_share"])
        assert sum(shares) + shown["KV cached, unused (%)"][0] == pytest.approx(100, abs=3)
        assert shown["evicted blocks"][0] > 0
        assert 0 < figures["hit_rate"] < endless


def test_a_burst_has_texts_of_its_own() -> None:
    """Its requests share the prefix with the others, and nothing else, though they are a second sample."""
    shared = Traffic("random", request_rate=20.0, prefix_len=160, input_len=80, output_len=16, seed=3)
    base = replace(BASE, traffic=shared)
    [session] = replay(Setup(("colocated",), base), [Action(1.0)], 2.0)
    assert session.requests["num_cached_tokens"].max() == 160


def test_a_burst_and_another_acceptance_show() -> None:
    session = Session(Setup(("pdv", "colocated"), BASE))
    session.advance(5.0)
    before = [figures["in_system"] for figures in session.figures(5.0)]
    session.burst()
    session.advance(5.02)
    after = [figures["in_system"] for figures in session.figures(5.0)]
    assert all(b + BURST - 5 <= a <= b + BURST + 5 for b, a in zip(before, after, strict=True))
    session.advance(8.0)
    assert session.figures(8.0)[0]["acceptance"] == pytest.approx(0.6, abs=0.03)
    session.change(replace(session.knobs, acceptance_rate=0.3))
    session.advance(24.0)
    for figures in session.figures(8.0):
        assert figures["acceptance"] == pytest.approx(0.3, abs=0.03)


def test_what_is_kept_does_not_grow() -> None:
    session = Session(Setup(("colocated",), replace(BASE, traffic=replace(BASE.traffic, request_rate=4.0))))
    session.advance(KEPT_S + 20)
    [(station, gauge)] = session.gauged()
    assert len(gauge.slots) <= KEPT_S / SLOT_S + 2
    assert len(station.log.deliveries) == len(station.log.launches) == 0
    assert len(gauge._inside) == len(station.client.inside) < 50
    assert set(gauge._chunks._open["request"]) <= set(gauge._inside)
    assert set(gauge._unanswered) <= set(gauge._inside)


@pytest.mark.parametrize(
    ("base", "archs", "words"),
    [
        (replace(BASE, traffic=Traffic()), ("pdv",), "finite --request-rate"),
        (BASE, ("pd", "pd"), "each once"),
        (replace(BASE, server=Server(hybrid_threshold=3)), ("pdv",), "has no effect"),
    ],
)
def test_what_cannot_be_is_refused(base: Experiment, archs: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Setup(archs, base)


def test_a_refused_turn_changes_nothing() -> None:
    session = Session(Setup(("pdv", "baseline"), BASE))
    for bad in ({"input_len": 100_000}, {"request_rate": -1.0}, {"controller": "feedback"}):
        with pytest.raises(ValueError, match=r"."):
            session.change(replace(session.knobs, **bad))  # type: ignore[arg-type]
        assert session.knobs == Knobs.of(BASE)
        assert session.actions == []
    session.advance(1.0)


def test_turns_of_two_controls_before_an_update_are_both_in_force() -> None:
    """As of two browsers, or of one and a busy machine: none is of settings that the other has changed."""
    pacer = Pacer(Setup(("pdv",), BASE), speed=1.0, window_s=10.0)
    for turn in ({"request_rate": 9.0}, {"input_len": 10**7}, {"burstiness": 2.0}):
        pacer.execute("turn", turn)
        assert bool(pacer.refusal) == ("input_len" in turn)
    assert pacer.shown().knobs == replace(Knobs.of(BASE), request_rate=9.0, burstiness=2.0)


def deaf(pipe: Connection) -> None:
    """A session that begins and then reads nothing."""
    pipe.send(SimpleNamespace(orders=0))
    time.sleep(600)


def test_orders_to_a_session_that_reads_nothing_do_not_wait() -> None:
    feed = Feed(deaf)
    for _ in range(2000):
        feed.order("turn", {"request_rate": 8.0})
    assert feed.ordered == MOST_UNREAD
    feed.close()


def silent(pipe: Connection) -> None:
    """A session that never begins."""
    time.sleep(600)


def test_a_session_that_never_begins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdvsim.live.pace.START_S", 0.1)
    with pytest.raises(ValueError, match=r"0\.1 s"):
        Feed(silent)


@pytest.mark.parametrize(
    ("waiting", "says"),
    [
        (list(range(80)), True),  # one more each slot
        ([3, 1, 4, 1, 5, 9, 2, 6] * 10, False),  # it comes and goes
        ([0] * 30 + [50 - at for at in range(50)], False),  # a burst that is worked off
        (list(range(12)), False),  # too few slots
        ([at // 20 for at in range(80)], False),  # no more than chance makes of the arrivals
    ],
)
def test_a_queue_that_keeps_growing_is_an_overload(waiting: list[int], says: bool) -> None:
    assert grows(waiting, 100) is says
