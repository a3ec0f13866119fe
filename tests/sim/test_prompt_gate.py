"""Ranks that begin prompts together: the rule step by step, and what it does to a server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.policies.gates import AllRanks
from pdvsim.sim.records import Result
from pdvsim.sim.relevance import refuse_idle
from pdvsim.sim.run import simulate

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


def steps(timeout: int, gathering: int, *standing: str) -> list[bool]:
    """Whether prompts may begin in each step; a letter per rank: p has a prompt, d decodes, b both, i neither."""
    group: Any = SimpleNamespace(steps=0)
    gate, may_begin = AllRanks(group, [], timeout, gathering), []
    for letters in standing:
        gate.ranks = ranks = [Standing(one in "pb", one in "db") for one in letters]
        may_begin.append(not any(gate.holds(rank, 1, 0) for rank in ranks))
        assert may_begin[-1] == all(not gate.holds(rank, 1, 0) for rank in ranks)  # every rank gets the same answer
        group.steps += 1
    return may_begin


def test_a_rank_waits_for_the_others_until_the_timeout() -> None:
    assert steps(3, 0, "bd", "bd", "bd", "bd", "bb") == [False, False, True, False, True]


def test_steps_without_any_prompt_count_as_waiting() -> None:
    """As in TensorRT-LLM: the count goes on while no rank has a prompt."""
    assert steps(3, 0, "dd", "dd", "bd") == [False, False, True]


def test_nobody_waits_for_a_rank_that_does_not_decode() -> None:
    assert steps(100, 0, "pi", "bi", "bd") == [True, True, False]


def test_ranks_that_all_have_prompts_gather_more() -> None:
    assert steps(100, 2, "bb", "bb", "bb", "bb") == [False, False, True, False]
    assert steps(100, 2, "pp") == [True]  # none of them decodes


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


def test_waiting_ranks_prefill_in_fewer_steps_and_decode_faster() -> None:
    """All is served, fewer steps end a prompt, and the first token comes later."""
    apart, together = served(None), served(60, 0)
    assert all((result.requests["finish_s"] > 0).all() for result in (apart, together))
    ends = [len(set(result.requests["first_token_s"].round(6).tolist())) for result in (apart, together)]
    assert ends[1] < ends[0]
    decode_s, ttft_s = (
        [float((r.requests[end] - r.requests[begin]).mean()) for r in (apart, together)]
        for end, begin in (("finish_s", "first_token_s"), ("first_token_s", "arrival_s"))
    )
    assert decode_s[1] < decode_s[0]
    assert ttft_s[1] > ttft_s[0]


def test_where_nobody_waits_long_nothing_changes() -> None:
    """A timeout of one step opens before every one."""
    assert served(1, 0).requests["finish_s"].tolist() == served(None).requests["finish_s"].tolist()
