"""Laws of adaptive verification: which slots are verified, at what cost, and what that gains."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdvsim.sim.assembly import ServerParts, profile_of
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.machine.batch import Batch, apply_verdict
from pdvsim.sim.policies.planner import Planner, StepCosts
from pdvsim.sim.policies.verification import AdaptiveVerification, best_budget, widths
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

ADAPTIVE = "adaptive-verification"
CHANCES = st.floats(0.0, 1.0, allow_subnormal=False)


def scores_of(chances: list[list[float]]) -> np.ndarray[Any, Any]:
    return np.cumprod(np.array(chances), axis=1)


def tables(rows: tuple[int, int] = (1, 4), k: tuple[int, int] = (1, 3)) -> st.SearchStrategy[list[list[float]]]:
    return st.integers(*k).flatmap(
        lambda n: st.lists(st.lists(CHANCES, min_size=n, max_size=n), min_size=rows[0], max_size=rows[1])
    )


class Flat(StepCosts):
    """Steps that all cost the same."""

    def __init__(self) -> None:
        pass

    def seconds(self, rows: int, context: int, tokens: int, slots: int) -> np.ndarray[Any, Any]:
        return np.ones(slots + 1)


def rows_of(*runs: int, k: int = 5) -> Batch:
    rows = [Request(i, 0.0, 10, 50, bytes([run]) * 60) for i, run in enumerate(runs)]
    for row in rows:
        row.state.k = k
    return Batch(rows)


@given(tables(), st.data())
def test_the_budget_is_the_best_of_all(chances: list[list[float]], data: st.DataObject) -> None:
    """By brute force over all budgets and, for each, over all choices of prefixes."""
    scores = scores_of(chances)
    rows, k = scores.shape
    costs_s = np.array(data.draw(st.lists(st.floats(0.1, 10.0), min_size=rows * k + 1, max_size=rows * k + 1)))

    def expected(prefixes: tuple[int, ...]) -> float:
        return rows + sum(float(scores[row, :width].sum()) for row, width in enumerate(prefixes))

    most = [0.0] * len(costs_s)
    for prefixes in product(range(k + 1), repeat=rows):
        most[sum(prefixes)] = max(most[sum(prefixes)], expected(prefixes))
    for budget in range(rows * k + 1):
        chosen = widths(scores, budget)
        assert (chosen.sum(), chosen.max(initial=0) <= k) == (budget, True)
        assert expected(tuple(chosen.tolist())) == pytest.approx(most[budget])
    budget = best_budget(-np.sort(-scores, axis=None), rows, costs_s)
    assert most[budget] / costs_s[budget] == pytest.approx(np.max(np.array(most) / costs_s))


def test_estimates_are_means_of_beta_posteriors() -> None:
    """Drafts after the first refused one have no verdict; a request without verdicts has the mean of all."""
    controller = AdaptiveVerification(Server(controller=ADAPTIVE), Flat())
    rows = rows_of(5, 1, 0, k=5)
    controller.observe(rows[:2], [5, 1], 0.0)
    sure, doubtful, unknown = controller.estimates(rows, 3)[:, 0]
    mean, weight = controller.acceptance, controller.PRIOR_VERDICTS
    assert unknown == pytest.approx(mean)
    assert sure == pytest.approx((weight * mean + 5) / (weight + 5))
    assert doubtful == pytest.approx((weight * mean + 1) / (weight + 2))
    controller.finished(list(rows))
    assert controller.estimates(rows, 1)[0, 0] == pytest.approx(mean)


@settings(deadline=None, max_examples=10)
@given(st.floats(0.3, 2.0), st.integers(0, 4))
def test_a_noisy_signal_is_calibrated(noise: float, run: int) -> None:
    """Of first drafts with an estimate of p, a share p is accepted: estimates may be weak but not biased."""
    controller = AdaptiveVerification(Server(controller=ADAPTIVE, confidence_noise=noise), Flat())
    rng = np.random.default_rng(run)
    truth = (rng.random(4000) < controller.acceptance).astype(int)
    first = controller.estimates(rows_of(*truth.tolist(), k=1), 1)[:, 0]
    for low, high in ((0.0, 0.4), (0.4, 0.7), (0.7, 1.01)):
        among = (first >= low) & (first < high)
        if among.sum() > 200:
            assert truth[among].mean() == pytest.approx(first[among].mean(), abs=0.08)


# costs --------------------------------------------------------------------------------------------------------------


def served(**server: Any) -> Experiment:
    chosen = Server(**{"pair": "llama-3.1-8b", "drafter": "eagle3", "num_speculative_tokens": 5} | server)
    return Experiment("colocated", server=chosen)


@cache
def planner() -> Planner:
    experiment = served()
    return ServerParts(experiment, profile_of(experiment)).planner


@given(st.integers(1, 64), st.integers(1, 40_000), st.integers(0, 600))
def test_costs_at_hand_are_those_of_the_launch(rows: int, context: int, prompt: int) -> None:
    costs_s = StepCosts(planner(), 5, 64, 0).seconds(rows, rows * context, rows + prompt, 5 * rows)
    assert len(costs_s) == 5 * rows + 1
    assert np.all(np.diff(costs_s) >= 0)
    if not prompt:
        target, held = planner().models["target"], rows * context
        last = target.price(rows, 6, packed=6 * rows).seconds(held)
        first = target.price(rows, 1, packed=rows).seconds(held)
        drafted_s = planner().round_s(rows, held, 5) - planner().forward_s(rows, 6, held)
        assert costs_s[0] == pytest.approx(drafted_s + first)
        assert costs_s[-1] >= drafted_s + last - 1e-12
        wide = [target.price(rows, 6, packed=tokens).seconds(held) for tokens in range(rows + 1, 6 * rows + 1)]
        assert costs_s[-1] == pytest.approx(drafted_s + max(first, *wide))


# runs ---------------------------------------------------------------------------------------------------------------


def run(concurrency: int = 48, **server: Any) -> Result:
    chosen = served(**{"controller": ADAPTIVE, "num_speculative_tokens": 7, "max_num_seqs": 64} | server)
    traffic = Traffic(
        "random", num_prompts=4 * concurrency, input_len=200, output_len=150, max_concurrency=concurrency,
        random_range_ratio=0.3,
    )  # fmt: skip
    acceptance = Acceptance(acceptance_rate=0.7, acceptance_concentration=4)
    return simulate(replace(chosen, traffic=traffic, acceptance=acceptance))


def speed(result: Result) -> float:
    return float(result.requests["output_tokens"].sum() / result.requests["finish_s"].max())


def test_better_estimates_are_faster() -> None:
    """An oracle is faster than a noisy signal, this than verdicts alone, and these than verifying everything."""
    oracle, noisy, verdicts = (speed(run(confidence_noise=noise)) for noise in (0.0, 0.5, None))
    everything = speed(run(controller="fixed"))
    assert oracle > noisy > verdicts > everything


@pytest.mark.parametrize("rereads", [False, True])
def test_the_drafter_has_read_its_drafts_whether_they_are_verified_or_not(rereads: bool) -> None:
    """It lags only by accepted drafts that it reads again, or its own last one."""
    rows = rows_of(9, 9, 9, k=5)
    for row, width in zip(rows, (5, 3, 0), strict=True):
        row.state.k, row.state.left_out = width, 5 - width
    apply_verdict(list(rows), [5, 3, 0], 1.0, rereads)
    assert [row.state.drafter_lag for row in rows] == ([5, 3, 0] if rereads else [1, 0, 0])
    assert [row.taken.drafted for row in rows] == [5, 3, 0]
    assert [row.taken.drafts for row in rows] == [1, 1, 0]


def test_verdicts_are_sought_where_nothing_pays() -> None:
    """If no slot is worth its cost, acceptance could rise unseen: now and then each row has one verified."""

    class Dear(Flat):
        def seconds(self, rows: int, context: int, tokens: int, slots: int) -> np.ndarray[Any, Any]:
            return 1.0 + 10.0 * np.arange(slots + 1)

    controller = AdaptiveVerification(Server(controller=ADAPTIVE), Dear())
    taken = []
    for _ in range(2 * (controller.BLIND_STEPS + 1)):
        rows = rows_of(0, 3, k=4)
        controller.select(rows, ())
        taken.append([row.state.k for row in rows])
    assert taken.count([1, 1]) == 2
    assert taken.count([0, 0]) == 2 * controller.BLIND_STEPS


def test_the_shape_of_published_figures() -> None:
    """vLLM pull request 52362, DeepSeek-V4 at k=7, tokens per second of plain, all verified and adaptive.

    382, 970, 902 at concurrency 4; 4,095, 6,712, 7,144 at 64; 8,879, 7,852, 13,325 at 256. Verifying everything wins at
    a low load and is slower than plain decoding at a high one, where adaptive verification is faster than both.
    """
    hardware = Hardware(gpu="b200", tensor_parallel_size=8, engine="vllm")

    def rate(concurrency: int, **server: Any) -> float:
        traffic = Traffic(
            "random", num_prompts=2 * concurrency, input_len=220, output_len=512, max_concurrency=concurrency,
            random_range_ratio=0.3,
        )  # fmt: skip
        chosen = Server("deepseek-v3", drafter="mtp", max_num_seqs=256, **server)
        acceptance = Acceptance(acceptance_rate=0.72, acceptance_concentration=4)
        result = simulate(Experiment("colocated", traffic, acceptance, chosen, hardware))
        times, tokens = result.deliveries["time_s"], result.deliveries["tokens"]
        half = (times > 0.2 * times.max()) & (times < 0.7 * times.max())  # without start and drain
        return float(tokens[half].sum() / (0.5 * times.max()))

    ways: tuple[dict[str, Any], ...] = (
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 7},
        {"num_speculative_tokens": 7, "controller": ADAPTIVE, "confidence_noise": 0.5},
    )
    plain, everything, adaptive = np.array([[rate(c, **way) for c in (4, 256)] for way in ways])
    assert everything[0] > 1.4 * plain[0]
    assert adaptive[0] > 1.4 * plain[0]
    assert everything[1] < 0.95 * plain[1]
    assert adaptive[1] > 1.02 * plain[1]
