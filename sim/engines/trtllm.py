"""TensorRT-LLM: in-flight batching; commands only where ranks or experts are on several GPUs.

With prefill apart, TTFT lacked nothing on visible servers under Dynamo.
"""

from __future__ import annotations

import json
from dataclasses import replace

from pdvsim.sim.engines.base import Era, InferenceEngine, line
from pdvsim.sim.engines.served import Block, Served, checkpoint
from pdvsim.sim.prices.steps import EngineError, EngineStep, GraphSizes

NEWEST = EngineStep(
    step_s=0.0, row_s=4.62e-06, layer_s=3.87e-06, kernels=0.956, prompts=0.931, reduces=0.967,
    quantised_s=-5.5e-06, experts=1.05, expert_prompts=1.2, request_s=0.025, prompt_token_s=4e-06,
    eager_layer_s=0.002,
)  # fmt: skip
ERAS = (
    Era("1.1", replace(
        NEWEST, step_s=0.0008, row_s=7e-06, layer_s=1.5e-05, kernels=0.95, prompts=1.08, reduces=1.3,
        quantised_s=-4e-06, experts=0.85, expert_prompts=0.9,
    )),
    Era("", NEWEST),
)  # fmt: skip
ERRORS = {
    "b200": EngineError(0.167, 0.493, 0.162, 114),
    "h100-sxm": EngineError(0.215, 1.23, 0.219, 112),
    "h200": EngineError(0.182, 0.802, 0.499, 36),
    "any": EngineError(0.203, 0.892, 0.188, 263),
}


class TensorrtLlm(InferenceEngine):
    """TensorRT-LLM."""

    name, title, checked = "trtllm", "TensorRT-LLM", "1.4.0rc1"
    padding = "tensorrt-llm"
    graphs = GraphSizes((1, 2, 4, *range(8, 129, 8), *range(192, 4097, 64)))  # with enable_padding
    pads = "TensorRT-LLM with enable_padding pads the requests of a step to 1, 2, 4, multiples of 8 up to 128 and of 64"
    lowest_k = 1
    at_0 = "lowest k is 1: at 0 the drafter's KV cache goes stale, and later drafts fail (its pull request 16888)"
    sends_first_token = True
    eras, errors = ERAS, ERRORS

    def commands(self, served: Served) -> list[Block]:
        """The TensorRT-LLM server where ranks or experts are on several GPUs; none elsewhere."""
        hardware, server = served.experiment.hardware, served.experiment.server
        ranks, gpus = hardware.data_parallel_size, hardware.data_parallel_size * hardware.tensor_parallel_size
        if ranks == 1 and not hardware.enable_expert_parallel:
            return []
        label = f"TensorRT-LLM (names as of {self.checked})"
        if served.longest:
            return [Block(label, "", (*served.notes, "its drafters are set in a file, which is not written here"))]
        if 1 < ranks < gpus:
            return [Block(label, "", (*served.notes, "its attention is data-parallel over all GPUs or over none"))]
        words = [
            *("trtllm-serve", checkpoint(served.pair.target), "--tp_size", gpus),
            *(("--ep_size", gpus) if hardware.enable_expert_parallel else ()),
            *("--max_batch_size", server.max_num_seqs, "--max_num_tokens", server.max_num_batched_tokens),
            *(("--config", "ranks.yaml") if (lines := _config(served)) else ()),
        ]
        notes = [*served.notes, *([f"ranks.yaml has the lines {'; '.join(lines)}"] if lines else [])]
        return [Block(label, line(words), tuple(notes))]

    def table(self, served: Served) -> list[Block]:
        """The fields of its `speculative_config` that hold the table."""
        label = f"TensorRT-LLM's speculative_config (checked against {self.checked})"
        if not served.longest:
            return [Block(label, "", ("no drafter: plain decoding is faster at every size",))]
        schedule = {str(last): k for _, last, k in served.ranges}
        notes = ("add the drafter's own fields; above the last batch size it does not draft",)
        return [Block(label, json.dumps({"max_draft_len": served.longest, "draft_len_schedule": schedule}), notes)]


def _config(served: Served) -> list[str]:
    """Settings of ranks and experts in a file."""
    hardware, server = served.experiment.hardware, served.experiment.server
    lines = ["enable_attention_dp: true"] if hardware.data_parallel_size > 1 else []
    if server.attention_dp_timeout_iters is not None:
        waits = f"timeout_iters: {server.attention_dp_timeout_iters}, "
        waits += f"batching_wait_iters: {server.attention_dp_batching_wait_iters}"
        lines.append(f"attention_dp_config: {{enable_balance: true, {waits}}}")
    if hardware.enable_eplb and (experts := served.experiment.pair.target.experts) is not None:
        lines.append(f"moe_config: {{load_balancer: {{num_slots: {experts.slots}, layer_updates_per_iter: 1}}}}")
    return lines


TENSORRT_LLM = TensorrtLlm()
