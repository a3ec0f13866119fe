"""vLLM: V1's scheduler puts prompts and decoding into one step of at most `max_num_batched_tokens`.

What enabling a drafter costs from 0.14 on, which schedules asynchronously (server logs of 0.22.1, `data/h200/vllm`):
- `draft_model`, `ngram` and suffix decoding switch asynchronous scheduling off, so that every step waits for scheduling
  and sampling on the host: `sync_s`, and `sync_row_s` per request (plain servers with and without it).
- A draft model's forwards run in piecewise graphs, whose pieces the host launches one by one: `draft_layer_s` at least,
  more where it is sharded. A busy or slow host takes twice as long: one server's rounds took 19 ms on one day's first
  machine and 40 ms on its second.
- Drafts of uneven length (n-gram, suffix) leave the full graphs of a verify: `uneven_s` per layer.
- EAGLE-3 and block drafters are in full graphs. A round ends with rejection sampling and new metadata: `round_s`, and
  `round_row_s` per request (pull request 29957).
- The KV pool holds the caches of both models, which the simulator computes from their shapes: 12 GiB hold 98,304 tokens
  alone, 95,312 with an EAGLE-3 head and 78,640 with a draft model of 1B.
- `--enforce-eager` has the host launch each layer's kernels: `EAGER_S` per layer at least, from steps of 20 to 23 ms of
  Llama-3.1-8B (visible rows at 1 to 8 requests), on the slow host. Inferred: half of that on a quiet one, and the same
  per layer in other models and in all versions from 0.14 on.
`draft_s` is what a forward of a drafter has outside its graph (issue 45258). Older versions have figures of their own.

With prefill apart a request takes `handover_s` besides: the median that TTFT lacked on seven visible servers with
Kimi-K2.5 under Dynamo. Products of 8 bits with a scale per block were timed waiting for the host, 55 us at least on an
H200 where SGLang's same kernels take 7: servers up to 0.16 wait as well, those of 0.18 do not.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

from pdvsim.sim.config import Experiment
from pdvsim.sim.core import LOOKED_UP, DrafterKind
from pdvsim.sim.engines.base import (
    GIB,
    Era,
    InferenceEngine,
    line,
    shared_flags,
    shared_notes,
    sides_of,
    transfer_notes,
)
from pdvsim.sim.engines.served import Block, Served, checkpoint, drafter_checkpoint, is_fp8
from pdvsim.sim.models.specs import GpuSpec
from pdvsim.sim.policies.options import Server
from pdvsim.sim.prices.options import Hardware
from pdvsim.sim.prices.steps import EngineError, EngineStep, GraphSizes
from pdvsim.sim.workload.suffix import SuffixOptions

NEWEST = EngineStep(
    step_s=0.0005, row_s=5e-06, layer_s=5e-06, kernels=0.93, prompts=1.05, reduces=1.3, quantised_s=0.0,
    block_products="fp8", experts=1.1, expert_prompts=1.6, mxfp4_experts=0.86, mxfp4_prompts=1.8, request_s=0.02,
    prompt_token_s=5e-06, round_s=0.0004, draft_s=0.00014,
    round_row_s=2e-05, sync_s=0.0014, sync_row_s=2.7e-05, handover_s=0.15,
)  # fmt: skip
EAGER = {"draft_layer_s": 0.00027, "draft_shard_s": 0.00045}
UNEVEN = {"uneven_s": 3.5e-5}
EAGER_S = 0.00064
DRAFTERS: dict[DrafterKind, dict[str, float]] = {"model": EAGER, "pard": EAGER, "ngram": UNEVEN, "suffix": UNEVEN}
SYNCHRONOUS: frozenset[DrafterKind] = frozenset({"model", "pard", "ngram", "suffix"})
ERAS = (
    Era("0.14", replace(
        NEWEST, row_s=1.5e-05, layer_s=3.7e-05, kernels=1.06, prompts=1.15, reduces=0.6, quantised_s=-5e-06,
        experts=0.75, expert_prompts=1.4, block_products="fp8_block", mxfp4_experts=None, mxfp4_prompts=None,
        round_s=0.001, round_row_s=0.0, sync_s=0.0, sync_row_s=0.0,
    )),
    Era("0.17", replace(NEWEST, block_products="fp8_block"), DRAFTERS, SYNCHRONOUS, EAGER_S),
    Era("", NEWEST, DRAFTERS, SYNCHRONOUS, EAGER_S),
)  # fmt: skip
ERRORS = {
    "b200": EngineError(0.2, 0.513, 0.198, 174),
    "b300": EngineError(0.162, 0.31, 0.153, 40),
    "h100-sxm": EngineError(0.181, 0.626, 0.199, 58),
    "h200": EngineError(0.26, 0.98, 0.184, 100),
    "any": EngineError(0.226, 0.548, 0.196, 372),
}

DRAFT_MODELS = "0.15.0"  # first releases with each feature
PARALLEL = "0.16.0"
TABLE = "0.24.0"
UNLIKE_VOCABULARIES = "0.25.0"
ADAPTIVE_VERIFICATION = "0.32.0"  # of drafters without a confidence head (pull request 52228)
METHODS = {"model": "draft_model", "pard": "draft_model", "p-eagle": "eagle3"}  # if not named as the drafter
VERDICTS = "vLLM estimates acceptance from draft logits or a confidence head; simulated: from a request's verdicts"
LOOKUP = (3, 5)  # tokens of an n-gram that must agree, and that are compared; as in realrun.ngram
COMPRESSED_BLOCK = 256  # tokens: what InferenceX's scripts give vLLM for DeepSeek-V4, as vLLM's recipes do
ROLES, PORTS = ("kv_producer", "kv_consumer"), (8100, 8200)


class Vllm(InferenceEngine):
    """vLLM."""

    name, title, checked = "vllm", "vLLM", "0.27.1"
    padding = "vllm"
    graphs = GraphSizes(token_buckets=(1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)))  # to cudagraph_capture_sizes
    pads = "vLLM pads the tokens of a step to 1, 2, 4, multiples of 8 up to 256 and multiples of 16 up to 512"
    at_0 = "at k=0 vLLM still runs the drafter, to keep its KV cache complete (vLLM issue 49548)"
    waiting_weight = 4  # the rank with the least sum of running and four times waiting requests
    eras, errors = ERAS, ERRORS

    def chunk(self, card: GpuSpec) -> int:
        """More on large cards but the A100, where it reduces throughput (arg_utils.py, pull request 17885)."""
        return 8192 if card.memory_bytes >= 70 * GIB and not card.name.startswith("a100") else 2048

    def commands(self, served: Served) -> list[Block]:
        """The vLLM server."""
        server, pair, longest = served.experiment.server, served.pair, served.longest
        hardware = served.experiment.hardware
        label = f"vLLM (checked against {self.checked})"
        # vLLM reserves one slot of this budget per request for a draft model
        slots = server.max_num_seqs if longest and server.drafted_by == "model" else 0
        budget = server.max_num_batched_tokens + slots
        words = [
            *("vllm", "serve", checkpoint(pair.target)),
            *("--max-num-seqs", server.max_num_seqs, "--max-num-batched-tokens", max(budget, server.max_num_seqs)),
            *("--enable-chunked-prefill", "--gpu-memory-utilization", hardware.gpu_memory_utilization),
            *shared_flags(served, longest, "--max-model-len", "fp8"),
            *_compressed(served),
            "--enable-prefix-caching" if server.enable_prefix_caching else "--no-enable-prefix-caching",
            *_ranks(hardware),
            *(["--no-async-scheduling"] if server.async_scheduling is False else []),
            *(["--enforce-eager"] if server.enforce_eager else []),
        ]
        notes = shared_notes(served, longest)
        if hardware.kv_offload_gb:
            size = f"{hardware.kv_offload_gb * 1e9 / GIB:.4g}"
            words += ["--kv-offloading-size", size, "--kv-offloading-backend", "native"]
        if hardware.kv_offload_ssd_gb:
            notes.append("for the SSD use LMCache (--kv-offloading-backend lmcache, and its local_disk)")
        if longest:
            config, needs = _speculative(served)
            if server.controller == "adaptive-verification":
                words, notes = ["VLLM_USE_V2_MODEL_RUNNER=1", *words], [*notes, VERDICTS]
                context_len = server.adaptive_verification_profile_context_len
                if not context_len:
                    notes.append(
                        "simulated with the costs of each step; vLLM times steps once, at a context of 8,192 tokens"
                    )
                elif context_len != Server.adaptive_verification_profile_context_len:
                    words.insert(1, f"VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN={context_len}")
            words += ["--speculative-config", json.dumps(config)]
            notes += [needs] if needs else []
            if server.drafted_by == "suffix":
                notes.append("needs the package arctic-inference; vLLM then schedules synchronously")
            if slots:
                notes.append(f"{slots} of --max-num-batched-tokens are the slots that vLLM keeps for its drafter")
        return [Block(label, line(words), (*notes, *(_varying_notes(served) if served.varies else ())))]

    def apart(self, experiment: Experiment) -> list[Block]:
        """Every kind of vLLM server of a disaggregated one, and the proxy before them."""
        blocks, hosts = [], []
        for (name, side, count), role, port in zip(sides_of(experiment), ROLES, PORTS, strict=True):
            [one] = self.commands(side)
            config = {"kv_connector": "NixlConnector", "kv_role": role}
            words = f"{one.text} --port {port} {line(['--kv-transfer-config', json.dumps(config)])}"
            changed = f"start {count} of them, each with its own GPUs, --port and VLLM_NIXL_SIDE_CHANNEL_PORT"
            notes = [*one.notes, *([changed] if count > 1 else [])]
            if side.experiment.hardware.kv_offload_gb:
                notes.append("name both connectors, of the transfer and of the KV tier, in a MultiConnector")
            blocks.append(Block(f"{one.label}, {name}", words, tuple(notes)))
            kind = "prefiller" if role == ROLES[0] else "decoder"
            hosts += [f"--{kind}-hosts", *["localhost"] * count]
            hosts += [f"--{kind}-ports", *(str(port + at) for at in range(count))]
        proxy = ["python", "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py", "--port", 8000, *hosts]
        about = "from vLLM's repository; it takes engines in turn, simulated: the least loaded"
        return [*blocks, Block("vLLM, the proxy", line(proxy), (about, *transfer_notes(experiment.hardware)))]


def _speculative(served: Served) -> tuple[dict[str, Any], str]:
    """The fields of `--speculative-config`, and the version that they need; empty: any."""
    server, pair, kind = served.experiment.server, served.pair, served.experiment.server.drafted_by
    config: dict[str, Any] = {"method": METHODS.get(kind, kind)}
    if kind == "ngram":
        config |= {"prompt_lookup_min": LOOKUP[0], "prompt_lookup_max": LOOKUP[1]}
    elif kind == "suffix":
        config |= asdict(SuffixOptions())
    elif kind != "mtp":
        config["model"] = drafter_checkpoint(served.experiment)
    if kind == "model" and is_fp8(pair.draft):
        config["quantization"] = "fp8"
    config["num_speculative_tokens"] = served.longest
    if kind in ("pard", "p-eagle"):
        config["parallel_drafting"] = True
    if kind not in LOOKED_UP and (size := served.experiment.hardware.tensor_parallel_size) > 1:
        config["draft_tensor_parallel_size"] = size
    needs = f"needs vLLM {DRAFT_MODELS} or later, for draft models" if kind == "model" else ""
    needs = f"needs vLLM {PARALLEL} or later, for parallel drafting" if pair.draft.parallel else needs
    if served.varies:
        config["num_speculative_tokens_per_batch_size"] = served.ranges
        needs = f"needs vLLM {TABLE} or later, for the table"
    if kind == "model" and pair.draft.vocab != pair.target.vocab:
        config["use_heterogeneous_vocab"] = True
        needs = f"needs vLLM {UNLIKE_VOCABULARIES} or later, for vocabularies of different size"
    if server.controller == "adaptive-verification":
        config["enable_adaptive_verification"] = True
        needs = f"needs vLLM {ADAPTIVE_VERIFICATION} or later, with its V2 model runner and full CUDA graphs"
    return config, needs


def _compressed(served: Served) -> list[Any]:
    """Flags of models with compressed attention, whose cache has 8 bits; SGLang has them so without being asked."""
    if served.pair.target.compressed is None:
        return []
    asked = served.experiment.server.kv_cache_dtype == "fp8"
    return [*([] if asked else ["--kv-cache-dtype", "fp8"]), "--block-size", COMPRESSED_BLOCK]


def _ranks(hardware: Hardware) -> list[Any]:
    """Flags of data-parallel ranks and of experts on several GPUs."""
    flags: list[Any] = ["--data-parallel-size", hardware.data_parallel_size] if hardware.data_parallel_size > 1 else []
    flags += ["--enable-expert-parallel"] if hardware.enable_expert_parallel else []
    if hardware.enable_eplb:
        copies = json.dumps({"num_redundant_experts": hardware.num_redundant_experts})
        flags += ["--enable-eplb", *(["--eplb-config", copies] if hardware.num_redundant_experts else [])]
    return flags if hardware.all2all_backend is None else [*flags, "--all2all-backend", hardware.all2all_backend]


def _varying_notes(served: Served) -> list[str]:
    """Notes on draft lengths by batch size."""
    one = f"k={served.k}" if served.k else "no drafter"
    faster = f"the table is {served.single_lost:.1%} faster than {one} throughout"
    notes = ["with a draft model vLLM's V1 runner uses piecewise CUDA graphs"]
    return [
        *(notes if served.experiment.server.drafted_by == "model" else []),
        "vLLM counts all requests of a step, those in prefill included",
        *([] if math.isnan(served.single_lost) else [faster]),
        "vLLM's tests of the table are with EAGLE and DFlash: measure at the edges of the ranges (issue 49548)",
    ]


VLLM = Vllm()
