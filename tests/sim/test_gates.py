"""When prompts are looked at: laws of gates that hold them back for some steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate
from pdvsim.testing import check_alike

ONE = Experiment(
    "autoregressive",
    Traffic(
        dataset_name="random", input_len=300, output_len=400, random_range_ratio=0.1, num_prompts=80, max_concurrency=8
    ),
    server=Server(pair="none:llama-3.1-8b", max_num_seqs=64),
    hardware=Hardware(gpu="h100-sxm", engine="sglang"),
)  # fmt: skip


def gated(engine: str = "sglang", **settings: float) -> Experiment:
    server = replace(ONE.server, max_num_batched_tokens=8192, **settings)
    return replace(ONE, server=server, hardware=replace(ONE.hardware, engine=engine))


def waits_s(result: Result) -> np.ndarray:
    """From arrival to admission, of requests that arrived while others decoded."""
    late = result.requests["arrival_s"] > 0
    return (result.requests["admitted_s"] - result.requests["arrival_s"])[late]


def with_prompts(result: Result) -> np.ndarray:
    """Which launches read prompts: they have more new tokens than rows."""
    prefills: np.ndarray = result.launches["tokens"] > result.launches["rows"]
    return prefills


def steps_between(result: Result) -> list[int]:
    """Decode steps between forwards with prompts."""
    order = np.argsort(result.launches["start_s"], kind="stable")
    prompts = np.flatnonzero(with_prompts(result)[order])
    return [b - a - 1 for a, b in pairwise(prompts.tolist())]


@pytest.mark.parametrize("interval", [20, 50])
def test_who_arrives_waits_for_half_of_the_steps_between_two_looks(interval: int) -> None:
    """They arrive at any time between looks, so the mean is a half; and it is the wait alone that grows."""
    plain, seldom = simulate(gated()), simulate(gated(receive_interval=interval))
    launches = plain.launches
    decode_s = float(np.median((launches["end_s"] - launches["start_s"])[~with_prompts(plain)]))
    more_s = waits_s(seldom).mean() - waits_s(plain).mean()
    assert more_s == pytest.approx(interval / 2 * decode_s, rel=0.3)
    assert waits_s(seldom).max() < waits_s(plain).max() + (interval + 1) * 1.3 * decode_s
    assert seldom.requests["output_tokens"].sum() == plain.requests["output_tokens"].sum()


def test_it_looks_after_a_prefill_and_then_every_so_many_steps() -> None:
    assert set(steps_between(simulate(gated(receive_interval=20)))) - {0} <= set(range(20, 1000, 20))
    assert len(set(steps_between(simulate(gated()))) - {0}) > 10


@pytest.mark.parametrize("settings", [{"receive_interval": 20}, {"prompt_wait_steps": 20, "prompt_wait_share": 0.2}])
def test_rounds_that_are_simulated_in_one_go_change_nothing(settings: dict[str, float]) -> None:
    one = gated("trtllm" if "prompt_wait_steps" in settings else "sglang", **settings)
    check_alike(simulate(one), simulate(one, blocks=False))


def test_one_step_between_looks_is_none() -> None:
    check_alike(simulate(gated(receive_interval=1)), simulate(ONE))


def test_prompts_wait_until_they_fill_a_share_of_a_forward_or_for_too_long() -> None:
    """With a small share they never wait; with all of it they always wait as long as they may."""
    plain = simulate(gated("trtllm"))
    check_alike(plain, simulate(gated("trtllm", prompt_wait_steps=20, prompt_wait_share=0.01)))
    patient = simulate(gated("trtllm", prompt_wait_steps=20, prompt_wait_share=0.99))
    assert len(steps_between(patient)) < len(steps_between(plain))
    assert min(steps_between(patient)[1:]) >= 20


def test_ranks_prefill_together_or_after_too_many_steps() -> None:
    """A step has prompts on all ranks, unless somebody waited for as long as allowed."""
    traffic = replace(ONE.traffic, num_prompts=48, max_concurrency=8, output_len=200)
    hardware = Hardware(gpu="h200", engine="trtllm", data_parallel_size=2, enable_expert_parallel=True)
    one = replace(ONE, traffic=traffic, hardware=hardware, server=Server(pair="none:qwen3-30b-a3b", max_num_seqs=64))
    waits = replace(one.server, attention_dp_timeout_iters=30, attention_dp_batching_wait_iters=0)
    alone, together = simulate(one), simulate(replace(one, server=waits))

    def shared(result: Result) -> float:
        """The share of steps with prompts that have them on both ranks."""
        starts = Counter(result.launches["start_s"][with_prompts(result)].round(7).tolist())
        return sum(count == 2 for count in starts.values()) / len(starts)

    assert shared(together) > shared(alone) + 0.2
    assert together.requests["output_tokens"].sum() == alone.requests["output_tokens"].sum()
    decode_s = float(np.median(together.launches["end_s"] - together.launches["start_s"]))
    assert waits_s(together).max() < waits_s(alone).max() + 31 * 1.5 * decode_s
