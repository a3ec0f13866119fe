"""Acceptance streams: Leviathan's law, the coupling between rates, vLLM's per-position rates, and exact replay."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import walk
from refusals import one_line
from scipy import stats

from pdvsim.sim.config import ACCEPTANCE_MODELS, Acceptance, Experiment
from pdvsim.sim.limits import MAX_DRAFT
from pdvsim.sim.relevance import refuse_idle
from pdvsim.sim.workload import acceptance as acc
from pdvsim.sim.workload.acceptance import LONGEST, Streams, dropped_tokens, expected_tokens, mean_round, measured


def draw(acceptance: Acceptance, lengths: list[int], seed: int = 0) -> list[bytes]:
    coins, rates = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
    return Streams(acceptance, coins, rates).draw(np.array(lengths, dtype=np.int64))


def test_runs_are_what_a_loop_over_the_coins_finds() -> None:
    lengths = [1, 2, 7, 40, 300, 1]
    coins = np.random.default_rng(np.random.SeedSequence(0).spawn(2)[0])  # one for each position, in order
    for length, run in zip(lengths, draw(Acceptance(acceptance_rate=0.85), lengths), strict=True):
        assert len(run) == length
        flips = (coins.random(length + MAX_DRAFT, dtype=np.float32) < np.float32(0.85)).tolist()
        for p in range(length):
            stop = flips.index(False, p) if False in flips[p:] else len(flips)
            # The last flip of the tail ends a run; no draft is long enough to notice.
            assert min(run[p], MAX_DRAFT) == min(stop - p, MAX_DRAFT)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_tokens_per_round_follow_leviathan(alpha: float, k: int) -> None:
    """Rounds are independent: their mean is within 4 standard errors of the expectation."""
    (runs,) = draw(Acceptance(acceptance_rate=alpha), [200_000])
    tokens = np.array(walk(runs, k)) + 1
    error = tokens.std() / len(tokens) ** 0.5
    assert abs(tokens.mean() - expected_tokens(alpha, k)) <= 4 * error + 1e-9


def test_expected_tokens_is_the_published_formula() -> None:
    for alpha in (0.0, 0.25, 0.6, 0.99):
        for k in (0, 1, 5, 32):
            assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.8, 5) == pytest.approx(3.68928)  # worked by hand: 1 + .8 + .64 + .512 + .4096 + .32768


def test_end_of_a_request_is_not_biased() -> None:
    """Drafts at the last output position reach beyond it; they are accepted as often as any others."""
    alpha, count = 0.9, 20_000
    runs = draw(Acceptance(acceptance_rate=alpha), [3] * count)
    for j in (1, 8, MAX_DRAFT - 1):
        accepted = sum(run[-1] >= j for run in runs)
        assert stats.binomtest(accepted, count, alpha**j).pvalue > 1e-4
    (certain,) = draw(Acceptance(acceptance_rate=1.0), [400])
    assert min(certain) >= MAX_DRAFT - 1
    assert certain[0] == 255


@given(
    rates=st.tuples(st.floats(0, 1), st.floats(0, 1)), lengths=st.lists(st.integers(1, 80), min_size=1, max_size=5),
    k=st.integers(1, MAX_DRAFT), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_a_higher_rate_never_needs_more_rounds(
    rates: tuple[float, float], lengths: list[int], k: int, seed: int
) -> None:
    low, high = sorted(rates)
    slow = draw(Acceptance(acceptance_rate=low), lengths, seed)
    fast = draw(Acceptance(acceptance_rate=high), lengths, seed)
    for a, b in zip(slow, fast, strict=True):
        assert all(x <= y for x, y in zip(a, b, strict=True))
        assert len(walk(b, k)) <= len(walk(a, k))


def test_streams_do_not_depend_on_what_follows_or_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 200).tolist()
    for form in (
        Acceptance(),
        Acceptance(acceptance_concentration=8.0),
        Acceptance(synthetic_acceptance_rates=(0.9, 0.4)),
        Acceptance(acceptance_model="cnn-eagle3"),
    ):
        whole = draw(form, lengths)
        first = draw(form, lengths[:70])
        assert whole[:70] == first
        with monkeypatch.context() as patch:
            patch.setattr(acc, "BLOCK", 1)
            assert draw(form, lengths) == whole


def test_beta_rates_have_the_mean_and_the_concentration_asked_for() -> None:
    mean, concentration, count = 0.7, 6.0, 20_000
    form = Acceptance(acceptance_rate=mean, acceptance_concentration=concentration)
    accepted = [np.count_nonzero(np.frombuffer(run, dtype=np.uint8)) for run in draw(form, [30] * count)]
    law = stats.betabinom(30, mean * concentration, (1 - mean) * concentration)  # each request flips by its own rate
    few = 8  # merged with fewer: expected too seldom for the test
    seen = np.bincount(np.maximum(accepted, few), minlength=31)[few:]
    expected = count * np.array([law.cdf(few), *law.pmf(range(few + 1, 31))])
    assert stats.chisquare(seen, expected, sum_check=False).pvalue > 1e-3
    for edge in (0.0, 1.0):
        (one,) = draw(Acceptance(acceptance_rate=edge, acceptance_concentration=5.0), [20])
        assert walk(one, 4) == walk(draw(Acceptance(acceptance_rate=edge), [20])[0], 4)


@pytest.mark.parametrize(("alpha", "k"), [(0.3, 1), (0.6, 4), (0.9, 8), (1.0, 3), (0.5, 0)])
def test_dropped_tokens_are_what_last_rounds_have_beyond_the_end(alpha: float, k: int) -> None:
    """Requests of 400 to 419 tokens, so that rounds of one length do not all end alike."""
    lengths = [400 + i % 20 for i in range(600)]
    over = [sum(a + 1 for a in walk(runs, k)) - len(runs) for runs in draw(Acceptance(acceptance_rate=alpha), lengths)]
    assert dropped_tokens(alpha, k) == pytest.approx(np.mean(over), abs=4 * np.std(over) / np.sqrt(len(over)) + 1e-9)


def test_unconditional_rates_are_reproduced_per_draft_position() -> None:
    """vLLM's convention: the i-th draft of a round is accepted in a share v_i of all rounds."""
    rates = (0.85, 0.6, 0.6, 0.25)
    (runs,) = draw(Acceptance(synthetic_acceptance_rates=rates), [100_000])
    counts = np.array(walk(runs, 8))
    for i, rate in enumerate(rates):
        assert stats.binomtest(int((counts > i).sum()), len(counts), rate).pvalue > 1e-4
    assert counts.max() == len(rates)  # no rate, no acceptance
    (sure,) = draw(Acceptance(synthetic_acceptance_rates=(1.0, 1.0, 0.0)), [50])
    assert set(sure) == {2}


@given(data=st.data(), k=st.integers(1, 8))
def test_a_trace_is_replayed_exactly(data: st.DataObject, k: int) -> None:
    lines = data.draw(st.lists(st.lists(st.integers(0, k), min_size=1, max_size=12), min_size=1, max_size=3))
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    for i, run in enumerate(acc.replay(lines, k, np.array(lengths))):
        recorded = lines[i % len(lines)]
        rounds = walk(run, k, start=acc.FIRST_ROUND)
        assert len(run) == lengths[i]
        assert rounds == (recorded * len(run))[: len(rounds)]


@pytest.mark.parametrize(("text", "message"), [
    ("", "holds no round"),
    ("[1, 2]\n[256]\n", "line 2: item 0 is 256"),
    ("[true]", "item 0 is True"),
    ("{}", "line 1: holds no list"),
])  # fmt: skip
def test_a_bad_trace_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text(text)
    with one_line(path, message, "accepted: one JSON list of accepted counts from 0 to 255"):
        acc.read_trace(str(path))


def test_responses_of_vllm_are_traces(tmp_path: Path) -> None:
    """As vLLM writes metrics.speculative_decoding with --per-request-spec-decode-metrics detailed."""
    path = tmp_path / "responses.jsonl"
    drafts = {
        "mean_acceptance_length": 2.0, "acceptance_histogram": [1, 1, 1, 0], "num_spec_steps": 3, "num_spec_tokens": 3,
        "per_step_accepted": [2, 0, 1], "per_step_drafted": [3, 3, 1],
    }  # fmt: skip
    response = {"id": "x", "choices": [], "metrics": {"speculative_decoding": drafts}}
    path.write_text(json.dumps(response) + "\n[3, 1]\n", encoding="utf-8")
    assert acc.read_trace(str(path)) == [[2, 0, 1], [3, 1]]
    path.write_text(json.dumps({"metrics": {"speculative_decoding": None}}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no list of counts"):
        acc.read_trace(str(path))


# recorded acceptance -------------------------------------------------------------------------------------------------


# Mean tokens per round for drafts of 1 to 7 tokens: the recorded answers of SpecDecode-Bench (Llama-3.1-8B) read
# round by round, once.
RECORDED: dict[str, tuple[float, ...]] = {
    "cnn-eagle3": (1.674, 2.083, 2.329, 2.483, 2.578, 2.645, 2.694),
    "cnn-ngram": (1.205, 1.289, 1.334, 1.361, 1.378, 1.390, 1.398),
    "cnn-suffix": (1.4225, 1.572, 1.628, 1.650, 1.664, 1.670, 1.674),
    "gsm8k-eagle3": (1.699, 2.134, 2.391, 2.558, 2.666, 2.726, 2.765),
    "gsm8k-ngram": (1.109, 1.147, 1.164, 1.172, 1.177, 1.180, 1.183),
    "gsm8k-suffix": (1.415, 1.543, 1.575, 1.584, 1.5885, 1.589, 1.590),
    "instructcoder-eagle3": (1.681, 2.095, 2.348, 2.515, 2.625, 2.702, 2.760),
    "instructcoder-ngram": (1.509, 1.823, 2.028, 2.188, 2.289, 2.370, 2.448),
    "instructcoder-suffix": (1.692, 2.153, 2.444, 2.646, 2.781, 2.905, 2.983),
    "sharegpt-eagle3": (1.661, 2.038, 2.254, 2.390, 2.478, 2.539, 2.582),
    "sharegpt-ngram": (1.236, 1.339, 1.395, 1.428, 1.451, 1.467, 1.479),
    "sharegpt-suffix": (1.419, 1.583, 1.657, 1.696, 1.722, 1.7385, 1.751),
}
LENGTH = {"cnn": 323, "gsm8k": 166, "instructcoder": 262, "sharegpt": 728}  # mean tokens of the recorded answers
# 10th, 50th and 90th percentile over requests of their mean tokens per round at k = 7, of the same recording.
SPREAD: dict[str, tuple[float, float, float]] = {
    "cnn-eagle3": (2.21, 2.68, 3.25),
    "cnn-ngram": (1.18, 1.37, 1.71),
    "gsm8k-eagle3": (2.40, 2.75, 3.31),
    "sharegpt-eagle3": (1.98, 2.63, 3.43),
}


def drawn(name: str, lengths: list[int]) -> list[bytes]:
    return draw(Acceptance(acceptance_model=name), lengths)


def test_every_name_is_shipped_and_none_else_is_taken() -> None:
    assert set(ACCEPTANCE_MODELS) == set(RECORDED)
    for name in RECORDED:
        assert measured(name).tokens_per_round == pytest.approx(RECORDED[name], abs=6e-4)
    with pytest.raises(ValueError, match=r"acceptance-model must be one of cnn-eagle3, .*got llama"):
        Acceptance(acceptance_model="llama")
    with pytest.raises(ValueError, match=r"--acceptance-concentration .* without .*--acceptance-model"):
        refuse_idle([Experiment(acceptance=Acceptance(acceptance_model="cnn-ngram", acceptance_concentration=3.0))])


@pytest.mark.parametrize("name", RECORDED)
def test_rounds_gain_what_was_recorded(name: str) -> None:
    length = LENGTH[name.partition("-")[0]]
    runs = drawn(name, [length] * (500_000 // length))
    assert max(max(one) for one in runs) <= LONGEST
    for k, tokens in enumerate(RECORDED[name], start=1):
        assert mean_round(runs, k)[0] == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize("name", SPREAD)
def test_requests_differ_as_recorded(name: str) -> None:
    """Within 8%: a class is one of six, and what a request gains is its class's and chance."""
    runs = drawn(name, [300] * 1500)
    spread = np.percentile([1 + np.mean(walk(one, 7, start=1)) for one in runs], [10, 50, 90])
    assert spread == pytest.approx(SPREAD[name], rel=0.08)


def test_mean_round_is_a_walk() -> None:
    runs = [bytes([9, 2, 0, 0, 1, 0, 3]), bytes([0, 0])]  # the first position is the prompt's token
    # k=2: 2+1, 1+1, 3 of which two lie past the end; then 1
    assert mean_round(runs, 2) == pytest.approx(((3 + 2 + 3 + 1) / 4, 4 / 2))
    drawn_runs = drawn("sharegpt-ngram", [40] * 50)
    rounds = [[1 + accepted for accepted in walk(one, 3, start=1)] for one in drawn_runs]
    assert mean_round(drawn_runs, 3)[0] == pytest.approx(sum(map(sum, rounds)) / sum(map(len, rounds)))
