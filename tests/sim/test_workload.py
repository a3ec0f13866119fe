"""Requests: arrivals by their law, common random numbers, and a built-in ShareGPT true to its source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pdvsim.sim.config import Acceptance, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.machine.prefix import BLOCK, block_hashes
from pdvsim.sim.workload import datasets
from pdvsim.sim.workload.requests import make_requests

ALPHA = Acceptance()


TALKS = {"request_rate": np.inf, "num_turns": 3, "num_prefixes": 4, "prefix_len": 50, "think_time_s": 1.0}


def facts(requests: list[Request]) -> list[tuple[Any, ...]]:
    return [
        (r.id, r.arrival_s, r.prompt_tokens, r.output_tokens, r.accept_runs, r.session, r.turn, r.think_s,
         *block_hashes(r.chain, 0, r.prompt_tokens // BLOCK))
        for r in requests
    ]  # fmt: skip


def lengths(requests: list[Request]) -> list[tuple[int, int]]:
    return [(r.prompt_tokens, r.output_tokens) for r in requests]


@pytest.fixture
def mooncake(tmp_path: Path) -> str:
    """Fifty requests with distinct lengths, the later half written first."""
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 5000 + 100 * i, "input_length": i + 1, "output_length": 2 * i + 1} for i in range(50)]
    path.write_text("\n".join(json.dumps(row) for row in rows[25:] + rows[:25]))
    return str(path)


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_gaps_follow_the_gamma_law(burstiness: float) -> None:
    rate = 5.0
    traffic = Traffic("random", request_rate=rate, burstiness=burstiness, num_prompts=5000, output_len=1)
    arrivals = [r.arrival_s for r in make_requests(traffic, ALPHA)]
    gaps = np.diff(arrivals, prepend=0.0)
    assert stats.kstest(gaps, "gamma", args=(burstiness, 0, 1 / (rate * burstiness))).pvalue > 1e-3
    assert abs(stats.pearsonr(gaps[1:], gaps[:-1]).statistic) < 0.06  # independent of each other
    assert gaps.min() >= 0


@settings(max_examples=40)
@given(
    few=st.integers(1, 60), more=st.integers(0, 60), seed=st.integers(0, 2**53),
    name=st.sampled_from(["random", "sharegpt"]), burstiness=st.floats(0.2, 5),
    concentration=st.none() | st.floats(0.5, 50), talks=st.sampled_from([{}, TALKS]),
)  # fmt: skip
def test_more_requests_leave_the_first_ones_as_they_were(
    few: int, more: int, seed: int, name: Any, burstiness: float, concentration: float | None, talks: dict[str, Any]
) -> None:
    traffic = Traffic(
        name, num_prompts=few + more, burstiness=burstiness, seed=seed, random_range_ratio=0.5,
        input_len=64, output_len=32, **({"request_rate": 3.0} | talks),
    )  # fmt: skip
    form = Acceptance(acceptance_concentration=concentration)
    whole = make_requests(traffic, form)
    assert facts(whole)[:few] == facts(make_requests(replace(traffic, num_prompts=few), form))
    assert [r.id for r in whole] == list(range(few + more))


def test_another_rate_changes_arrivals_only() -> None:
    slow = make_requests(Traffic(num_prompts=200, request_rate=2.0), ALPHA)
    fast = make_requests(Traffic(num_prompts=200, request_rate=8.0), ALPHA)
    closed = make_requests(Traffic(num_prompts=200), ALPHA)
    assert lengths(slow) == lengths(fast) == lengths(closed)
    assert [r.accept_runs for r in slow] == [r.accept_runs for r in fast] == [r.accept_runs for r in closed]
    assert [r.arrival_s for r in slow] == pytest.approx([4 * r.arrival_s for r in fast])


def test_acceptance_changes_neither_arrivals_nor_lengths() -> None:
    traffic = Traffic(num_prompts=200, request_rate=2.0)
    one = make_requests(traffic, ALPHA)
    other = make_requests(traffic, Acceptance(acceptance_concentration=3.0))
    assert [(r.arrival_s, *x) for r, x in zip(one, lengths(one), strict=True)] == [
        (r.arrival_s, *x) for r, x in zip(other, lengths(other), strict=True)
    ]


def test_a_seed_gives_the_same_requests_and_another_seed_others() -> None:
    traffic = Traffic(num_prompts=50, request_rate=2.0, seed=7)
    assert facts(make_requests(traffic, ALPHA)) == facts(make_requests(traffic, ALPHA))
    other = make_requests(replace(traffic, seed=8), ALPHA)
    one = make_requests(traffic, ALPHA)
    assert lengths(one) != lengths(other)
    assert one[0].arrival_s != other[0].arrival_s


def test_random_lengths_fill_their_range_evenly() -> None:
    fixed = make_requests(Traffic("random", num_prompts=5), ALPHA)
    assert lengths(fixed) == [(1024, 128)] * 5
    traffic = Traffic("random", num_prompts=20_000, input_len=10, output_len=5, random_range_ratio=0.35)
    sample = np.array(lengths(make_requests(traffic, ALPHA)))
    for column, (low, high) in zip(sample.T, ((6, 14), (3, 7)), strict=True):  # floor and ceil, as vLLM
        counts = np.bincount(column, minlength=high + 1)
        assert counts[:low].sum() == 0
        assert len(counts) == high + 1
        assert stats.chisquare(counts[low:]).pvalue > 1e-3
    assert min(lengths(make_requests(replace(traffic, input_len=1, random_range_ratio=0.9), ALPHA)))[0] == 1


def test_built_in_sharegpt_is_true_to_its_source() -> None:
    """Mean, p50, p95 and p99 of both lengths within 3%, and Spearman's rho within 0.03, of the filtered source."""
    source = json.loads(datasets.SHAREGPT_MODEL.read_text())["source_figures"]
    assert source["rows"] == 52_211
    prompt, output = np.array(lengths(make_requests(Traffic(num_prompts=100_000, output_len=None), ALPHA))).T
    for tokens, figures in ((prompt, source["prompt"]), (output, source["output"])):
        assert tokens.mean() == pytest.approx(figures["mean"], rel=0.03)
        for level in (50, 95, 99):
            assert np.percentile(tokens, level) == pytest.approx(figures[f"p{level}"], rel=0.03)
    assert stats.spearmanr(prompt, output).statistic == pytest.approx(source["spearman"], abs=0.03)
    assert prompt.min() >= 4
    assert output.min() >= 4
    assert prompt.max() <= 1024
    assert (prompt + output).max() <= 2048


def test_a_file_is_shuffled_and_drawn_again_when_it_is_too_small(mooncake: str) -> None:
    rows = [(i + 1, 2 * i + 1) for i in range(50)]
    sample = lengths(make_requests(Traffic("mooncake", mooncake, num_prompts=130), ALPHA))
    assert sorted(sample[:50]) == rows
    assert sample[:50] != rows
    assert set(sample[50:]) <= set(rows)
    assert sample[:50] != lengths(make_requests(Traffic("mooncake", mooncake, num_prompts=50, seed=1), ALPHA))


def test_timestamps_are_replayed_in_order_from_zero(mooncake: str) -> None:
    traffic = Traffic("mooncake", mooncake, num_prompts=30, use_trace_timestamps=True)
    requests = make_requests(traffic, ALPHA)
    assert [r.arrival_s for r in requests] == pytest.approx([0.1 * i for i in range(30)])
    assert lengths(requests) == [(i + 1, 2 * i + 1) for i in range(30)]
    with pytest.raises(ValueError, match=r"num-prompts is 51, but .*trace\.jsonl holds 50 requests"):
        make_requests(replace(traffic, num_prompts=51), ALPHA)
