"""The published programs, by hand: what a round emits, who is served when, and how the tables counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.published.models import BATCHES, LANES
from pdvsim.published.program import (
    K,
    PublishedJob,
    StaticBatches,
    WholeSequence,
    coin_for,
    drawn_rounds,
    even_rounds,
    legacy_arrivals,
    mean_acceptance,
    score,
    serve,
)
from pdvsim.published.tables import five_requests, load_published, many_requests
from pdvsim.sim.models.presets import pair

PAIR = pair("tinyllama-1.1b:llama-2-7b")


class Unit(WholeSequence):
    """Drafts of one second and verifies of two, whatever the batch: a round takes six."""

    def round(self, rows: int, length: int) -> list[float]:
        return [1.0] * K + [2.0]


@given(st.floats(0, 1), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_a_request_ends_with_the_round_that_reaches_its_length(coin: float, tokens: int, seed: int) -> None:
    emits = drawn_rounds(np.random.default_rng(seed), coin, tokens)
    assert sum(emits[:-1]) < tokens <= sum(emits)
    assert set(emits) <= {1, 2, 3, 4}


@given(st.integers(1, 100), st.data())
def test_even_rounds_spread_all_tokens(rounds: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(rounds, K * rounds))
    emits = even_rounds(tokens, rounds)
    assert (len(emits), sum(emits)) == (rounds, tokens)
    assert max(emits) - min(emits) <= 1


def test_mean_acceptance_is_that_of_drawn_requests() -> None:
    rng = np.random.default_rng(1)
    requests = [drawn_rounds(rng, 0.45, 20) for _ in range(20_000)]
    shown = np.mean([sum(emits) / (K * len(emits)) for emits in requests])
    assert mean_acceptance(np.array([0.45]), 20)[0] == pytest.approx(shown, abs=0.002)
    assert coin_for(float(shown), 20) == pytest.approx(0.45, abs=0.005)


def test_arrivals_are_numpys_legacy_stream() -> None:
    np.random.seed(42)  # noqa: NPY002
    expected, now_s = [], np.random.exponential(1 / 1.6)  # noqa: NPY002
    while now_s < 30:
        expected.append(now_s)
        now_s += np.random.exponential(1 / 1.6)  # noqa: NPY002
    assert legacy_arrivals(1.6, 30.0) == expected
    for _, _, concurrency, requests in load_published().rows("poisson_30s"):
        assert len(legacy_arrivals(0.05 * concurrency, 30.0)) == requests


PLAIN, OVERLAPPED = {}, {"overlap_s": 0.5, "first_use_s": 3.0}
FINISHES = [  # of requests of so many rounds that are all there at first
    ("pd", [2, 1, 3], PLAIN, [12, 18, 36]),  # one request after the other
    ("pdv", [1, 1, 1, 1, 1], PLAIN, [6, 6, 6, 6, 12]),  # nobody is admitted before a batch of four is done
    ("pdv", [3, 1, 1, 1, 1], PLAIN, [18, 6, 6, 6, 24]),
    # 16 drafts of four workers until 16 s, their verifies until 18, 20, 22, 24; the fifth queues after them
    ("baseline", [1, 1, 1, 1, 1], PLAIN, [18, 20, 22, 24, 30]),
    ("baseline", [2], OVERLAPPED, [15]),  # a worker without company overlaps nothing
    # from 3 s on: the first draft alone, 1 s; seven with company, 0.5 s each; two verifies of 1.5 s
    ("baseline", [1, 1], OVERLAPPED, [9, 10.5]),
]


def three_way(program: str, jobs: list[PublishedJob], **more: float) -> list[float]:
    """When a program finishes requests."""
    return [job.finish_s for job in serve(StaticBatches(Unit(PAIR, 0.0, 1.0), *BATCHES[program], **more), jobs)]


@pytest.mark.parametrize(("program", "rounds", "config", "expected"), FINISHES)
def test_when_requests_of_three_way_finish(
    program: str, rounds: list[int], config: dict[str, float], expected: list[float]
) -> None:
    assert three_way(program, [PublishedJob(0.0, (1,) * n) for n in rounds], **config) == expected


def test_a_program_of_three_way_waits_for_arrivals() -> None:
    def served_at(program: str, *arrivals_s: float) -> list[float]:
        return three_way(program, [PublishedJob(arrival_s, (1,)) for arrival_s in arrivals_s])

    assert served_at("pd", 1, 2.5, 3, 30) == [7, 13, 19, 36]
    assert served_at("pdv", 1, 2.5, 3, 30) == [7, 13, 13, 36]  # two wait for the first and share a batch
    # the second worker's forwards start at 3, 5, 7, 10 and 11, between those of the first (1, 2, 4, 6 and 8)
    assert served_at("baseline", 1, 2.5, 30) == [10, 13, 36]


def test_without_a_cache_arithmetic_grows_with_rows_and_length_and_launches_do_not() -> None:
    launches = WholeSequence(PAIR, 1e-3, math.inf)
    assert launches.round(1, 10)[K] == launches.round(4, 100)[K] == pytest.approx(0.032)
    arithmetic = WholeSequence(PAIR, 0.0, 19.5e12)
    assert arithmetic.round(4, 60)[K] == pytest.approx(4 * arithmetic.round(1, 60)[K])
    first, *_, last, verify = arithmetic.round(1, 60)
    assert verify == pytest.approx(2 * 6.607e9 * 64 / 19.5e12, rel=0.001)
    assert last / first == pytest.approx(63 / 60)


def served(program: str, cutoff_s: float | None = None, limit: int = 8) -> list[PublishedJob]:
    """A prefill takes 0.3 s, a round 0.8 s."""
    jobs = [PublishedJob(0.0, (2, 3)), PublishedJob(0.1, (1, 4))]
    return serve(LANES[program](limit, draft_s=0.1, target_s=0.2), jobs, cutoff_s)


def test_unified_admits_one_a_turn_and_notices_completions_at_its_end() -> None:
    first, second = served("pdv-unified")
    # prefill 0.3, round 1.1; second's prefill 1.4; rounds 2.2 and 3.0, end of the turn; round 3.8
    assert first.deliveries == [(pytest.approx(1.1), 2), (pytest.approx(2.2), 3)]
    assert second.deliveries == [(pytest.approx(3.0), 1), (pytest.approx(3.8), 4)]
    assert [first.finish_s, second.finish_s] == [pytest.approx(3.0), pytest.approx(3.8)]


def test_pd_prefills_between_the_forwards_of_a_round() -> None:
    first, second = served("pd")
    # at 0.3 the second's prefill is ahead in the stream: its forwards end at 0.4 and 0.7, the round at 1.4
    assert first.deliveries == [(pytest.approx(1.4), 2), (pytest.approx(3.0), 3)]
    assert second.deliveries == [(pytest.approx(2.2), 1), (pytest.approx(3.8), 4)]


def test_pd_admits_only_while_there_is_room() -> None:
    first, second = served("pd", limit=1)
    assert first.finish_s == pytest.approx(0.3 + 2 * 0.8)
    assert second.deliveries[0][0] == pytest.approx(first.finish_s + 0.3 + 0.8)


def test_the_cut_off_drops_what_an_unfinished_request_received() -> None:
    found = score(served("pdv-unified", cutoff_s=3.5), 3.5)
    assert found["completions"] == 1
    assert found["throughput_completed_only"] == pytest.approx(5 / 3.5)  # the first's tokens, over the cut-off
    assert found["throughput_all_tokens"] == pytest.approx(6 / 3.5)
    assert found["request_latency_mean_completed_only"] == pytest.approx(3000)
    assert found["acceptance_completed"] == pytest.approx(5 / 8)
    assert found["token_latency_p50_since_request_start"] == pytest.approx(2200)  # 1.1, 1.1, 2.2, 2.2, 2.2


def test_where_all_complete_time_runs_to_the_last_completion() -> None:
    found = score(served("pdv-unified", cutoff_s=60), 60)
    assert found["throughput_completed_only"] == pytest.approx(10 / 3.8)
    assert score([PublishedJob(0.0, (4,))], 60)["throughput_completed_only"] == 0


@pytest.mark.parametrize("arch", ["baseline", "pd", "pdv"])
def test_five_requests_have_the_published_acceptance(arch: str) -> None:
    acceptance = load_published().acceptance(("TinyLlama-1.1B->Llama-2-7b", arch, 3))
    accepted = [tokens / (K * rounds) for tokens, rounds in five_requests(acceptance, 100)]
    assert np.mean(accepted) == pytest.approx(acceptance["mean"], abs=1e-9)
    assert (min(accepted), np.median(accepted), max(accepted)) == pytest.approx(
        (acceptance["min"], acceptance["median"], acceptance["max"])
    )


@pytest.mark.parametrize("arch", ["baseline", "pd", "pdv"])
@pytest.mark.parametrize(("concurrency", "requests"), [(10, 20), (25, 50)])
def test_many_requests_have_nearly_the_published_acceptance(arch: str, concurrency: int, requests: int) -> None:
    acceptance = load_published().acceptance(("TinyLlama-1.1B->Llama-2-7b", arch, concurrency))
    mix = many_requests(acceptance, requests, 100)
    assert len(mix) == requests
    accepted = [tokens / (K * rounds) for tokens, rounds in mix]
    assert np.mean(accepted) == pytest.approx(acceptance["mean"], rel=0.03)  # rounds are whole
    assert np.median(accepted) == pytest.approx(acceptance["median"], rel=0.05)
    assert (min(accepted), max(accepted)) == pytest.approx((acceptance["min"], acceptance["max"]), rel=0.03)
