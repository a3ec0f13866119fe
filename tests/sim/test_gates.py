"""When prompts are looked at: laws of gates that hold them back for some steps, on one rank and on several."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.policies.gates import AllRanks
from pdvsim.sim.records import Result
from pdvsim.sim.relevance import refuse_idle
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


def test_prompts_wait_until_they_fill_a_share_of_a_forward_or_for_too_long() -> None:
    """With a small share they never wait; with all of it they always wait as long as they may."""
    plain = simulate(gated("trtllm"))
    check_alike(plain, simulate(gated("trtllm", prompt_wait_steps=20, prompt_wait_share=0.01)))
    patient = simulate(gated("trtllm", prompt_wait_steps=20, prompt_wait_share=0.99))
    assert len(steps_between(patient)) < len(steps_between(plain))
    assert min(steps_between(patient)[1:]) >= 20


# ranks that begin prompts together -----------------------------------------------------------------------------------

RANKS = 4


@dataclass
class Standing:
    """A rank as it stands before a step."""

    prompt: bool
    decodes: bool

    @property
    def waiting(self) -> Any:
        return [None] * self.prompt

    @property
    def in_flight(self) -> int:
        return int(self.decodes)

    prefilling: ClassVar[list[Any]] = []
    settings = Server()

    def admits(self) -> bool:
        return True


@pytest.mark.parametrize(("timeout", "gathering", "standing", "may_begin"), [
    (3, 0, "bd bd bd bd bb", "..b.b"),  # a rank waits for the others until the timeout
    (3, 0, "dd dd bd", "..b"),  # as in TensorRT-LLM: the count goes on while no rank has a prompt
    (100, 0, "pi bi bd", "bb."),  # nobody waits for a rank that does not decode
    (100, 2, "bb bb bb bb", "..b."),  # ranks that all have prompts gather more
    (100, 2, "pp", "b"),  # unless none of them decodes
])  # fmt: skip
def test_when_prompts_begin(timeout: int, gathering: int, standing: str, may_begin: str) -> None:
    """In each step, alike on every rank; a letter per rank: p has a prompt, d decodes, b both, i neither."""
    group: Any = SimpleNamespace(steps=0)
    gate, begins = AllRanks(group, [], timeout, gathering), ""
    for letters in standing.split():
        gate.ranks = ranks = [Standing(one in "pb", one in "db") for one in letters]
        [held] = {gate.holds(rank, 1, 0) for rank in ranks}
        begins += "." if held else "b"
        group.steps += 1
    assert begins == may_begin


def served(timeout: int | None, gathering: int = Server.attention_dp_batching_wait_iters) -> Result:
    waits: dict[str, Any] = {"attention_dp_timeout_iters": timeout, "attention_dp_batching_wait_iters": gathering}
    server = Server("none:qwen3-30b-a3b", max_num_seqs=16, max_num_batched_tokens=4096, **waits)
    layout: dict[str, Any] = {"engine": "trtllm", "data_parallel_size": RANKS, "enable_expert_parallel": True}
    traffic = Traffic("random", input_len=2000, output_len=60, random_range_ratio=0.3, num_prompts=96)
    one = Experiment(
        "autoregressive", replace(traffic, max_concurrency=32), server=server, hardware=Hardware(band=False, **layout)
    )
    refuse_idle([one])
    return simulate(one)


def shared(result: Result) -> float:
    """The share of steps with prompts that have them on all ranks."""
    starts = Counter(result.launches["start_s"][with_prompts(result)].round(7).tolist())
    return sum(count == RANKS for count in starts.values()) / len(starts)


def test_waiting_ranks_prefill_in_fewer_steps_and_decode_faster() -> None:
    """All is served, fewer steps end a prompt, and the first token comes later.

    A step has prompts on all ranks, unless somebody waited for as long as allowed.
    """
    apart, together = served(None), served(60, 0)
    assert all((result.requests["finish_s"] > 0).all() for result in (apart, together))
    assert together.requests["output_tokens"].sum() == apart.requests["output_tokens"].sum()
    assert shared(together) > shared(apart) + 0.5
    step_s = float(np.median(together.launches["end_s"] - together.launches["start_s"]))
    assert waits_s(together).max() < waits_s(apart).max() + 61 * 1.5 * step_s
    ends = [len(set(result.requests["first_token_s"].round(6).tolist())) for result in (apart, together)]
    assert ends[1] < ends[0]
    decode_s, ttft_s = (
        [float((r.requests[end] - r.requests[begin]).mean()) for r in (apart, together)]
        for end, begin in (("finish_s", "first_token_s"), ("first_token_s", "arrival_s"))
    )
    assert decode_s[1] < decode_s[0]
    assert ttft_s[1] > ttft_s[0]
