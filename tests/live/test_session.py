"""A live session: the requests and records of an ordinary run, however it is driven; turned, nothing is lost."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdvsim.bench.sweep import flatten
from pdvsim.live.gauge import KEPT_S, Gauge, LiveWindow, grows
from pdvsim.live.page import Dashboard
from pdvsim.live.parts import LivePart, table
from pdvsim.live.session import BURST, Action, Session, Setup, replay
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
            session.change(knobs | {"request_rate": 40.0, "input_len": 300, "output_len": 60, "max_num_seqs": 16})
        elif action == "drafts":
            session.change(knobs | {"num_speculative_tokens": 0, "max_num_batched_tokens": 512})
        elif action == "controller":
            session.change(knobs | {"controller": "goodput", "acceptance_rate": 0.9, "dataset_name": "random"})
    return session


def test_a_session_is_a_function_of_its_tape() -> None:
    """However it was driven: run again, it has the same rows, and the page has shown no others."""
    setup = Setup(("pdv", "colocated", "autoregressive"), BASE)
    sessions = [driven(np.random.default_rng(seed), setup) for seed in (1, 2)]
    assert sessions[0].actions == sessions[1].actions
    assert len(sessions[0].actions) == 4
    replayed = replay(setup, sessions[0].actions, 6.0)
    for session in sessions:
        for window, result in zip(session.windows(KEPT_S), replayed, strict=True):
            shown, made = window.deliveries, rows_of(result.deliveries, result.deliveries["time_s"] <= 6.0)
            assert all(shown[name].tolist() == made[name].tolist() for name in ("time_s", "tokens"))
            assert (window.requests["finish_s"] >= 0).sum() == (result.requests["finish_s"] <= 6.0).sum()
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
    session.change(session.knobs | {"request_rate": 1e-6})  # the last arrivals
    session.advance(20.0)
    [window], [result] = session.windows(KEPT_S), replay(setup, session.actions, 20.0)
    figures, metrics = window.metrics, flatten(summarise(result))
    assert figures["request_throughput"] * 20.0 == pytest.approx(metrics["completed"])
    assert metrics["completed"] > 40
    for name in ("output_throughput", "request_goodput"):
        assert figures[name] * 20.0 == pytest.approx(metrics[name] * metrics["duration"])
    assert figures["attainment"] == pytest.approx(metrics["request_goodput"] / metrics["request_throughput"])
    alike = ["spec_decode_judged_acceptance_rate", *(name for name in metrics if name.startswith("kinds_"))]
    alike += [f"{mark}_{name}_ms" for mark in ("median", "p95", "p99") for name in ("ttft", "tpot", "itl", "e2el")]
    assert {name: figures[name] for name in alike} == pytest.approx({name: metrics[name] for name in alike})
    for name in metrics:
        if name.endswith(("_utilisation", "_bandwidth_share")):
            assert figures[name] * 20.0 == pytest.approx(metrics[name] * metrics["duration"])
    assert figures["in_system"] == 0


def test_figures_of_a_window_are_of_what_happened_in_it() -> None:
    session = Session(Setup(("pdv",), BASE))
    session.advance(8.0)
    [window], [result] = session.windows(2.0), replay(session.setup, [], 8.0)
    figures, requests, deliveries = window.metrics, result.requests, result.deliveries

    def inside(times_s: Any) -> Any:
        return (times_s > 6.0) & (times_s <= 8.0)

    assert figures["output_throughput"] * 2.0 == pytest.approx(deliveries["tokens"][inside(deliveries["time_s"])].sum())
    assert figures["request_throughput"] * 2.0 == pytest.approx(inside(requests["finish_s"]).sum())
    ttft_s = (requests["first_token_s"] - requests["arrival_s"])[inside(requests["first_token_s"])]
    shown = [figures[f"{mark}_ttft_ms"] for mark in ("median", "p95", "p99")]
    assert shown == pytest.approx(1e3 * np.percentile(ttft_s, (50, 95, 99)))
    assert figures["in_system"] == ((requests["arrival_s"] <= 8.0) & (requests["finish_s"] > 8.0)).sum()
    assert window.series["in_flight"][-1] == pytest.approx(figures["in_system"], abs=2)
    [empty] = Session(session.setup).windows(10.0)
    assert all(math.isnan(value) for name, value in empty.metrics.items() if name.endswith("_ms"))


def rows(windows: list[LiveWindow]) -> dict[str, list[str]]:
    """The table of the page: the values of each metric."""
    heads = [(str(at), "") for at in range(len(windows))]
    return {name: [cell[0] for cell in cells] for name, _, cells in table(heads, windows)["rows"]}


def test_hits_in_the_prefix_cache_show() -> None:
    """Two thirds of each prompt is the same prefix, which is computed once; without one there is no rate."""
    shared = Traffic("random", request_rate=20.0, prefix_len=160, input_len=80, output_len=16, seed=3)
    session = Session(Setup(("colocated",), replace(BASE, traffic=shared)))
    session.advance(4.0)
    [window] = session.windows(10.0)
    count = (window.requests["finish_s"] >= 0).sum()
    assert window.metrics["prefix_cache_hit_rate"] == pytest.approx(100 * (count - 1) * 160 / (count * 240))
    assert "Prefix cache hit rate (%)" in rows([window])
    plain = Session(Setup(("colocated",), BASE))
    plain.advance(4.0)
    assert "Prefix cache hit rate (%)" not in rows(plain.windows(10.0))


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
    session.change(session.knobs | {"request_rate": 16.0})  # a new sample: its conversations are new as well
    session.advance(12.0)
    for window in session.windows(5.0):
        figures = window.metrics
        used = sum(figures[f"KV {words} (%)"] for words in ("shared by requests", "of one request"))
        assert used == pytest.approx(100 * figures["kv_share"])
        assert used + figures["KV cached, unused (%)"] == pytest.approx(100, abs=3)
        assert figures["evicted blocks"] > 0
        assert 0 < figures["prefix_cache_hit_rate"] < 100 * endless


def test_a_burst_has_texts_of_its_own() -> None:
    """Its requests share the prefix with the others, and nothing else, though they are a second sample."""
    shared = Traffic("random", request_rate=20.0, prefix_len=160, input_len=80, output_len=16, seed=3)
    base = replace(BASE, traffic=shared)
    [session] = replay(Setup(("colocated",), base), [Action(1.0)], 2.0)
    assert session.requests["num_cached_tokens"].max() == 160


def test_a_burst_and_another_acceptance_show() -> None:
    session = Session(Setup(("pdv", "colocated"), BASE))
    session.advance(5.0)
    before = [window.metrics["in_system"] for window in session.windows(5.0)]
    session.burst()
    session.advance(5.02)
    after = [window.metrics["in_system"] for window in session.windows(5.0)]
    assert all(b + BURST - 5 <= a <= b + BURST + 5 for b, a in zip(before, after, strict=True))
    for acceptance, until_s in ((0.6, 8.0), (0.3, 24.0)):
        session.change(session.knobs | {"acceptance_rate": acceptance})
        session.advance(until_s)
        for window in session.windows(8.0):
            judged = window.metrics["spec_decode_judged_acceptance_rate"]
            assert judged == pytest.approx(100 * acceptance, abs=3)
            assert np.nanmean(window.series["acceptance"]) == pytest.approx(judged, abs=3)


def test_what_is_kept_does_not_grow() -> None:
    session = Session(Setup(("colocated",), replace(BASE, traffic=replace(BASE.traffic, request_rate=4.0))))
    session.advance(KEPT_S + 20)
    [station] = session.stations
    assert isinstance(station.reader, Gauge)
    assert station.reader.recent[0].end_s > 20
    assert len(station.log.deliveries) == len(station.log.launches) == 0
    assert len(station.reader.inside) == len(station.client.inside) < 50


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
            session.change(session.knobs | bad)
        assert session.knobs == Setup(("pdv",), BASE).knobs
        assert session.actions == []
    session.advance(1.0)


def test_a_page_changes_one_setting_and_refuses_what_cannot_be() -> None:
    show = Dashboard(Setup(("pdv",), BASE), 1.0, lambda *_: "", "")
    for what, value in (("request_rate", 9.0), ("input_len", "10000000"), ("burstiness", 2.0)):
        show.execute(what, value)
        assert bool(show.refusal) == (what == "input_len")
    assert show.session.knobs == Setup(("pdv",), BASE).knobs | {"request_rate": 9.0, "burstiness": 2.0}
    for what, value in (("request_rate", 1e9), ("window", "1 s"), ("__class__", None)):
        with pytest.raises((ValueError, LookupError)):
            show.execute(what, value)


def test_what_browsers_see_is_made_once_for_all() -> None:
    show = Dashboard(Setup(("pdv",), BASE), 1.0, lambda *_: "", "")
    made: list[str] = []

    def counted(part: LivePart) -> LivePart:
        return part._replace(content=lambda windows: made.append(part.id) or part.content(windows))

    show.parts = list(map(counted, show.parts))
    show.execute("on", None)
    show.tick(0.01)
    messages = [json.loads(show.message(0, -1)) for _ in range(100)]
    assert messages[0]["parts"].keys() >= {"strip", "table", "tokens_per_s", "ttft"}
    assert all(message == messages[0] for message in messages)
    assert len(made) == len(set(made)) == len(show.parts)


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
    assert grows(np.array(waiting), 100) is says
