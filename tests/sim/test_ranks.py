"""Data-parallel ranks and experts on several GPUs: laws of their steps, memory and loads."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.cluster import Cluster
from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.ranks import RankGroup
from pdvsim.sim.models.presets import CannotShard, model, shard
from pdvsim.sim.policies.base import Policy
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import interpolate
from pdvsim.sim.records import Keeper, Log
from pdvsim.sim.run import Client, simulate
from pdvsim.sim.workload.requests import Workload

TARGET = "qwen3-30b-a3b"


def experiment(ranks: int = 2, arch: str = "autoregressive", pair: str = f"none:{TARGET}", **more: Any) -> Experiment:
    server = Server(pair=pair, max_num_seqs=64)
    layout = {"data_parallel_size": ranks, "enable_expert_parallel": more.pop("spread", True)}
    hardware = Hardware(**{"gpu": "h200", **layout, **more})
    return Experiment(arch, Traffic(input_len=200, output_len=40, num_prompts=16), server=server, hardware=hardware)


def requests(*sizes: tuple[float, int, int]) -> list[Request]:
    """Requests by arrival, prompt and output tokens; two of three draft tokens are accepted each time."""
    return [Request(at, *size, bytes([2] * size[2])) for at, size in enumerate(sizes)]


def costs(one: Experiment) -> CostModel:
    profile = covering_profile(one)
    costs_of = profile.cost_model(one.pair.target)
    assert costs_of.own is not costs_of
    return costs_of


class GroupOfOne(Cluster):
    """Servers that are groups of one rank."""

    def _server(self, replica: int, rank: int, group: RankGroup | None) -> Policy:
        return super()._server(replica, rank, group or RankGroup(self.env))


@pytest.mark.parametrize(("arch", "pair"), [
    ("autoregressive", f"none:{TARGET}"),
    ("colocated", f"eagle3-{TARGET}:{TARGET}"),
    ("colocated", f"ngram:{TARGET}"),
])  # fmt: skip
def test_a_group_of_one_rank_is_a_server(arch: str, pair: str) -> None:
    one = replace(
        experiment(1, arch, pair, spread=False), traffic=Traffic(request_rate=30, num_prompts=60, input_len=300)
    )
    plain = simulate(one)
    log, env = Log(), Clock()
    cluster = GroupOfOne(env, one, covering_profile(one), log)
    keeper = Keeper(log)
    Client(env, Workload(one.traffic, one.acceptance), one, cluster, None, keeper).run()
    keeper.take(env.now)
    for mine, theirs in ((keeper.requests(), plain.requests), (keeper.launches, plain.launches)):
        for name in theirs:
            np.testing.assert_allclose(np.asarray(mine[name], float), np.asarray(theirs[name], float), 1e-9, 1e-9)


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_ranks_take_their_own_time_and_that_of_the_experts(ranks: int, spread: bool) -> None:
    """With the same requests on each rank, a step takes what one rank does alone, the experts for all, and exchange."""
    one = experiment(ranks, spread=spread)
    result = simulate(one, requests=requests(*[(0.0, 300, 30)] * (4 * ranks)))
    launches, model = result.launches, costs(one)
    decodes = np.flatnonzero(launches["rows"] > 0)
    assert set(launches["gpu"][decodes]) == set(range(ranks))
    for at in decodes:
        rows, context = int(launches["rows"][at]), int(launches["context"][at])
        own_s = model.own.price(rows, 1, 1, context).seconds(context)
        experts_s = model.terms.expert_s * model.experts.read(ranks * rows)
        shared_s = experts_s + model.terms.spread_s(ranks * rows, rows)
        assert launches["end_s"][at] - launches["start_s"][at] == pytest.approx(own_s + shared_s, rel=1e-9)
        assert model.price(rows, 1, 1, context).seconds(context) == pytest.approx(own_s + shared_s, rel=1e-9)
    assert model.terms.exchange_knots[0][1] > 0


def test_all_ranks_step_together_and_the_slowest_sets_the_pace() -> None:
    one = experiment(4)
    result = simulate(
        one, requests=requests((0, 2000, 30), (0, 30, 30), (0.01, 30, 60), (0.02, 900, 20), (0.05, 40, 9))
    )
    launches = result.launches
    steps = sorted({(start, end) for start, end in zip(launches["start_s"], launches["end_s"], strict=True)})
    assert len(steps) < len(launches["start_s"])  # some are of several ranks
    assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(steps))
    model = costs(one)
    for start, end in steps:
        mine = np.flatnonzero(launches["start_s"] == start)
        decoding = [at for at in mine if launches["rows"][at] and launches["rows"][at] == launches["tokens"][at]]
        for at in decoding:
            rows, context = int(launches["rows"][at]), int(launches["context"][at])
            assert end - start >= model.own.price(rows, 1, 1, context).seconds(context)


def test_each_rank_has_room_of_its_own() -> None:
    """Two requests of which one fills a rank: on two ranks both run concurrently, and a third waits."""
    one = experiment(2, kv_capacity_tokens=1000)
    result = simulate(one, requests=requests((0, 700, 100), (0, 700, 100), (0, 700, 100)))
    admitted, finished = result.requests["admitted_s"], result.requests["finish_s"]
    assert admitted[1] == admitted[0] == 0
    assert admitted[2] >= min(finished[:2])
    with pytest.raises(ValueError, match="needs 1504 tokens of KV cache and the server has 1000"):
        simulate(one, requests=requests((0, 1400, 100)))
    with pytest.raises(ValueError, match="leave no room for a KV cache on this GPU"):
        simulate(experiment(8, pair="none:deepseek-v3", gpu="l40s", link="pcie4"))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 4, 16, 64, 256, 2048])
def test_reads_of_the_fullest_gpu_are_those_of_drawn_experts(ranks: int, tokens: int) -> None:
    """Against draws of experts: the distinct ones on the GPU that has the most; never more than it holds."""
    experts = shard(model("qwen3-235b-a22b"), 1, ranks, True).experts
    assert experts is not None
    rng = np.random.default_rng(tokens)
    most = []
    for _ in range(60 if tokens > 256 else 300):
        taken = np.zeros(experts.count, bool)
        order = np.argpartition(rng.random((tokens, experts.count)), experts.per_token, axis=1)
        taken[order[:, : experts.per_token]] = True
        most.append(taken.reshape(ranks, -1).sum(axis=1).max())
    assert experts.read(tokens) == pytest.approx(np.mean(most), rel=0.08)
    assert experts.read(tokens) <= experts.resident == experts.count // ranks


def test_gpus_hold_the_experts_once() -> None:
    """Of all GPUs together, spread or sharded; a rank has its share of all else, and ranks have copies of it."""
    whole = model("deepseek-v3")
    assert whole.experts is not None
    for gpus, ranks in ((1, 8), (2, 4), (8, 1)):
        both = [shard(whole, gpus, ranks, spread) for spread in (True, False)]
        for part in both:
            held = gpus * ranks * part.experts.resident * part.expert_bytes
            assert held == pytest.approx(whole.experts.count * whole.expert_bytes)
            assert part.active_params == both[0].active_params
        assert both[0].weight_bytes == both[1].weight_bytes
    with pytest.raises(CannotShard, match="number of experts, 8, is no multiple"):
        shard(replace(whole, experts=replace(whole.experts, count=8)), 8, 2, True)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_tables_know_experts_on_several_gpus(engine: Any) -> None:
    """More tokens never take less, more GPUs never longer; low-latency exchanges are shorter for few tokens."""
    times = []
    for ranks in (2, 4, 8):
        one = experiment(ranks, pair="none:qwen3-235b-a22b-fp8", engine=engine)
        spread = costs(one).terms
        seconds = [time_s for _, time_s in spread.spread_knots]
        assert seconds == sorted(seconds)
        exchanged = [time_s for _, time_s in spread.exchange_knots]
        assert exchanged == sorted(exchanged)
        model = costs(one)
        sent = [model.routed(0, prompts=[(0, tokens)]) for tokens in (512, 4096)]
        times.append([model.shared([one]).seconds - interpolate(spread.exchange_knots, one[0].tokens) for one in sent])
    assert all(fewer > more for pair in pairwise(times) for fewer, more in zip(*pair, strict=True))
    low, high = (
        costs(experiment(8, pair="none:deepseek-v3", engine=engine, all2all_backend=how)).terms.exchange_knots
        for how in ("deepep_low_latency", "deepep_high_throughput")
    )
    assert low[0][1] < high[0][1]


def test_ranks_are_dealt_as_engines_do() -> None:
    """vLLM and TensorRT-LLM: the rank with the least to do. SGLang: in turn, whatever they have to do."""

    def ranks(engine: Any) -> list[int]:
        one = experiment(2, engine=engine, pair="none:qwen3-235b-a22b-fp8", tensor_parallel_size=2)
        load = requests((0, 100, 2000), (0.1, 100, 3), (5.0, 100, 3), (10.0, 100, 3))
        result = simulate(one, requests=load, traced=True)
        assert result.carried is not None
        rank_of: dict[int, int] = {}
        for gpu, (_, prompts) in zip(result.launches["gpu"].tolist(), result.carried, strict=True):
            for request in prompts:
                rank_of[request] = gpu
        return [rank_of[at] for at in range(4)]

    assert ranks("sglang") == [0, 1, 0, 1]
    assert ranks("vllm") == ranks("trtllm") == [0, 1, 1, 1]
