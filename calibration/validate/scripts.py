"""What InferenceX's scripts pass to the servers that they measure, by what a row of the collection states.

From github.com/SemiAnalysisAI/InferenceX (`benchmarks/`, Apache-2.0), December 2025 to April 2026, and for
Llama-3.1-70B October 2025. A row's version determines its script. Rows of NVIDIA do not state such options: they
have the engines' defaults.

- SGLang on Blackwell looks for new requests every 10 decode steps, from concurrency 16 on every 30
  (--scheduler-recv-interval), but not with GLM-5 in 8 bits. A new request waits for half of them.
- TensorRT-LLM holds prompts of Llama-3.1-70B back for up to 20 steps, with lengths 1024 and 1024 and below 8 GPUs, and
  those of DeepSeek-R1 in 8 bits on a B200 for up to 40 from concurrency 64 on. Its data-parallel ranks wait for each
  other: 60 steps, with gpt-oss its default of 50.
- TensorRT-LLM has CUDA graphs of forwards with prompts for DeepSeek-R1 on a B200: in 4 bits on 8 GPUs with whole
  experts and lengths 1024 and 1024, in 8 bits from concurrency 64 on. No other script of it or SGLang asks for them.
- Until 21 January 2026 a forward of TensorRT-LLM with DeepSeek had room for one of the longest prompts, since then for
  8,192 tokens at least. Until then the load had no warm-up either: TTFT has the first requests of a cold server.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdvsim.sim.config import Server
from pdvsim.sim.core import ServingEngine

MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-v3",
    "moonshotai/Kimi-K2.5": "kimi-k2.5",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2",
    "zhipuai/GLM-5": "glm-5",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}
BLACKWELL = ("b200", "b300", "gb200", "gb300")
UNSTATED = {"vllm": "0.10.2", "sglang": "0.5.3", "trtllm": "1.1.0"}
# SGLang's nightly builds of these rows are of February 2026, when 0.5.9 was being made, unless they have a later date
SGLANG_NIGHTLY, SGLANG_NEWER = "0.5.9", "nightly-dev-202604"
EARLY = ("", "1.1.0rc2.post2")  # TensorRT-LLM with DeepSeek until January 2026
OFTEN, SELDOM, BUSY = 10, 30, 16  # decode steps between two looks of SGLang, and the concurrency from which on


@dataclass(frozen=True)
class StatedServer:
    """What a row states of a server and its load."""

    id: str
    engine: ServingEngine
    version: str  # empty: not stated
    model: str
    card: str
    source: str
    weights: str
    tokens_in: int
    tokens_out: int
    concurrency: int  # of the whole server, not of a data-parallel rank; 0: not known
    tensor_parallel: int  # these three of the servers that decode, where prefill is apart
    data_parallel: int  # ranks that attention is replicated over; 1: none
    expert_parallel: int  # GPUs that experts are spread over; 1: they are sharded like all else
    moe_tp: int

    @property
    def served(self) -> str:
        """The model as pdvsim calls it, without its weights."""
        return MODELS[self.model]

    @property
    def image(self) -> str:
        """The version whose constants it is simulated with: its own, or where it states none, that of InferenceX's
        images in October and November 2025, when these rows were measured."""
        if self.engine == "sglang" and self.version.startswith("nightly") and self.version < SGLANG_NEWER:
            return SGLANG_NIGHTLY
        if (self.engine, self.served, self.card) == ("trtllm", "gpt-oss-120b", "h200"):
            return self.version or "gpt-oss-dev"
        return self.version or UNSTATED[self.engine]

    @property
    def of_inferencex(self) -> bool:
        return self.source == "inferencex"

    @property
    def kv_cache_dtype(self) -> str:
        """Bits of the KV cache; TensorRT-LLM caches in 8 bits what has such weights."""
        model, blackwell = self.served, self.card in BLACKWELL
        if model == "llama-3.1-70b":
            return "fp8"
        if model == "deepseek-v3":
            return "fp8" if self.engine == "trtllm" or blackwell else "auto"
        if model in ("gpt-oss-120b", "glm-5") or (model == "minimax-m2" and self._tuned):
            return "fp8" if blackwell else "auto"
        if model == "qwen3.5-397b-a17b":
            return "auto" if self.weights == "bfloat16" else "fp8"
        return "fp8" if self.engine == "trtllm" and self.weights != "bfloat16" else "auto"

    @property
    def tokens_per_step(self) -> int:
        """Prompt tokens that a forward may carry."""
        if self.served == "minimax-m2" and self._tuned:
            return 2 * self.tokens_in
        if self.engine == "vllm":
            return 8192
        return self._sglang_tokens if self.engine == "sglang" else self._trtllm_tokens

    @property
    def _sglang_tokens(self) -> int:
        """--chunked-prefill-size; the default is by the memory of a card."""
        model, blackwell = self.served, self.card in BLACKWELL
        if not self.of_inferencex or (model == "glm-5" and not blackwell):
            return 16_384 if blackwell else 8192
        if model == "deepseek-v3" and self.weights != "nvfp4":
            return 8192 if blackwell and self.tensor_parallel == 4 else 32_768
        if model == "glm-5":
            return 32_768
        if model == "qwen3.5-397b-a17b" and blackwell:
            return 16_384 if (self.card, self.weights) == ("b300", "fp8") else 32_768
        return 16_384

    @property
    def _trtllm_tokens(self) -> int:
        """max_num_tokens. It does not cut prompts by default."""
        whole = -(-(self.tokens_in + self.concurrency + 64) // 64) * 64
        if self.of_inferencex and self.served == "llama-3.1-70b":
            return 16_384
        if self.of_inferencex and self.served == "gpt-oss-120b":
            return 20_000
        early = self.of_inferencex and self.served == "deepseek-v3" and self.version in EARLY
        return whole if early else max(8192, whole)

    @property
    def receive_interval(self) -> int:
        """--scheduler-recv-interval: decode steps between two looks of SGLang at what has arrived."""
        if self.engine != "sglang" or not self.of_inferencex or self.card not in BLACKWELL or self.data_parallel > 1:
            return 1
        model, eight_bits = self.served, self.weights.startswith("fp8")
        if model == "glm-5":
            return 1 if eight_bits else OFTEN
        often = self.tensor_parallel == 4 if model == "deepseek-v3" else self.card == "b300"
        return OFTEN if self.concurrency < BUSY or (eight_bits and often) else SELDOM

    @property
    def prompt_wait(self) -> tuple[int, float]:
        """Most steps that TensorRT-LLM holds prompts back, and the share of a forward that it would fill."""
        if self.engine != "trtllm" or not self.of_inferencex or self.data_parallel > 1:
            return 0, 0.0
        even = self.tokens_in == self.tokens_out == 1024
        if self.served == "llama-3.1-70b" and even and self.tensor_parallel < 8:
            return 20, 0.9
        late = self.served == "deepseek-v3" and self.version not in EARLY
        if late and even and self.card == "b200" and self.weights == "fp8" and self.concurrency >= 64:
            return 40, 0.8
        return 0, 0.0

    @property
    def rank_wait(self) -> tuple[int | None, int]:
        """Steps that its data-parallel ranks wait until all have prompts, and for more of them; None: they do not."""
        if self.engine != "trtllm" or not self.of_inferencex or self.data_parallel == 1:
            return None, Server.attention_dp_batching_wait_iters
        return (50, 10) if self.served == "gpt-oss-120b" else (60, 0)

    @property
    def prompts_in_graphs(self) -> bool:
        """Whether TensorRT-LLM has CUDA graphs of forwards with prompts (capture_num_tokens)."""
        late = self.engine == "trtllm" and self.served == "deepseek-v3" and self.version not in EARLY
        if not (late and self.of_inferencex and self.card == "b200"):
            return False
        if self.weights == "nvfp4":
            return self.tokens_in == self.tokens_out == 1024 and self.tensor_parallel == self.expert_parallel == 8
        return self.concurrency >= (128 if self.tokens_out == 8192 else 64)

    @property
    def _tuned(self) -> bool:
        """The scripts for MiniMax-M2.5 on Blackwell since vLLM 0.19."""
        return self.card in BLACKWELL and self.version.startswith(("0.19", "nightly"))
