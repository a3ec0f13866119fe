"""Draft-length controllers and the adaptive choice, against brute force over the same latency model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from pdvsim.sim.acceptance import expected_tokens
from pdvsim.sim.clock import Clock
from pdvsim.sim.config import Acceptance, Arch, Contention, Experiment, Priority, Server, Traffic
from pdvsim.sim.contention import Sharing
from pdvsim.sim.controllers import AcceptanceEstimate, Controller, Feedback, Goodput, make_controller
from pdvsim.sim.core import KINDS, Chunk, Request
from pdvsim.sim.host import HostTimes, SimulatedHost
from pdvsim.sim.latency import Latency
from pdvsim.sim.models import pair
from pdvsim.sim.planner import Planner
from pdvsim.sim.policies.base import Context
from pdvsim.sim.policies.hybrid import Adaptive
from pdvsim.sim.profile import builtin
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

PAIR = "tinyllama-1.1b:llama-2-7b"
DRAFT = KINDS.index("draft")
HOST = HostTimes(launch_s=10e-6, completion_s=20e-6, handoff_s=20e-6)


def planner(priority: Priority = "none", contention: Contention = "fluid", dear_draft: float = 1.0) -> Planner:
    """The built-in latency model; `dear_draft` makes the GPU, as the planner sees it, that much slower at drafting."""
    profile, models = builtin("h200"), pair(PAIR)
    fits: Any = {
        "draft": Latency(models.draft, profile.fit(models.draft).scaled(dear_draft)),
        "target": Latency(models.target, profile.fit(models.target)),
    }
    peak = (profile.gpu.flops_per_s, profile.gpu.bandwidth_bytes_per_s)
    return Planner(fits, Sharing(contention, priority, profile.contention), peak, HOST)


@pytest.mark.parametrize(("rows", "k", "context"), [(1, 1, 100), (16, 4, 100), (128, 8, 4000)])
def test_a_dear_draft_takes_so_many_times_as_long(rows: int, k: int, context: int) -> None:
    """By `dear_draft` the drafter's forwards, and they alone, are slower, whatever the batch."""
    dear, fair = planner(dear_draft=4.0), planner()
    draft_s = Planner._solo(fair.models["draft"].shape(rows, 1, k), rows * context)
    assert dear.round_s(rows, rows * context, k) - fair.round_s(rows, rows * context, k) == pytest.approx(3 * draft_s)
    assert dear.decode_s(rows, rows * context) == fair.decode_s(rows, rows * context)


def batch(rows: int, context: int) -> list[Request]:
    """Running requests with `context` tokens cached each."""
    requests = [Request(i, 0.0, context, 1000, bytes(1000)) for i in range(rows)]
    for request in requests:
        request.context = context
    return requests


def draft_lengths(result: Result) -> Any:
    launches = result.launches
    return launches["steps"][launches["kind"] == DRAFT]


def tokens_per_s(result: Result) -> float:
    return float(result.requests["output_tokens"].sum() / result.requests["finish_s"].max())


# fixed ------------------------------------------------------------------------------------------------------------


def test_fixed_never_moves() -> None:
    controller = make_controller(Server(num_speculative_tokens=3), planner())
    assert type(controller) is Controller
    for accepted in (0, 3) * 50:
        controller.observe(3, accepted, accepted < 3, 0.0)
        assert controller.draft_length(batch(4, 100), 1000, 0.0) == 3


def test_estimate_is_the_maximum_likelihood_rate() -> None:
    """Drafts behind the first rejected one were never judged: with 10,000 rounds of 4 at 0.7 it finds 0.7, not less."""
    rng = np.random.default_rng(0)
    estimate = AcceptanceEstimate(memory=1e6)
    for _ in range(10_000):
        accepted = int(np.argmin([*(rng.random(4) < 0.7), False]))
        estimate.observe(accepted, accepted < 4)
    assert estimate.rate == pytest.approx(0.7, abs=0.01)


# feedback ---------------------------------------------------------------------------------------------------------


def feed(controller: Feedback, share: float, verdicts: int, queue_depth: int = 0, rows: int = 1) -> list[int]:
    """Draft lengths over so many rounds, all of the same time, each with that share of 100 drafts accepted."""
    lengths = []
    for i in range(verdicts):
        lengths.append(controller.draft_length(batch(rows, 100), queue_depth, 0.02 * i))
        controller.observe(100, round(100 * share), rejected=1, now_s=0.02 * i + 0.01)
    return lengths


def feedback(k: int = 4, low: int = 2, high: int = 6) -> Feedback:
    server = Server(
        controller="feedback", num_speculative_tokens=k, min_speculative_tokens=low, max_speculative_tokens=high
    )
    return Feedback(server)


def test_feedback_lengthens_to_its_maximum_and_shortens_to_its_minimum() -> None:
    controller = feedback()
    up = feed(controller, 0.95, 200)
    assert up[0] == 4
    assert up[-1] == 6
    down = feed(controller, 0.1, 200)
    assert down[-1] == 2
    for lengths in (up, down):
        steps = np.flatnonzero(np.diff(lengths))
        assert set(np.diff(lengths)) <= {-1, 0, 1}
        assert len(steps) < 2 or np.diff(steps).min() >= Feedback.PATIENCE


def test_feedback_starts_inside_its_limits() -> None:
    assert feedback(k=8, low=2, high=6).k == 6
    assert feedback(k=1, low=2, high=6).k == 2


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7])
def test_feedback_rests_between_its_thresholds(share: float) -> None:
    """Hysteresis: what made it longer is well above what makes it shorter again."""
    assert set(feed(feedback(), share, 300)) == {4}


def test_feedback_does_not_flap_around_a_threshold() -> None:
    """A share that swings by 0.1 around either threshold moves it one way or not at all, never back and forth."""
    for around in (Feedback.LENGTHEN, Feedback.SHORTEN):
        controller = feedback(low=1, high=8)
        lengths = [k for i in range(100) for k in feed(controller, around + (0.1 if i % 2 else -0.1), 8)]
        moves = {int(step) for step in np.diff(lengths)} - {0}
        assert len(moves) <= 1


def test_feedback_shortens_when_drafts_pile_up_before_verify() -> None:
    """Though nearly all are accepted."""
    assert feed(feedback(), 0.95, 200, queue_depth=10, rows=4)[-1] == 2
    assert feed(feedback(), 0.95, 200, queue_depth=8, rows=4)[-1] == 6  # two batches are not too many


@pytest.mark.parametrize(("slow_round_s", "pause_s", "ends_at"), [(0.05, 0.0, 2), (0.01, 0.04, 6)])
def test_feedback_shortens_when_some_rounds_take_far_longer_than_most(
    slow_round_s: float, pause_s: float, ends_at: int
) -> None:
    """One round in ten takes five times as long as the others: the 95th percentile is five times the median.

    Where it is the pause before a round that is long, and not the round, drafts get longer all the same.
    """
    controller, now_s = feedback(), 0.0
    for i in range(200):
        slow = i % 10 == 0
        now_s += pause_s if slow else 0.0
        controller.draft_length(batch(1, 100), 0, now_s)
        now_s += slow_round_s if slow else 0.01
        controller.observe(100, 95, 1, now_s)
    assert controller.k == ends_at


@pytest.mark.parametrize("arch", ["colocated", "pd", "pdv", "pdv-unified", "pdv-hybrid"])
@pytest.mark.parametrize(("rate", "ends_at"), [(0.98, 6), (0.1, 2)])
def test_feedback_in_a_run(arch: Arch, rate: float, ends_at: int) -> None:
    """A steady load: it ends at the right limit, and has never been outside either."""
    result = simulate(
        Experiment(
            arch,
            Traffic(dataset_name="random", num_prompts=48, input_len=64, output_len=256, max_concurrency=16),
            Acceptance(acceptance_rate=rate),
            Server(controller="feedback", min_speculative_tokens=2, max_speculative_tokens=6),
        )
    )
    lengths = draft_lengths(result)
    assert lengths.min() >= 2
    assert lengths.max() <= 6
    assert np.median(lengths[-len(lengths) // 4 :]) == ends_at


def test_feedback_does_not_take_idle_time_for_slow_rounds() -> None:
    """Nine requests in ten arrive at an idle server and nearly all drafts are accepted: drafts have to get longer."""
    result = simulate(
        Experiment(
            "pdv",
            Traffic(dataset_name="random", num_prompts=200, input_len=64, output_len=48, request_rate=2),
            Acceptance(acceptance_rate=0.98),
            Server(controller="feedback"),
        )
    )
    assert draft_lengths(result)[-200:].mean() > 6


def test_feedback_does_not_take_arrivals_for_drafts_that_wait() -> None:
    """Colocated has no verify queue: requests that wait for admission must not shorten the drafts."""
    result = simulate(
        Experiment(
            "colocated",
            Traffic(dataset_name="random", num_prompts=100, input_len=64, output_len=200),
            Acceptance(acceptance_rate=0.98),
            Server(controller="feedback", max_num_seqs=8),
        )
    )
    assert draft_lengths(result).mean() > 6


# the drafter's temperature ----------------------------------------------------------------------------------------


def hot(**server: Any) -> Experiment:
    """The drafter starts at temperature 1.6, where acceptance is 0.9 - 0.6 * 0.8 = 0.42 instead of 0.9."""
    fixed_k = {"num_speculative_tokens": 4, "min_speculative_tokens": 4, "max_speculative_tokens": 4}
    return Experiment(
        "colocated",
        Traffic(dataset_name="random", num_prompts=64, input_len=64, output_len=400, max_concurrency=8),
        Acceptance(acceptance_rate=0.9, acceptance_temperature_slope=0.8),
        Server(draft_temperature=1.6, **fixed_k | server),
    )


def tokens_a_round(result: Result) -> tuple[float, float]:
    """Mean tokens of the first 200 deliveries after the prompts', and of the last fifth of the run."""
    tokens = result.deliveries["tokens"]
    return float(tokens[8:208].mean()), float(tokens[-len(tokens) // 5 :].mean())


def test_temperature_is_moved_to_where_more_is_accepted() -> None:
    """Left alone 1.7 tokens a round (rate 0.42); moved, over 3.05 (rate 0.75) on the way to 4.1 (rate 0.9)."""
    left_alone = tokens_a_round(simulate(hot()))
    assert left_alone == pytest.approx([expected_tokens(0.42, 4)] * 2, rel=0.12)
    first, last = tokens_a_round(simulate(hot(controller="feedback", feedback_temperature=True)))
    assert first < 2.5
    assert last > expected_tokens(0.75, 4)


def test_temperature_control_is_refused_where_acceptance_does_not_respond() -> None:
    with pytest.raises(ValueError, match="--acceptance-temperature-slope"):
        Experiment("pdv", server=Server(controller="feedback", feedback_temperature=True))
    with pytest.raises(ValueError, match="--controller feedback"):
        Experiment(
            "pdv",
            acceptance=Acceptance(acceptance_temperature_slope=0.5),
            server=Server(controller="goodput", feedback_temperature=True),
        )


# goodput ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 128])
@pytest.mark.parametrize("context", [64, 640, 6400])
def test_goodput_picks_what_brute_force_picks(rows: int, context: int) -> None:
    """Before any verdict the estimate is 0.6 exactly."""
    plan = planner()
    controller = Goodput(Server(controller="goodput", max_speculative_tokens=16), plan)
    speeds = {k: expected_tokens(0.6, k) / plan.round_s(rows, rows * context, k) for k in range(1, 17)}
    assert controller.draft_length(batch(rows, context), 0, 0.0) == max(speeds, key=lambda k: speeds[k])


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8, 0.95])
def test_goodput_learns_the_rate(rate: float) -> None:
    """After 1000 rounds of 8 drafts its choice is within 1% of the best at the true rate, for any batch."""
    plan = planner()
    controller = Goodput(Server(controller="goodput", max_speculative_tokens=16), plan)
    rng = np.random.default_rng(1)
    for _ in range(1000):
        accepted = int(np.argmin([*(rng.random(8) < rate), False]))
        controller.observe(8, accepted, int(accepted < 8), 0.0)
    for rows in (1, 4, 16, 64, 128):
        speeds = {k: expected_tokens(rate, k) / plan.round_s(rows, rows * 500, k) for k in range(1, 17)}
        assert speeds[controller.draft_length(batch(rows, 500), 0, 0.0)] >= 0.99 * max(speeds.values())


@pytest.mark.parametrize("arch", ["colocated", "pd"])
@pytest.mark.parametrize("concurrency", [1, 64])
@pytest.mark.parametrize("rate", [0.4, 0.85])
def test_goodput_is_as_fast_as_the_best_fixed_length(arch: Arch, concurrency: int, rate: float) -> None:
    """On a stationary load, and within 2%: it has to learn the rate first."""
    traffic = Traffic(
        dataset_name="random", num_prompts=max(8, concurrency), input_len=128, output_len=300,
        max_concurrency=concurrency,
    )  # fmt: skip

    def speed(**server: Any) -> float:
        return tokens_per_s(simulate(Experiment(arch, traffic, Acceptance(acceptance_rate=rate), Server(**server))))

    fixed = [speed(num_speculative_tokens=k) for k in (1, 2, 3, 4, 5, 6, 8)]
    assert speed(controller="goodput") >= 0.98 * max(fixed)


def test_goodput_is_within_its_limits() -> None:
    plan = planner()
    for rate, expected in ((0.999, 5), (0.001, 3)):
        settings = Server(controller="goodput", min_speculative_tokens=3, max_speculative_tokens=5)
        controller = Goodput(settings, plan)
        controller.estimate._accepted, controller.estimate._tried = 1e6 * rate, 1e6
        assert controller.draft_length(batch(1, 100), 0, 0.0) == expected


# the planner ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("contention", "together"), [("max", max), ("serial", lambda draft, verify: draft + verify)])
def test_overlapped_batches_are_handed_over_twice(contention: Contention, together: Callable[..., float]) -> None:
    """Two batches change places: free overlap takes the longer of the two, none their sum; and the host's time twice.

    A round in one lane is a draft, a verify, and a launch and a completion.
    """
    plan = planner(contention=contention)
    for rows, k in ((1, 1), (8, 4), (64, 2)):
        context = rows * 300
        verify_s = plan.models["target"].shape(rows, k + 1)
        draft_s = plan.models["draft"].shape(rows, 1, k)
        draft, verify = (price.solo_0 + price.solo_1 * context for price in (draft_s, verify_s))
        assert plan.round_s(rows, context, k) == pytest.approx(draft + verify + 30e-6, rel=1e-12)
        expected = together(draft, verify) + 2 * (30e-6 + 20e-6)
        assert plan.overlapped_s(rows, context, k) == pytest.approx(expected, rel=1e-12)


# adaptive ---------------------------------------------------------------------------------------------------------


def adaptive(plan: Planner, rate: float, in_flight: int, mode: str) -> Adaptive:
    """An adaptive policy in `mode` with so many requests in flight, that believes in `rate`."""
    settings = Server(num_speculative_tokens=4)
    device: Any = SimpleNamespace(host=SimulatedHost(HostTimes()))
    nothing: Any = None
    policy = Adaptive(
        Context(
            env=Clock(), device=device, settings=settings, controller=Controller(settings), planner=plan, kv=nothing,
            deliveries=nothing, on_finish=lambda request: None,
        )
    )  # fmt: skip
    policy.estimate._accepted, policy.estimate._tried = 1e6 * rate, 1e6
    policy.in_flight, policy.mode = in_flight, mode
    return policy


def mode_speeds(plan: Planner, rate: float, rows: int, context: int) -> dict[str, float]:
    """Tokens a second that each mode would give to `rows` requests of `context` cached tokens."""
    gain, half = expected_tokens(rate, 4), rows // 2
    speeds = {
        "plain": rows / plan.decode_s(rows, rows * context),
        "atomic": rows * gain / plan.round_s(rows, rows * context, 4),
    }
    if half:  # while one half drafts the other is verified; then they change places
        speeds["lanes"] = half * gain / plan.overlapped_s(half, half * context, 4)
    return speeds


CASES = [
    (contention, dear, rate, rows, context)
    for contention in get_args(Contention)
    for dear in (1.0, 4.0)
    for rate in (0.05, 0.3, 0.6, 0.9)
    for rows in (1, 2, 16, 128)
    for context in (100, 4000)
]


def test_adaptive_picks_what_brute_force_picks() -> None:
    """The fastest, unless the mode in use is within `MARGIN` of it; and each mode is the fastest somewhere."""
    best_modes = set()
    for contention, dear, rate, rows, context in CASES:
        plan = planner(contention=contention, dear_draft=dear)
        speeds = mode_speeds(plan, rate, rows, context)
        best = max(speeds, key=lambda mode: speeds[mode])
        best_modes.add(best)
        for mode in speeds:
            policy = adaptive(plan, rate, rows, mode)
            length = policy.atomic_length(batch(rows, context))
            case = (contention, dear, rate, rows, context, mode)
            assert policy.mode == (mode if speeds[mode] * Adaptive.MARGIN > speeds[best] else best), case
            assert length == {"plain": 0, "atomic": 4, "lanes": None}[policy.mode], case
    assert best_modes == {"plain", "atomic", "lanes"}


def test_adaptive_judges_all_modes_for_the_same_requests() -> None:
    """With 8 of 16 decoding requests at hand (the others are elsewhere in the lanes) the choice is that for all 16.

    Requests whose prompts are being read do not count. The choices for 16 and for 8 differ somewhere, or this is idle.
    """
    matters = 0
    for contention, dear, rate, rows, context in CASES:
        if rows < 2:
            continue
        plan = planner(contention=contention, dear_draft=dear)
        for mode in ("plain", "atomic", "lanes"):
            best = []
            for judged in (rows, rows // 2):
                speeds = mode_speeds(plan, rate, judged, context)
                speeds[mode] = speeds.get(mode, 0.0) * Adaptive.MARGIN
                best.append(max(speeds, key=lambda mode: speeds[mode]))
            policy = adaptive(plan, rate, rows + 3, mode)
            policy.prefilling.extend(batch(3, 100))
            policy.atomic_length(batch(rows // 2, context))
            assert policy.mode == best[0], (contention, dear, rate, rows, context, mode)
            matters += best[0] != best[1]
    assert matters


def test_adaptive_drafts_now_and_then_while_it_decodes_plainly() -> None:
    """Every `PROBE` plain batches one is drafted, else a rate once believed poor would never be revised."""
    policy = adaptive(planner(), 0.01, 4, "plain")
    lengths = [policy.atomic_length(batch(4, 100)) for _ in range(4 * Adaptive.PROBE)]
    assert policy.mode == "plain"
    assert [i + 1 for i, k in enumerate(lengths) if k == 4] == [Adaptive.PROBE * n for n in (1, 2, 3, 4)]
    assert lengths.count(0) == 4 * (Adaptive.PROBE - 1)


def test_a_probe_drafts_for_few_rows_and_pays_for_what_they_owe() -> None:
    """Plain decoding of 48 rows: each probe takes `PROBE_ROWS` of them, and its draft reads all the drafter missed."""
    traffic = Traffic(dataset_name="random", num_prompts=48, input_len=64, output_len=200, max_concurrency=48)
    result = simulate(Experiment("adaptive", traffic, Acceptance(acceptance_rate=0.05)))
    launches = result.launches
    drafts = (launches["kind"] == DRAFT) & (launches["rows"] <= Adaptive.PROBE_ROWS)
    plain = launches["kind"] == KINDS.index("decode")
    assert plain.sum() > 3 * Adaptive.PROBE
    late = drafts & (launches["start_s"] > launches["start_s"][plain][Adaptive.PROBE])
    assert late.sum() >= 2
    caught_up = Latency(pair(PAIR).draft, builtin("h200").fit(pair(PAIR).draft)).shape(Adaptive.PROBE_ROWS, 1, 4)
    assert (launches["solo_s"][late] > caught_up.solo_0 * 1.1).all()


def test_rows_left_behind_are_read_as_prompts_a_few_at_a_time() -> None:
    """Six rows that owe 10 tokens each, in one forward of four and one of two; a seventh owes nothing."""
    model = Latency(pair(PAIR).draft, builtin("h200").fit(pair(PAIR).draft))
    rows = batch(7, 100)
    for row in rows:
        row.emitted, row.owed = 31, 10
    rows[6].owed = 1
    chunks = [Chunk(row, 120, 10) for row in rows[:6]]
    expected = [model.carrying(0, 0, 1, chunks[:4], False), model.carrying(0, 0, 1, chunks[4:], False)]
    assert model.behind(rows) == pytest.approx([a + b for a, b in zip(*expected, strict=True)])


def test_adaptive_goes_through_the_lanes_while_drafts_wait() -> None:
    """Whatever mode is best: a draft in the verify queue may be waiting for these rows."""
    for mode in ("plain", "atomic", "lanes"):
        policy = adaptive(planner(), 0.6, 2, mode)
        policy.check.queue.extend(batch(1, 100))
        assert policy.atomic_length(batch(1, 100)) is None


@pytest.mark.parametrize(("rate", "concurrency"), [(0.8, 4), (0.1, 4), (0.6, 32)])
def test_adaptive_is_near_the_best_of_its_modes(rate: float, concurrency: int) -> None:
    """Within 10% of plain decoding, of atomic rounds and of three lanes, each kept throughout, on a stationary load."""

    def speed(arch: Arch, **server: Any) -> float:
        traffic = Traffic(
            dataset_name="random", num_prompts=2 * concurrency, input_len=64, output_len=300,
            max_concurrency=concurrency,
        )  # fmt: skip
        settings = Server(priority="none", **server)
        return tokens_per_s(simulate(Experiment(arch, traffic, Acceptance(acceptance_rate=rate), settings)))

    others = [speed("autoregressive"), speed("pdv-hybrid", hybrid_threshold=10**6), speed("pdv")]
    assert speed("adaptive") >= 0.9 * max(others)


def test_adaptive_speculates_again_when_drafts_get_better() -> None:
    """A poor first request must not settle the matter: the ones after it accept every draft."""
    requests = [Request(i, 0.3 * i, 64, 200, bytes([0 if i < 2 else 255]) * 200) for i in range(30)]
    result = simulate(Experiment("adaptive", Traffic(num_prompts=30)), direct=False, requests=requests)
    assert result.requests["rounds"][-5:].mean() < 100  # plain decoding takes 199
