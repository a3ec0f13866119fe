"""Capacity: exact where the server is a textbook queue, monotone in the service levels, sure only over seeds."""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

import pdvsim
from pdvsim.bench.pool import Row
from pdvsim.bench.run import SweepInterrupted
from pdvsim.calibration.fit.build import save
from pdvsim.cli import main
from pdvsim.decide import runs as runs_module
from pdvsim.decide.advice import Question
from pdvsim.decide.advise import advise
from pdvsim.decide.capacity import Capacities, Plan
from pdvsim.decide.capacity_search import find_capacities, steepness
from pdvsim.decide.edge import Edge
from pdvsim.decide.error import lead_error
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench
from pdvsim.decide.space import Space
from pdvsim.sim.config import Experiment, Hardware, Host, Server, Traffic
from pdvsim.sim.metrics import steady
from pdvsim.sim.metrics.stability import stability
from pdvsim.sim.metrics.steady import FILL, REQUESTS_LONG, TALKS_LONG
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.profile import roofline
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import make_requests

SERVICE_S = 0.01


def test_steepness_is_the_least_power_with_which_room_falls() -> None:
    """A search with one run shows none."""
    grid = math.log(1.02)
    steep, flat, once = (Edge(0, 1, 0.5, power * grid, tried) for power, tried in (
        (6.0, {0: 0.1, 1: -0.1}), (3.0, {0: 0.05, 1: -0.05}), (1.0, {0: 0.1, 9: -0.5}),
    ))  # fmt: skip
    assert steepness([steep, flat, once], 0.02) == pytest.approx(3)
    assert steepness([once], 0.02) == 1.0


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A server of one request at a time, each of which takes 10 ms: only its prompt, at 0.1 ms per token."""
    path = tmp_path_factory.mktemp("profiles") / "queue.json"
    free, slow = (ForwardTerms(token_s=token_s) for token_s in (1e-15, SERVICE_S / 100))
    models = {"llama-3.2-1b": free, "llama-3.1-8b": slow}
    save(replace(roofline(GPUS["h200"]), name="queue", models=models, uncertainty={}), path)  # it is what it is
    return Experiment(
        arch="autoregressive",
        traffic=Traffic("random", num_prompts=300, input_len=100, output_len=1),
        server=Server(max_num_seqs=1, max_num_batched_tokens=10**6),
        hardware=Hardware(profile=str(path), kv_capacity_tokens=10**9),
        host=Host(launch_s=0.0, completion_s=0.0, handoff_s=0.0),
    )


def lindley_holds(plan: Plan, seed: int, rate: float) -> bool:
    """The same question answered without the simulator: waits of the same arrivals by W' = max(0, W + S - gap)."""
    run = plan.experiment(("autoregressive", seed), rate)
    traffic = run.traffic
    arrival_s = np.array([request.arrival_s for request in make_requests(traffic, plan.base.acceptance)])
    assert len(arrival_s) / arrival_s[-1] == pytest.approx(rate)  # as drawn, not as asked of the generator
    wait_s = [0.0]
    for gap in np.diff(arrival_s):
        wait_s.append(max(0.0, wait_s[-1] + SERVICE_S - gap))
    admitted_s = arrival_s + np.array(wait_s)
    counted = np.array(wait_s)[run.scoring.warmup_requests :]
    share = np.mean(counted + SERVICE_S <= plan.goal.levels_ms["ttft"] / 1e3)
    finish_s = admitted_s + SERVICE_S
    label = stability({"arrival_s": arrival_s, "admitted_s": admitted_s, "finish_s": finish_s}, traffic)
    return bool(label == "stable" and rate <= 1 / SERVICE_S and share >= plan.goal.attainment)


@pytest.mark.parametrize("level_ms", [9, 15, 50, 10**9])
def test_the_capacity_of_a_single_server_is_lindleys(one_by_one: Experiment, level_ms: int) -> None:
    """Where every request meets the level only keeping up limits the rate: a queue that grows is not held."""
    goal = Goal("throughput", (f"ttft:{level_ms}",), 0.9)
    plan = Plan(one_by_one, ("autoregressive",), 3, goal)
    capacities = find_capacities(plan, Bench(1))
    assert [row["seed"] for row in capacities.rows] == [0, 1, 2]
    if level_ms < 1e3 * SERVICE_S:  # nobody can meet that
        assert [row["rate"] for row in capacities.rows] == [0, 0, 0]
        assert capacities.summary()[0]["held_in"] == 0
        return
    for row in capacities.rows:
        assert lindley_holds(capacities.plan, row["seed"], row["rate"] / 1.02)
        assert not lindley_holds(capacities.plan, row["seed"], row["failed_rate"] * 1.02)
        assert 1 < row["failed_rate"] / row["rate"] <= 1.02 + 1e-9
        assert row["rate"] < 1 / SERVICE_S
        assert row["limited_by"] == ("ttft" if level_ms < 10**9 else "queue")
        assert row["output_tokens_per_s"] == pytest.approx(row["rate"], rel=0.1)  # one token each


def test_the_capacity_for_a_trace_is_lindleys(one_by_one: Experiment, tmp_path: Path) -> None:
    """Of the trace's own gaps, scaled to each rate; its bursts are held less well than Poisson arrivals."""
    gaps = np.random.default_rng(0).gamma(0.4, 1.0, 400)
    path = tmp_path / "bursts.csv"
    rows = (f"{time},100,1" for time in np.cumsum(gaps))
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    trace, goal = Traffic(dataset_path=str(path), num_prompts=300), Goal("throughput", ("ttft:50",), 0.9)
    rates = []
    for traffic in (replace(trace, use_trace_timestamps=True), trace):
        capacities = find_capacities(Plan(replace(one_by_one, traffic=traffic), ("autoregressive",), 3, goal), Bench(1))
        for row in capacities.rows:
            assert lindley_holds(capacities.plan, row["seed"], row["rate"] / 1.02)
            assert not lindley_holds(capacities.plan, row["seed"], row["failed_rate"] * 1.02)
        rates.append(np.mean([row["rate"] for row in capacities.rows]))
        assert ("bursts.csv" in str(capacities)) is traffic.use_trace_timestamps
    assert rates[0] < 0.9 * rates[1]


def test_two_servers_hold_at_least_twice_what_one_does(one_by_one: Experiment) -> None:
    """Round robin smooths arrivals: each of two servers sees Erlang gaps, less bursty than Poisson's."""
    held = []
    for servers in (1, 2):
        base = replace(one_by_one, hardware=replace(one_by_one.hardware, replicas=servers))
        plan = Plan(base, ("autoregressive",), 1, Goal("throughput", ("ttft:15",), 0.9))
        capacities = find_capacities(plan, Bench(1), gpu_hour_usd=3.6)
        held.append(capacities.summary()[0]["rate"].mean)
        for row in capacities.rows:  # 3.60 $ an hour are a dollar for 1000 s
            assert row["usd_per_million_output_tokens"] == pytest.approx(1e3 * servers / row["output_tokens_per_s"])
    assert held[1] > 2 * held[0]


def test_a_looser_level_or_one_more_server_never_lowers_the_rate(one_by_one: Experiment) -> None:
    """Within the tolerance of the search; a second server more than doubles what the first holds."""
    held: dict[int, list[float]] = {1: [], 2: []}
    for servers, level_ms in product(held, (12, 25, 100, 10**9)):
        base = replace(one_by_one, hardware=replace(one_by_one.hardware, replicas=servers))
        plan = Plan(base, ("autoregressive",), 2, Goal("throughput", (f"ttft:{level_ms}",), 0.9))
        held[servers].append(find_capacities(plan, Bench(1)).summary()[0]["rate"].mean)
    assert all(looser >= 0.98 * tighter for rates in held.values() for tighter, looser in pairwise(rates))
    assert all(two > 2 * one for one, two in zip(*held.values(), strict=True))


def share_in_time(arrival_s: NDArray[np.float64], servers: int, level_s: float) -> float:
    """Share of the requests that wait no longer than the level allows, dealt to the servers in turn."""
    in_time = 0
    for server in range(servers):
        wait_s = 0.0
        for gap_s in np.diff(arrival_s[server::servers], prepend=-1.0):
            wait_s = max(0.0, wait_s + SERVICE_S - gap_s)
            in_time += wait_s + SERVICE_S <= level_s
    return in_time / len(arrival_s)


def test_the_fleet_is_the_smallest_that_lindley_allows(one_by_one: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdvsim.decide.advise.SERVER_GPUS", 1)  # replicas only, no tensor parallelism
    rate, most = 100.0, 8
    loaded = Traffic("random", input_len=100, output_len=1, request_rate=rate)
    drawn = make_requests(replace(loaded, num_prompts=20_000, seed=77), one_by_one.acceptance)
    arrival_s = np.array([request.arrival_s for request in drawn])
    shares = {servers: share_in_time(arrival_s, servers, 0.015) for servers in range(2, most + 1)}
    least = min(servers for servers, share in shares.items() if share >= 0.9)
    assert shares[least] > 0.92  # so that chance does not decide
    assert shares[least - 1] < 0.88
    base = replace(one_by_one, traffic=loaded, server=replace(one_by_one.server, pair="none:llama-3.1-8b"))
    space = Space(("autoregressive",), (4,), ("fixed",), (1,), (10**6,), own=False)
    goal = Goal("throughput", ("ttft:15",), 0.9)
    advice = advise(
        Question(base, space, goal, gpu_hour_usd=3.6, most_gpus=most, fleet_archs=("autoregressive",)), Bench(1)
    )
    assert advice.recommended.hardware.replicas == least
    assert advice.met
    assert advice.holds(advice.best).high >= rate
    usd = 1e3 * least / rate  # a dollar for 1000 s, one token for each request
    assert advice.cost_of(advice.best).mean == pytest.approx(usd, rel=0.02)


def test_a_conversation_costs_the_hour_over_the_conversations_of_an_hour(one_by_one: Experiment) -> None:
    """Four turns of one request each: conversations begin at a quarter of the rate that is held."""
    talks = replace(one_by_one, traffic=replace(one_by_one.traffic, num_turns=4, think_time_s=0.05, num_prompts=200))
    plan = Plan(talks, ("autoregressive",), 2, Goal("throughput", ("ttft:30",), 0.9))
    capacities = find_capacities(plan, Bench(1), gpu_hour_usd=3.6)
    [entry] = capacities.summary()
    assert entry["usd_per_conversation"].mean == pytest.approx(4e-3 / entry["rate"].mean, rel=0.1)
    assert "conversations" in str(capacities)
    assert capacities.report().document["summary"] == [entry]
    length = capacities.plan.length
    assert length.measured / entry["rate"].mean > TALKS_LONG * 3 * 0.05  # the think times alone
    assert length.start / entry["rate"].mean > FILL * 3 * 0.05


SMALL: dict[str, Any] = {"dataset_name": "random", "input_len": 64, "output_len": 48, "random_range_ratio": 0.5}
FIXED: dict[str, Any] = {"controller": "fixed", "max_num_seqs": 32, "max_num_batched_tokens": 2048}
QUESTIONS: dict[str, dict[str, Any]] = {
    "both": {"arch": ["pd"], "goodput": ["ttft:300", "tpot:60"], "gpu": "a100-80gb", "num_speculative_tokens": 1},
    "head": {"arch": ["colocated"], "pair": "llama-3.1-8b", "drafter": "eagle3", "gpu": "h100-sxm",
             "goodput": ["ttft:200"], "attainment": 0.99, "num_speculative_tokens": 3},
}  # fmt: skip


@functools.cache
def answer(name: str) -> Capacities:
    """Asked for in runs far too short: at most rates all requests of a run are in the server together."""
    return pdvsim.capacity(**QUESTIONS[name], **FIXED, **SMALL, num_prompts=40, num_runs=3, tolerance=0.05, jobs=1)


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_rate_is_held_that_the_saturated_server_does_not_reach(name: str) -> None:
    """The most that leaves is what leaves a server with a long queue, whatever a short run shows."""
    capacities, ask = answer(name), {key: value for key, value in QUESTIONS[name].items() if key != "attainment"}
    [arch] = ask.pop("arch")
    loop: dict[str, Any] = {"max_concurrency": 96, "num_prompts": 700, "warmup_requests": 200, "band": False}
    most = pdvsim.run(arch=arch, **ask, **FIXED, **SMALL, **loop).metrics
    [entry] = capacities.summary()
    assert 0 < entry["rate"].mean <= most["request_throughput"] * 1.02  # lengths of other requests
    assert all(0 < row["output_tokens_per_s"] <= most["output_throughput"] * 1.02 for row in capacities.rows)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_rate_is_held_only_in_a_long_and_stable_run(name: str) -> None:
    capacities = answer(name)
    for row in capacities.rows:
        at = capacities.plan.experiment((row["arch"], row["seed"]), row["rate"] / 1.05)  # by the tolerance lower
        run = simulate(applicable(at))
        assert summarise(run)["stability"] == "stable"
        served_s = run.requests["finish_s"] - run.requests["admitted_s"]
        if row["seed"] == capacities.plan.base.traffic.seed:  # by which the length was chosen
            assert run.requests["arrival_s"].max() > 0.9 * REQUESTS_LONG * served_s.mean()


def test_runs_of_twice_the_length_give_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the interval that was given."""
    name = "both"
    [entry] = answer(name).summary()
    measured = answer(name).plan.length.measured
    monkeypatch.setattr(steady, "REQUESTS_LONG", 2 * REQUESTS_LONG)
    twice = answer.__wrapped__(name)
    assert twice.plan.length.measured > 1.3 * measured
    assert abs(twice.summary()[0]["rate"].mean - entry["rate"].mean) <= entry["rate"].half_width


def test_intervals_and_pairs_are_over_seeds() -> None:
    capacities = pdvsim.capacity(
        arch=["autoregressive", "colocated"],
        goodput=["ttft:60", "tpot:20"],
        num_runs=3,
        tolerance=0.1,
        jobs=1,
        dataset_name="random",
        num_prompts=60,
        input_len=64,
        output_len=16,
        num_speculative_tokens=2,
        **FIXED,
    )
    frame = capacities.points
    for entry in capacities.summary():
        rates = frame[frame["arch"] == entry["arch"]]["rate"]
        assert entry["rate"].mean == pytest.approx(rates.mean())
        rounding = 0.1 * rates.mean() / math.sqrt(12)
        scatter = 4.3027 * max(rates.std(ddof=1), rounding) / math.sqrt(3)
        below = frame[frame["arch"] == entry["arch"]]["may_hold"].mean() - rates.mean()
        assert below > 0  # the search ends within the tolerance
        assert entry["rate"].half_width == pytest.approx(max(scatter, below), rel=1e-4)
    assert capacities._repr_html_().count("<tr>") == 1 + 2  # the header, and an architecture each
    held = capacities.most()
    a, b = (frame[frame["arch"] == arch]["rate"].to_numpy() for arch in (held.best, held.others[0]))
    assert held.values[held.best].mean - held.values[held.others[0]].mean == pytest.approx(np.mean(a - b))


@pytest.mark.parametrize(
    ("tolerance", "times", "limit", "steep", "sure"),
    [
        (0.2, 1.2, "queue", 1, False),  # within the tolerance of the search
        (0.02, 0.8, "queue", 1, False),
        (0.02, 1.2, "queue", 1, True),
        (0.02, 1.2, "ttft", 1, False),  # a time to the first token is not so well known
        (0.02, 1.2, "ttft", 20, True),  # but where it rises steeply, it moves the rate by little
    ],
)
def test_a_lead_within_the_tolerance_or_the_profiles_error_is_none(
    one_by_one: Experiment, tolerance: float, times: float, limit: str, steep: float, sure: bool
) -> None:
    """A lead in units of the profile's error of throughputs."""
    goal = Goal("throughput", ("ttft:15",), 0.9)
    gain = 1 + times * lead_error(one_by_one, "output_throughput")
    capacities = Capacities(Plan(one_by_one, ("autoregressive", "colocated"), 5, goal, tolerance))
    capacities.rows = [
        {"arch": arch, "gpus": 1, "rate": rate * factor, "limited_by": limit, "steepness": steep}
        for arch, factor in (("autoregressive", 1.0), ("colocated", gain))
        for rate in (10.0, 11.0, 12.0, 13.0, 14.0)
    ]
    held = capacities.most()
    assert (held.best, held.sure) == ("colocated", sure)


def test_a_batch_limit_that_binds_only_above_where_settings_were_tuned_is_raised() -> None:
    """With 32 rows nobody waits at the rate of the tuning; the search goes on to where they would."""
    goal, traffic = Goal("throughput", ("ttft:500", "tpot:50"), 0.9), Traffic("random", num_prompts=400, output_len=64)
    traffic = replace(traffic, input_len=64, request_rate=10.0)
    base = Experiment("colocated", traffic, server=Server(max_num_seqs=32))
    plan = Plan(base, ("colocated",), 1, goal, 0.1, space=Space(("colocated",), (1,), ("fixed",), (32, 64), (2048,)))
    [tuned] = find_capacities(plan, Bench(1)).rows
    limits = [replace(base.server, num_speculative_tokens=1, max_num_seqs=rows) for rows in (32, 64)]
    rates = []
    for server in limits:
        [row] = find_capacities(replace(plan, base=replace(base, server=server), space=None), Bench(1)).rows
        rates.append(row["rate"])
    assert tuned["rate"] >= 0.9 * rates[1] > 1.1 * rates[0]


def command(tmp_path: Path, *more: str) -> list[str]:
    small = ["--dataset-name", "random", "--num-prompts", "40", "--input-len", "64", "--output-len", "8"]
    levels = ["--goodput", "ttft:60", "tpot:20", "--tolerance", "0.5", "--num-runs", "2", "--jobs", "1"]
    fixed = ["--num-speculative-tokens", "1", "--max-num-seqs", "32", "--max-num-batched-tokens", "2048"]
    return ["capacity", *small, *levels, *fixed, "-o", str(tmp_path), *more]


def test_the_command_saves_and_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = ("--html", str(tmp_path / "page.html"))
    assert main(command(tmp_path, "--arch", "autoregressive,pd", "--gpu-hour-usd", "4", "--json", *page)) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["arch"] for entry in document["summary"]] == ["autoregressive", "pd"]
    assert document["summary"][0]["rate"]["n"] == 2
    assert document == json.loads((tmp_path / "capacity.json").read_text())
    assert len(pd.read_parquet(tmp_path / "capacity.parquet")) == 4
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")
    shown = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(
        word in shown for word in ("<title>Capacity</title>", "data:image/png;base64,", "Provenance", "req/s held")
    )


@pytest.mark.usefixtures("quick_plots")
def test_ctrl_c_keeps_the_searches_that_are_done(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first seed's searches finish, then Ctrl-C comes."""
    real = runs_module.run

    def run_sweep(points: list[runs_module.Point], *rest: object) -> list[Row]:
        if any(point.experiment.traffic.seed == 1 for point in points):
            raise SweepInterrupted([])
        return real(points, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runs_module, "run", run_sweep)
    assert main(command(tmp_path, "--arch", "autoregressive,pd")) == 130
    assert re.search(f" 2 of 4 .*{tmp_path}", capsys.readouterr().err)
    rows: list[Row] = json.loads((tmp_path / "capacity.json").read_text())["searches"]
    assert [(row["arch"], row["seed"]) for row in rows] == [("autoregressive", 0), ("pd", 0)]
