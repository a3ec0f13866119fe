"""Queueing theory as an oracle: where a server is a textbook queue, its waits are the textbook's.

A request of one output token is only its prefill. On a made-up card where a prefill takes a microsecond a token and the
host nothing, the service times are ours to choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ciw
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from pdvsim.calibration.fit.build import save
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Host, Server
from pdvsim.sim.core import Request
from pdvsim.sim.models.presets import MODELS
from pdvsim.sim.models.presets import pair as named_pair
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.profile import builtin, roofline
from pdvsim.sim.records import Result
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.acceptance import Streams, expected_tokens

Floats = NDArray[np.float64]

PAIR = "tinyllama-1.1b:llama-2-7b"
FREE_HOST = Host(launch_s=0.0, completion_s=0.0, handoff_s=0.0)
TOKEN_S = 1e-6
ONE_STREAM: tuple[Arch, ...] = ("autoregressive", "baseline", "colocated")


def fit(weights_s: float = 0.0, token_s: float = 0.0) -> ForwardTerms:
    return ForwardTerms(weights_s=weights_s, token_s=token_s)


def card(folder: Path, name: str, draft: ForwardTerms, target: ForwardTerms) -> Hardware:
    """A card on which `PAIR` costs just that."""
    models = dict(zip(PAIR.split(":"), (draft, target), strict=True))
    path = folder / f"{name}.json"
    save(replace(roofline(GPUS["h200"]), name=name, models=models), path)
    return Hardware(profile=str(path), kv_capacity_tokens=10**9)


@pytest.fixture(scope="module", autouse=True)
def endless_context() -> Iterator[None]:
    """Service times are chosen by the length of a prompt, which may be a million tokens."""
    with pytest.MonkeyPatch.context() as patch:
        for name in PAIR.split(":"):
            patch.setitem(MODELS, name, replace(MODELS[name], max_position_embeddings=None))
        yield


@pytest.fixture(scope="module")
def by_token(tmp_path_factory: pytest.TempPathFactory) -> Hardware:
    """The target model takes a microsecond a token, the draft model next to nothing."""
    return card(tmp_path_factory.mktemp("profiles"), "by-token", fit(weights_s=1e-15), fit(token_s=TOKEN_S))


def single_server(arch: Arch, hardware: Hardware, host: Host = FREE_HOST, budget: int = 10**7) -> Experiment:
    server = Server(PAIR, num_workers=1, max_num_seqs=1, max_num_batched_tokens=budget)
    return applicable(Experiment(arch=arch, server=server, hardware=hardware, host=host))


def prompts_only(arrival_s: Floats, prompts: NDArray[np.int64]) -> list[Request]:
    rows = zip(arrival_s.tolist(), prompts.tolist(), strict=True)
    return [Request(i, arrival, prompt, 1, b"\0") for i, (arrival, prompt) in enumerate(rows)]


def lindley(arrival_s: Floats, service_s: Floats) -> Floats:
    """Waits in a single-server FIFO queue: W' = max(0, W + S - gap)."""
    waits = [0.0]
    for gap, service in zip(np.diff(arrival_s).tolist(), service_s.tolist(), strict=False):
        waits.append(max(0.0, waits[-1] + service - gap))
    return np.array(waits)


def waits(result: Result) -> Floats:
    wait: Floats = result.requests["admitted_s"] - result.requests["arrival_s"]
    return wait


COOL = replace(builtin("h200"), power=None)  # on a card that heats up a service takes longer after others

arrivals_and_prompts = st.lists(st.tuples(st.floats(0.0, 0.05), st.integers(1, 3000)), min_size=1, max_size=40)


@pytest.mark.parametrize("arch", ONE_STREAM)
@given(requests=arrivals_and_prompts)
@settings(max_examples=30)
def test_a_single_server_is_lindleys(arch: Arch, requests: list[tuple[float, int]]) -> None:
    """Prompts alone, of which the latency model says how long each takes, some of them in several chunks."""
    budget = 1000
    gaps, lengths = (np.array(column) for column in zip(*requests, strict=True))
    arrival_s = np.cumsum(gaps)
    pair, profile = named_pair(PAIR), COOL
    read = [pair.target] if arch == "autoregressive" else [pair.draft, pair.target]
    service_s = np.zeros(len(lengths))
    for i, length in enumerate(lengths.tolist()):
        for start in range(0, length, budget):
            prompt = start, min(budget, length - start)
            for spec in read:
                model = CostModel(spec, profile.fit(spec))
                ends = spec is pair.target and sum(prompt) == length
                service_s[i] += model.price(0, prompts=[prompt], first_tokens=int(ends)).seconds_0
    asked = prompts_only(arrival_s, lengths)
    result = simulate(single_server(arch, Hardware(), budget=budget), requests=asked, profile=COOL)
    assert waits(result) == pytest.approx(lindley(arrival_s, service_s), abs=1e-9)
    assert result.requests["finish_s"] == pytest.approx(arrival_s + lindley(arrival_s, service_s) + service_s, abs=1e-9)


@pytest.mark.parametrize("arch", ONE_STREAM)
@given(
    gaps=st.lists(st.floats(0.0, 0.5), min_size=2, max_size=12), seed=st.integers(0, 2**16),
    acceptance=st.sampled_from([0.0, 0.6, 1.0]), host=st.sampled_from([FREE_HOST, Host()]),
)  # fmt: skip
@settings(max_examples=12)
def test_whole_requests_through_a_single_server_are_lindleys(
    arch: Arch, gaps: list[float], seed: int, acceptance: float, host: Host
) -> None:
    """Whole requests, with the host's costs: the service time of each is what it takes when it is alone."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(gaps)
    prompts, outputs = rng.integers(1, 500, len(gaps)), rng.integers(1, 60, len(gaps))
    runs = Streams(Acceptance(acceptance_rate=acceptance), rng, rng).draw(outputs)
    experiment = single_server(arch, Hardware(), host)

    def request(i: int, id: int, at_s: float) -> Request:
        return Request(id, at_s, int(prompts[i]), int(outputs[i]), runs[i])

    def served(requests: list[Request]) -> Result:
        return simulate(experiment, requests=requests, profile=COOL)

    alone = [served([request(i, 0, 0.0)]).requests["finish_s"][0] for i in range(len(gaps))]
    result = served([request(i, i, float(at)) for i, at in enumerate(arrival_s)])
    assert waits(result) == pytest.approx(lindley(arrival_s, np.array(alone)), abs=1e-9)


# an outside oracle --------------------------------------------------------------------------------------------------

MEAN_S = 0.01


class OfCustomer(ciw.dists.Distribution):  # type: ignore[misc]
    """The service that each customer brings along, wherever it is served."""

    def __init__(self, service_s: list[float]) -> None:
        self.service_s = service_s

    def sample(self, t: float | None = None, ind: Any = None) -> float:
        return self.service_s[ind.id_number - 1]


def ciw_waits(arrival_s: Floats, service_s: Floats, router: str, replicas: int) -> tuple[Floats, list[int]]:
    """Waits and servers by Ciw: a router that takes no time, and a single-server node for each replica."""
    servers = list(range(2, replicas + 2))
    route = (
        ciw.routing.LoadBalancing(servers, tie_break="order")
        if router == "least-loaded"
        else ciw.routing.Cycle(servers)
    )  # fmt: skip
    gaps = np.diff(arrival_s, prepend=0.0).tolist()
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Sequential([*gaps, float("inf")]), *([None] * replicas)],
        service_distributions=[ciw.dists.Deterministic(0.0), *([OfCustomer(service_s.tolist())] * replicas)],
        number_of_servers=[float("inf"), *([1] * replicas)],
        routing=ciw.routing.NetworkRouting(routers=[route, *([ciw.routing.Leave()] * replicas)]),
    )
    simulation = ciw.Simulation(network)
    simulation.simulate_until_max_customers(len(arrival_s), method="Finish")
    served = sorted((r for r in simulation.get_all_records() if r.node > 1), key=lambda r: r.id_number)
    return np.array([r.waiting_time for r in served]), [r.node - 2 for r in served]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])
def test_replicas_after_a_router_wait_as_in_ciw(router: Any, replicas: int, seed: int, by_token: Hardware) -> None:
    """Customer by customer: which replica each goes to, and how long it waits there."""
    rng = np.random.default_rng(seed)
    count = 400
    arrival_s = np.cumsum(rng.exponential(MEAN_S / (0.9 * replicas), count))
    prompts = np.maximum(1, np.round(rng.exponential(MEAN_S / TOKEN_S, count))).astype(np.int64)
    hardware = replace(by_token, replicas=replicas, router=router)
    result = simulate(single_server("baseline", hardware), requests=prompts_only(arrival_s, prompts))
    expected, servers = ciw_waits(arrival_s, prompts * TOKEN_S, router, replicas)
    assert result.requests["replica"].tolist() == servers
    assert waits(result) == pytest.approx(expected, abs=1e-9)


# Leviathan et al. ---------------------------------------------------------------------------------------------------

STEP_S = 0.01
OUTPUT = 6000


def confidence(samples: list[float], level: float = 0.999) -> tuple[float, float]:
    """A t interval over replications."""
    error = float(stats.sem(samples))
    half = float(stats.t.ppf((1 + level) / 2, len(samples) - 1)) * error
    return float(np.mean(samples)) - half, float(np.mean(samples)) + half


@pytest.mark.parametrize(
    ("alpha", "k", "cost"),
    [(0.0, 3, 0.2), (0.3, 1, 0.05), (0.6, 4, 0.2), (0.8, 2, 0.05), (0.9, 8, 0.05), (1.0, 5, 0.2)],
)
def test_speculation_speeds_up_as_leviathan_says(alpha: float, k: int, cost: float, tmp_path: Path) -> None:
    """Tokens a round (equation 1) and the gain in wall time (theorem 3.8), by whole runs at batch 1.

    The theorem's assumptions made true: a verify costs one step of the target, a draft step `cost` of it, the host
    nothing.
    """
    hardware = card(tmp_path, "leviathan", fit(weights_s=cost * STEP_S), fit(weights_s=STEP_S))

    def decode_s(arch: Arch, runs: bytes) -> tuple[float, Result]:
        server = Server(PAIR, num_workers=1, num_speculative_tokens=k)
        experiment = Experiment(arch=arch, server=server, hardware=hardware, host=FREE_HOST)
        result = simulate(applicable(experiment), requests=[Request(0, 0.0, 10, OUTPUT, runs)])
        return float(result.requests["finish_s"][0] - result.requests["first_token_s"][0]), result

    plain_s, _ = decode_s("autoregressive", bytes(OUTPUT))  # has no use for coins
    assert plain_s == pytest.approx((OUTPUT - 1) * STEP_S)
    tokens, gains = [], []
    for seed in range(12 if 0 < alpha < 1 else 1):  # coins that always fall alike need no second seed
        rng = np.random.default_rng(seed)
        (runs,) = Streams(Acceptance(acceptance_rate=alpha), rng, rng).draw(np.array([OUTPUT]))
        speculative_s, result = decode_s("baseline", runs)
        rounds = int(result.requests["rounds"][0])
        assert speculative_s == pytest.approx(rounds * (k * cost + 1) * STEP_S)
        assert result.requests["drafted"][0] == k * rounds
        tokens.append(1 + float(result.requests["accepted"][0]) / rounds)
        gains.append(plain_s / speculative_s)
    # the output's end cuts the last round short: at most k of its tokens are not needed
    cut = k / OUTPUT
    for samples, expected in (
        (tokens, expected_tokens(alpha, k)),
        (gains, expected_tokens(alpha, k) / (k * cost + 1)),  # Leviathan, theorem 3.8
    ):
        low, high = confidence(samples) if 0 < alpha < 1 else (min(samples), max(samples))
        assert low * (1 - 1e-9) <= expected <= high * (1 + cut + 1e-9)
        assert high - low < 0.06 * expected
