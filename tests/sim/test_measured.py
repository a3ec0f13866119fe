"""Measured acceptance: the shipped models against figures of the recording, for any lengths and in any chunks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from planning import walk

from pdvsim.sim.config import ACCEPTANCE_MODELS, Acceptance
from pdvsim.sim.workload.acceptance import LONGEST, Streams, mean_round, measured

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


def drawn(name: str, lengths: list[int], seed: int = 0) -> list[bytes]:
    coins, classes = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
    return Streams(Acceptance(acceptance_model=name), coins, classes).draw(np.array(lengths, dtype=np.int64))


def test_every_name_is_shipped_and_none_else_is_taken() -> None:
    assert set(ACCEPTANCE_MODELS) == set(RECORDED)
    for name in RECORDED:
        assert measured(name).tokens_per_round == pytest.approx(RECORDED[name], abs=6e-4)
    with pytest.raises(ValueError, match=r"acceptance-model must be one of cnn-eagle3, .*got llama"):
        Acceptance(acceptance_model="llama")
    with pytest.raises(ValueError, match=r"give one of .*--acceptance-model"):
        Acceptance(acceptance_model="cnn-ngram", acceptance_concentration=3.0)


@pytest.mark.parametrize("length", [LENGTH, 800])
@pytest.mark.parametrize("name", RECORDED)
def test_rounds_gain_what_was_recorded(name: str, length: Mapping[str, int] | int) -> None:
    length = length if isinstance(length, int) else length[name.partition("-")[0]]
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
