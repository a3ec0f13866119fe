"""Draft-length controllers and the adaptive choice, against brute force over the same latency model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import planning
import pytest
from planning import OUTPUT, PAIR, batch

from pdvsim.sim import cluster
from pdvsim.sim.config import Acceptance, Arch, Contention, Experiment, Server, Traffic
from pdvsim.sim.core import KINDS, Request
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.models.presets import pair
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.policies.base import Context
from pdvsim.sim.policies.controllers import AcceptanceEstimate, Controller, Feedback, Goodput, Learner
from pdvsim.sim.policies.hybrid import Adaptive
from pdvsim.sim.policies.planner import Planner
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.host import HostCost, SimulatedHost
from pdvsim.sim.prices.profile import builtin
from pdvsim.sim.records import Result
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.acceptance import dropped_tokens, expected_tokens
from pdvsim.sim.workload.requests import make_requests
from pdvsim.testing import check_alike

DRAFT, VERIFY = KINDS.index("draft"), KINDS.index("verify")
HOST = HostCost(launch_s=10e-6, completion_s=20e-6, handoff_s=20e-6)


def simulated(experiment: Experiment, **more: Any) -> Result:
    """One set of options for several architectures: each without those that do nothing in it."""
    return simulate(applicable(experiment), **more)


planner = partial(planning.planner, HOST)


def speed_of(plan: Planner, rate: float, rows: int, context: int, k: int, round_s: float) -> float:
    """Tokens a second of requests with `context` prompt and `OUTPUT` output tokens, where a round takes `round_s`."""
    rounds = (OUTPUT + dropped_tokens(rate, k)) / expected_tokens(rate, k)
    finished = rows / rounds
    return OUTPUT * finished / (round_s + plan.prefill_s(rows, k, finished, context))


def goodput_speeds(plan: Planner, rate: float, rows: int, context: int) -> list[float]:
    """Tokens a second at each draft length from 0 to 16, on one lane."""
    return [speed_of(plan, rate, rows, context, k, plan.full_round_s(rows, rows * context, k, rate)) for k in range(17)]


def tokens_per_s(result: Result) -> float:
    return float(result.requests["output_tokens"].sum() / result.requests["finish_s"].max())


# fixed ------------------------------------------------------------------------------------------------------------


def test_estimate_is_the_maximum_likelihood_rate() -> None:
    """Drafts after the first rejected one were never judged: with 10,000 rounds of 4 at 0.7 it finds 0.7, not less."""
    rng = np.random.default_rng(0)
    estimate = AcceptanceEstimate(memory=1e6)
    for _ in range(10_000):
        accepted = int(np.argmin([*(rng.random(4) < 0.7), False]))
        estimate.observe(accepted, accepted < 4)
    assert estimate.rate == pytest.approx(0.7, abs=0.01)


# no drafts --------------------------------------------------------------------------------------------------------


SPECULATING = [arch for arch in ARCHS if arch != "autoregressive"]


@pytest.mark.parametrize("arch", SPECULATING)
def test_length_0_runs_no_drafter_and_is_foreseen(arch: Arch) -> None:
    """Only the target runs, every round is one plain token, and the fast path gives the same records."""
    loads: list[dict[str, Any]] = [{"max_concurrency": 8}, {"request_rate": 10.0}]
    for load in loads:
        traffic = Traffic("random", num_prompts=24, input_len=700, output_len=40, random_range_ratio=0.5, **load)
        experiment = Experiment(arch, traffic, server=Server(num_speculative_tokens=0))
        result = simulated(experiment)
        assert set(result.launches["role"].tolist()) == {1}
        assert not {DRAFT, VERIFY} & set(result.launches["kind"].tolist())
        assert (result.requests["rounds"] == result.requests["output_tokens"] - 1).all()
        assert result.requests["drafted"].sum() == 0
        check_alike(result, simulated(experiment, blocks=False))


@pytest.mark.parametrize(
    "server", [Server(PAIR, 0), Server("llama-2-7b", 0, "eagle3"), Server("llama-2-7b", 4, "none")]
)
def test_without_drafts_one_lane_is_the_yardstick(server: Server) -> None:
    """With length 0, or without a drafter: plain decoding, to the last bit."""
    traffic = Traffic("random", num_prompts=60, input_len=200, output_len=200, max_concurrency=8)
    plain = simulated(Experiment("autoregressive", traffic, server=Server(PAIR)))
    none = simulated(Experiment("colocated", traffic, server=server))
    for name in ("start_s", "end_s", "rows", "tokens", "kind"):
        assert np.array_equal(plain.launches[name], none.launches[name])
    assert plain.meta["kv_capacity_tokens"] == none.meta["kv_capacity_tokens"]


class Scripted(Controller):
    """Return the next of a cycle of lengths."""

    learns = True  # so that it is asked in every round

    def __init__(self, settings: Server, lengths: Sequence[int]) -> None:
        super().__init__(settings)
        self._lengths = itertools.cycle(lengths)

    def draft_length(self, rows: Sequence[Request], queue_depth: int, now_s: float) -> int:
        self.k = next(self._lengths)
        return self.k


def scripted(monkeypatch: pytest.MonkeyPatch, arch: Arch, lengths: Sequence[int], **server: Any) -> Result:
    """A run under a script; `controller` keeps the drafter, though it is not the one that decides."""
    monkeypatch.setattr(cluster, "make_controller", lambda settings, plan: Scripted(settings, lengths))
    traffic = Traffic("random", num_prompts=30, input_len=300, output_len=60, max_concurrency=12)
    settings = Server(controller="goodput", **server)
    return simulated(Experiment(arch, traffic, Acceptance(acceptance_rate=0.7), settings))


@pytest.mark.parametrize("arch", SPECULATING)
def test_rounds_with_and_without_drafts_may_be_mixed(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each delivery is what the coins at its position grant a round of 0 or of 3 drafts, and the counts agree."""
    gather = {"verify_gather": "always"} if arch in ("pdv", "pdv-hybrid") else {}
    lengths = (0, 3, 3, 0, 0) if arch != "adaptive" else (0, 0, *[3] * 20)  # it takes its time to begin
    result = scripted(monkeypatch, arch, lengths, hybrid_threshold=1, **gather)
    requests = make_requests(result.experiment.traffic, result.experiment.acceptance)
    seen = set()
    for request in requests:
        tokens = result.deliveries["tokens"][result.deliveries["request"] == request.id]
        assert tokens[0] == 1
        at = 1
        for gained in tokens[1:].tolist():
            assert gained in (1, min(min(request.accept_runs[at], 3) + 1, 60 - at))
            seen.add(gained)
            at += gained
        assert at == 60
    req = result.requests
    assert seen == {1, 2, 3, 4}
    assert (req["drafted"] % 3 == 0).all()
    assert (req["drafted"] < 3 * req["rounds"]).any()
    cut = req["rounds"] + req["accepted"] - (req["output_tokens"] - 1)  # beyond the end, in the last round
    assert ((cut >= 0) & (cut <= 3)).all()
    if arch == "pdv":  # of rows that are verified together some have drafts and some have none
        verifies = result.launches["kind"] == VERIFY
        assert 3 * result.launches["rows"][verifies].sum() > req["drafted"].sum()


# feedback ---------------------------------------------------------------------------------------------------------


def feedback(k: int = 4, **server: Any) -> Feedback:
    return Feedback(Server(controller="feedback", num_speculative_tokens=k, **server))


def verdicts(controller: Feedback, accepted: int, of: int, round_s: float = 0.01, rounds: int = 10) -> None:
    """So many rounds of one row: `accepted` of its `of` draft tokens accepted, `round_s` after the last."""
    rows = batch(1, 100)
    rows[0].state.k, rows[0].state.last_delivery_s = of, 0.0
    for _ in range(rounds):
        controller.observe(rows, [accepted], round_s)


@pytest.mark.parametrize(("accepted", "queue_depth", "round_s", "step"), [
    (39, 0, 0.01, -1),  # each of the three signals shortens alone: acceptance under 0.4,
    (90, 11, 0.01, -1),  # over 10 requests in the verify queue,
    (90, 0, 0.051, -1),  # a decode latency over 50 ms
    (71, 0, 0.039, +1),  # and all three together lengthen
    (69, 0, 0.039, 0),  # between the two thresholds of a signal it stays
    (41, 0, 0.039, 0),
    (90, 1, 0.039, 0),
    (90, 10, 0.039, 0),
    (90, 0, 0.041, 0),
    (90, 0, 0.049, 0),
])  # fmt: skip
def test_feedback_has_the_published_thresholds(accepted: int, queue_depth: int, round_s: float, step: int) -> None:
    controller = feedback()
    verdicts(controller, accepted, 100, round_s)
    assert controller.draft_length(batch(1, 100), queue_depth, 0.0) == 4 + step


def test_feedback_stays_inside_its_limits() -> None:
    """2 and 8 as published, unless given; and never 0, where it would learn nothing more."""
    assert feedback(k=0).k == 2
    assert feedback(k=9, min_speculative_tokens=3, max_speculative_tokens=6).k == 6
    assert feedback(max_speculative_tokens=1).k == 1
    for accepted, limit in ((0, 2), (100, 8)):
        controller = feedback()
        for _ in range(20):
            verdicts(controller, accepted, 100)
            controller.draft_length(batch(1, 100), 0, 0.0)
        assert controller.k == limit
    with pytest.raises(ValueError, match="--min-speculative-tokens must be at least 1"):
        feedback(min_speculative_tokens=0)


# near the best ----------------------------------------------------------------------------------------------------


def speed_late(experiment: Experiment) -> float:
    """Tokens a second from the second second on, until the last request has come."""
    result = simulated(experiment)
    until = result.requests["arrival_s"].max()
    times, tokens = result.deliveries["time_s"], result.deliveries["tokens"]
    return float(tokens[(times > 2) & (times <= until)].sum() / (until - 2))


@pytest.mark.parametrize(("arch", "pair", "rate", "concurrency", "fixed", "starts"), [
    ("pdv", "gemma-2b:gemma-7b", 0.9, 8, (2, 3, 4), (0, 8)),
    ("pd", PAIR, 0.6, 128, (0, 1), (4,)),
    ("colocated", PAIR, 0.3, 128, (0,), (8,)),
    ("colocated", PAIR, 0.9, 1, (5, 6, 7), (1,)),
])  # fmt: skip
def test_goodput_comes_near_the_best_fixed_length_from_any_start(
    arch: Arch, pair: str, rate: float, concurrency: int, fixed: Sequence[int], starts: Sequence[int]
) -> None:
    """97% of its tokens per second; `fixed` holds the best of 0 to 8, by studies/controllers.py.

    Lengths vary by 30%. Requests of equal length that are never drafted for finish together and have their prompts
    prefilled in one forward for ever; a single round with drafts ends that, and with it 5% of the speed.
    """
    count = {1: 16, 8: 150, 32: 500, 128: 500}[concurrency]
    traffic = Traffic("random", num_prompts=count, input_len=128, output_len=128, random_range_ratio=0.3,
                      max_concurrency=concurrency)  # fmt: skip

    def speed(**server: Any) -> float:
        return speed_late(Experiment(arch, traffic, Acceptance(acceptance_rate=rate), Server(pair, **server)))

    best = max(speed(num_speculative_tokens=k) for k in fixed)
    for start in starts:
        assert speed(num_speculative_tokens=start, controller="goodput") >= 0.97 * best, start


# goodput ----------------------------------------------------------------------------------------------------------


def settled(controller: Goodput, rows: list[Request]) -> int:
    """Its choice, once it has had time to begin or end plain decoding."""
    return [controller.draft_length(rows, 0, float(round)) for round in range(Goodput.PERSISTENCE + 2)][-1]


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 128])
@pytest.mark.parametrize("context", [64, 640, 6400])
def test_goodput_picks_what_brute_force_picks(rows: int, context: int) -> None:
    """Before any verdict the estimate is 0.6 exactly; the length in use may stay if it is nearly as good."""
    plan = planner()
    controller = Goodput(Server(controller="goodput", max_speculative_tokens=16), plan)
    speeds = goodput_speeds(plan, 0.6, rows, context)
    chosen = settled(controller, batch(rows, context))
    hold = Goodput.HOLD if chosen and max(speeds) > speeds[0] else Goodput.HOLD_PLAIN
    assert speeds[chosen] * hold >= max(speeds)


def test_goodput_decodes_plainly_where_drafts_do_not_pay_and_tries_them_now_and_then() -> None:
    """64 rows at acceptance 0.05: tries, with what the drafter must then catch up on, cost `BUDGET` of the time."""
    plan = planner()
    tries = []
    for lag in (0, 200):
        controller, rows = Goodput(Server(controller="goodput"), plan), batch(64, 500)
        controller.learner.estimate._accepted, controller.learner.estimate._tried = 100.0, 2000.0
        settled(controller, rows)
        lengths = []
        for round in range(4000):
            for row in rows:
                row.state.drafter_lag = lag
            lengths.append(controller.draft_length(rows, 0, 100.0 + round))
            for row in rows:
                row.state.k = lengths[-1]
            controller.observe(rows, [0] * 64, 0.0)
        assert set(lengths) == {0, Goodput.TRY_LENGTH}
        tries.append(np.count_nonzero(lengths))
        plain_s, try_s = (plan.full_round_s(64, 64 * 500, k, 0.0) for k in (0, Goodput.TRY_LENGTH))
        lost = (try_s + plan.lag_s(rows)) / plain_s - 1
        assert 2 <= tries[-1] <= 1 + Learner.BUDGET * 4000 / lost
    assert tries[0] > 3 * tries[1]


# the planner ------------------------------------------------------------------------------------------------------


# adaptive ---------------------------------------------------------------------------------------------------------


def adaptive(plan: Planner, rate: float, in_flight: int, mode: str) -> Adaptive:
    """An adaptive policy in `mode` with `rows` requests in flight, whose estimate is `rate`."""
    settings = Server(num_speculative_tokens=4)
    device: Any = SimpleNamespace(host=SimulatedHost(HostCost(0.0, 0.0, 0.0)), foresees=False)
    nothing: Any = None
    policy = Adaptive(
        Context(
            env=Clock(), device=device, settings=settings, controller=Controller(settings), planner=plan, kv=nothing,
            deliveries=nothing, on_finish=lambda request: None,
        )
    )  # fmt: skip
    policy.learner.estimate._accepted, policy.learner.estimate._tried = 1e6 * rate, 1e6
    policy.in_flight, policy.mode = in_flight, mode
    return policy


def mode_speeds(plan: Planner, rate: float, rows: int, context: int) -> dict[str, float]:
    """Tokens a second that each mode would give to `rows` requests of `context` cached tokens."""
    whole, half = rows * context, rows // 2
    speeds = {
        "plain": speed_of(plan, rate, rows, context, 0, plan.decode_s(rows, whole)),
        "atomic": speed_of(plan, rate, rows, context, 4, plan.caught_up_s(rows, whole, 4, rate)),
    }
    if half:  # while one half drafts the other is verified; then they change places
        speeds["lanes"] = speed_of(plan, rate, 2 * half, context, 4, 2 * plan.overlapped_s(half, whole // 2, 4, rate))
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
    """The fastest, unless the mode in use is within `MARGIN` of it; and each mode is the fastest somewhere.

    It is so for all requests that decode, also with half of them at hand (the others are elsewhere in the lanes): the
    choices for all and for half differ somewhere, or this is idle. Requests whose prompts are being read do not count.
    """
    best_modes, matters = set(), 0
    for contention, dear, rate, rows, context in CASES:
        plan = planner(contention=contention, dear_draft=dear)
        speeds, of_half = (mode_speeds(plan, rate, n, context) for n in (rows, max(1, rows // 2)))
        best_modes.add(max(speeds, key=lambda mode: speeds[mode]))
        for mode, at_hand in itertools.product(speeds, {rows, max(1, rows // 2)}):
            favoured, other = (of | {mode: of.get(mode, 0.0) * Adaptive.MARGIN} for of in (speeds, of_half))
            expected = max(favoured, key=lambda mode: favoured[mode])
            policy = adaptive(plan, rate, rows + 3, mode)
            policy.prefilling.extend(batch(3, 100))
            for _ in range(Adaptive.PERSISTENCE + 1):
                length = policy.atomic_length(batch(at_hand, context))
            case = (contention, dear, rate, rows, at_hand, context, mode)
            assert policy.mode == expected, case
            assert length == {"plain": 0, "atomic": 4, "lanes": None}[policy.mode], case
            matters += expected != max(other, key=lambda mode: other[mode])
    assert best_modes == {"plain", "atomic", "lanes"}
    assert matters


def test_adaptive_does_not_lose_to_its_own_plain_mode() -> None:
    """Many short answers: what the drafter would have to prefill makes plain decoding the best mode by far."""
    traffic = Traffic("random", num_prompts=512, input_len=128, output_len=24, random_range_ratio=0.3,
                      max_concurrency=64)  # fmt: skip
    plain = Server(num_speculative_tokens=0, hybrid_threshold=10**6)
    best = tokens_per_s(simulated(Experiment("pdv-hybrid", traffic, server=plain)))
    assert tokens_per_s(simulated(Experiment("adaptive", traffic, Acceptance(acceptance_rate=0.6)))) >= 0.97 * best


def test_rows_that_lag_are_read_as_prompts_a_few_at_a_time() -> None:
    """Six rows that owe 10 tokens each, in one forward of four and one of two; a seventh owes nothing."""
    model = CostModel(pair(PAIR).draft, builtin("h200").fit(pair(PAIR).draft))
    rows = batch(7, 100)
    for row in rows:
        row.state.emitted, row.state.drafter_lag = 31, 10
    rows[6].state.drafter_lag = 1
    expected = [model.price(0, prompts=[(120, 10)] * count) for count in (4, 2)]
    assert model.catch_up_cost(rows) == pytest.approx([a + b for a, b in zip(*expected, strict=True)])
