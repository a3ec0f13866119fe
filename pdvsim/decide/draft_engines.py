"""What engines do with draft lengths by batch size: padding, the lowest length, and a drafter that runs at k=0."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pdvsim.sim.core import Chunk
from pdvsim.sim.hardware.padding import Padding
from pdvsim.sim.machine.batch import Batch, Launch
from pdvsim.sim.policies import named
from pdvsim.sim.policies.colocated import Colocated

EngineName = Literal["vllm", "sglang", "tensorrt-llm"]


class IdleDrafter(Colocated):
    """Plain decoding with a drafter that still runs, as in engines at k=0.

    In each step the drafter processes every row's newest token; its draft is not verified. For draft length 1.
    """

    def draft(self, rows: Batch, k: int, chunks: tuple[Chunk, ...] = (), atomic: bool = False) -> Launch:
        for row in rows:
            row.state.drafter_lag = 0  # it has read all before
        return super().draft(rows, k, chunks, atomic)

    def verify(self, rows: Batch, k: int, chunks: tuple[Chunk, ...] = (), atomic: bool = False) -> Launch:
        rows.k = 0
        return super().verify(rows, 0, chunks, atomic)


IDLE_DRAFTER = named(IdleDrafter)


class EngineFacts(NamedTuple):
    """What an engine does with draft lengths by batch size."""

    padding: Padding
    lowest_k: int  # at k=0 the drafter still runs
    pads: str
    at_0: str


ENGINES: dict[EngineName, EngineFacts] = {
    "vllm": EngineFacts(
        "vllm", 0,
        "vLLM pads the tokens of a step to 1, 2, 4, multiples of 8 up to 256 and multiples of 16 up to 512",
        "at k=0 vLLM still runs the drafter, to keep its KV cache complete (vLLM issue 49548)",
    ),
    "sglang": EngineFacts(
        "sglang", 0,
        "SGLang pads the requests of a step to 1 to 8, even numbers to 32, multiples of 4 to 64, of 8 to 256 and of 16",
        "at k=0 SGLang still runs the drafter",
    ),
    "tensorrt-llm": EngineFacts(
        "tensorrt-llm", 1,
        "TensorRT-LLM with enable_padding pads the requests of a step to 1, 2, 4, multiples of 8 up to 128 and of 64",
        "lowest k is 1: at k=0 TensorRT-LLM leaves the drafter's KV cache stale, and later drafts are rejected "
        "(TensorRT-LLM pull request 16888)",
    ),
}  # fmt: skip
