"""The parts of a real run on their own: the clock, the host's idle share, telemetry, memory."""

from __future__ import annotations

import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import nvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simpy.core import EmptySchedule
from simpy.events import AllOf, Event, Timeout

from pdvsim.realrun.clock import WallClock
from pdvsim.realrun.engine.cache import PAGE, SCRATCH_PAGES, Sequences
from pdvsim.realrun.engine.graphs import PromptChunk, wait_for
from pdvsim.realrun.memory import CATCH_UP_ROWS, Needs, PagedKv, packed, pages_that_fit
from pdvsim.realrun.site import TINY, host_idle_share
from pdvsim.realrun.streams import group_counts
from pdvsim.realrun.telemetry import COLUMNS, Telemetry
from pdvsim.sim.config import Experiment, Server, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.prices.costs import STRETCHES
from pdvsim.sim.workload.requests import make_requests


class Coming:
    """A source that ends after this number of polls."""

    def __init__(self, clock: WallClock, polls: int) -> None:
        self.clock, self.left, self.rests = clock, polls, 0
        self.event = Event(clock)

    def poll(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.clock.at(self.clock.now, self.event, "over")
        return self.left > 0

    def rest(self) -> None:
        self.rests += 1


def test_events_happen_in_order_and_never_early() -> None:
    clock, log = WallClock(), []
    clock.start()

    def process(delay: float):  # type: ignore[no-untyped-def]
        timeout = Timeout(clock, delay)
        due = next(at for at, _, _, event in clock._queue if event is timeout)
        yield timeout
        log.append((due, clock.now))

    delays = (0.003, 0.001, 0.002, 0.0)
    clock.run_to(AllOf(clock, [clock.process(process(delay)) for delay in delays]))
    assert len(log) == len(delays)
    assert log == sorted(log)
    assert all(now >= due for due, now in log)


def test_time_never_goes_back_within_a_step() -> None:
    clock, seen = WallClock(), []
    event = Event(clock)
    event.callbacks.append(lambda _: seen.extend(clock.now for _ in range(1000)))
    event.succeed()
    clock.run_to(event)
    assert seen == sorted(seen)
    assert seen[0] < seen[-1]


def test_sources_are_polled_until_they_are_over() -> None:
    clock = WallClock()
    source = Coming(clock, 50)
    clock.sources.append(source)
    clock.run_to(source.event)
    assert source.event.value == "over"
    assert source.rests == 49


def test_a_run_that_waits_for_nothing_says_so() -> None:
    clock = WallClock()
    with pytest.raises(EmptySchedule):
        clock.run_to(Event(clock))


def test_ctrl_c_ends_a_run_between_two_events() -> None:
    clock, log = WallClock(), []

    def process():  # type: ignore[no-untyped-def]
        for i in range(10):
            yield Timeout(clock, 0)
            if i == 3:
                signal.raise_signal(signal.SIGINT)
            log.append(i)

    before = signal.getsignal(signal.SIGINT)
    done = clock.process(process())
    with pytest.raises(KeyboardInterrupt):
        clock.run_to(done)
    assert log == [0, 1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is before
    clock.run_to(done)  # and it can go on
    assert log == list(range(10))


def test_idle_share_of_a_worked_case() -> None:
    """Requests are there for six seconds, of which two are unused; four seconds without anyone do not count."""
    launches = {"start_s": np.array([0.0, 1.5, 2.0, 8.5, 9.0]), "end_s": np.array([1.0, 2.0, 3.0, 9.0, 10.0])}
    requests = {"arrival_s": np.array([0.0, 7.5]), "finish_s": np.array([3.5, 10.0])}
    assert host_idle_share(launches, requests)["host_idle_share"] == pytest.approx(2 / 6)


@pytest.mark.parametrize(("took_s", "sampled_at"), [(0.001, [0.0, 0.25]), (0.002, [0.0, 0.4])])
def test_telemetry_is_rare_and_never_ends_a_run(
    took_s: float, sampled_at: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four a second, or fewer where a driver so slow would cost more than its share of the time."""
    calls, clock_s = 0, 0.0
    monkeypatch.setattr("pdvsim.realrun.telemetry.perf_counter", lambda: clock_s)

    def read() -> tuple[float, ...]:
        nonlocal calls, clock_s
        calls += 1
        clock_s += took_s
        if calls == 3:
            raise OSError("the driver has had enough")
        return tuple(float(i) for i in range(len(COLUMNS) - 1))

    telemetry = Telemetry(read)
    for millisecond in range(1000):
        telemetry.sample_if_due(millisecond / 1000)
    assert calls == 3
    assert telemetry.columns()["time_s"].tolist() == sampled_at
    summary = telemetry.summary()
    assert summary["mean_power_w"] == 3.0
    assert summary["telemetry_cost_s"] == pytest.approx(3 * took_s)
    assert Telemetry.of(torch.device("cpu")).summary() == {"telemetry_samples": 0}


def test_telemetry_reads_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, memory = SimpleNamespace(gpu=97, memory=41), SimpleNamespace(used=7)
    nvml.install(
        monkeypatch,
        nvmlDeviceGetUtilizationRates=lambda card: rates,
        nvmlDeviceGetMemoryInfo=lambda card: memory,
    )
    telemetry = Telemetry.of(torch.device("cuda"))
    telemetry.sample_if_due(0.5)
    assert [column[0] for column in telemetry.columns().values()] == [0.5, 97, 41, 7, 512, 1980, 3201, 55]


def test_packed_chunks_keep_every_token_in_order() -> None:
    chunks = [PromptChunk(slot, 10 * slot, tokens) for slot, tokens in enumerate((5, 70, 1, 1, 1, 1, 1, 33))]
    groups = list(packed(chunks, 32))
    assert all(len(group) <= CATCH_UP_ROWS and sum(c.tokens for c in group) <= 32 for group in groups)
    positions = [(c.slot, c.start + i) for group in groups for c in group for i in range(c.tokens)]
    assert positions == [(c.slot, c.start + i) for c in chunks for i in range(c.tokens)]


def test_as_many_pages_are_taken_as_fit_and_one_request_must() -> None:
    traffic = Traffic("random", num_prompts=300, input_len=1000, output_len=500)
    experiment = Experiment("pd", traffic, server=Server(max_num_seqs=200))
    requests = make_requests(traffic, experiment.acceptance)
    needs = Needs.of(experiment, requests)
    pages = [pages_that_fit(TINY, needs, 4, room) for room in (120e6, 150e6, 1e12)]
    assert needs.capacity // PAGE <= pages[0] < pages[1] < pages[2] == needs.pages == 200 * needs.capacity // PAGE
    fewer = Needs.of(experiment, requests, pages[1])
    assert fewer.resumes
    assert fewer.pages == pages[1]
    assert fewer.covers(needs)  # admission waits
    assert not needs.resumes
    reserved = replace(experiment, server=replace(experiment.server, kv_cache="reserved"))
    assert not Needs.of(reserved, requests, pages[1]).resumes
    with pytest.raises(ValueError, match=r"lower --input-len, --output-len or --max-num-batched-tokens$"):
        pages_that_fit(TINY, needs, 4, 1e5)


def test_pages_are_given_as_tokens_come_and_taken_back() -> None:
    sequences = Sequences(3, 64, torch.device("cpu"), SCRATCH_PAGES + 5)
    kv, wide = PagedKv(5 * PAGE, 0, True, sequences), sequences.pages.shape[1]
    a, b = (Request(i, 0.0, 10, 10, b"") for i in range(2))
    assert kv.admit(a, 32)
    assert kv.admit(b, 16)
    first, second = kv.take_slot(a), kv.take_slot(b)
    assert kv.grown([first, second], [17, 1]) == [(wide * first, 4), (wide * first + 1, 5), (wide * second, 6)]
    assert kv.grown([first, second], [32, 16]) == []
    kv.check_integrity()
    kv.release(a)
    assert kv.grown([second], [64]) == [(wide * second + i, page) for i, page in ((1, 7), (2, 8), (3, 4))]
    kv.release(b)
    for request in (a, b):
        kv.release_slot(request)
    kv.check_integrity()


def test_the_simulator_knows_how_many_stretches_a_forward_takes() -> None:
    assert STRETCHES == CATCH_UP_ROWS


@given(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), st.integers(3, 40))
def test_groups_of_multiprocessors_follow_the_shares(weights: list[float], groups: int) -> None:
    shares = {name: weight / sum(weights) for name, weight in zip("abc", weights, strict=True)}
    counts = group_counts(shares, groups)
    assert sum(counts.values()) <= groups
    assert min(counts.values()) >= 1
    assert all(counts[name] - shares[name] * groups < 1.5 for name in shares)


def test_a_gpu_that_hangs_is_not_waited_for_for_ever() -> None:
    class Stuck:
        def query(self) -> bool:
            return False

    with pytest.raises(TimeoutError, match=r"not finished a launch within 0\.05 s"):
        wait_for(Stuck(), 0.05)  # type: ignore[arg-type]
