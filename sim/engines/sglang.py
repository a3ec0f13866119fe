"""SGLang: prompts are prefilled in batches of their own while decoding waits.

All steps of a draft are replayed as one CUDA graph (its EAGLEDraftCudaGraphRunner), which cost nothing more. What a
round adds is `round_s`, from published pairs (`pdvsim validate --speculation`). Up to 0.5.5 rounds were several times
as slow: servers with 0.5.4 lost by drafts that gained with 0.5.6 (SpecForge issues 339 and 352, December 2025).
Verifies of latent attention take longer than the tables say (`latent_s`).

Newer than the published servers is 0.5.16, measured with Llama-3.1-8B on an H200 (`data/h200/sglang`; a fit to its 16
visible benches): it schedules while the GPU computes, with drafters too, and `--disable-overlap-schedule` costs
`sync_s` per step. Inferred: the same of 0.5.13 to 0.5.15, and of other models and cards.

With prefill apart a request takes `handover_s` besides: the median that TTFT lacked on some 15 visible servers with
DeepSeek-R1 under Dynamo.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from pdvsim.sim.config import Experiment
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
from pdvsim.sim.prices.options import Hardware
from pdvsim.sim.prices.steps import EngineError, EngineStep, GraphSizes

CHUNKS = ((35, 2048), (60, 4096), (160, 8192), (float("inf"), 16384))  # below so many GiB of memory
PUBLISHED = EngineStep(
    step_s=0.0012, row_s=1.74e-05, layer_s=3e-06, kernels=0.95, prompts=1.05, reduces=1.6, quantised_s=1.2e-05,
    experts=0.8, expert_prompts=1.9, request_s=0.03, prompt_token_s=6e-06, round_s=0.0014, latent_s=4e-05,
    eager_layer_s=0.0012, handover_s=0.18,
)  # fmt: skip
NEWEST = replace(PUBLISHED, step_s=0.0005, request_s=0.013, round_s=0.0021, sync_s=0.0014)
ERAS = (
    Era("0.5.6", replace(
        PUBLISHED, state_s=3.8e-05, sparse_s=5e-05, round_s=0.0048, latent_s=0.0, eager_layer_s=0.0,
    )),
    Era("0.5.10", replace(PUBLISHED, state_s=3.8e-05, sparse_s=5e-05, eager_layer_s=0.0)),
    Era("0.5.13", PUBLISHED),
    Era("", NEWEST),
)  # fmt: skip
ERRORS = {
    "b200": EngineError(0.276, 0.629, 0.337, 88),
    "b300": EngineError(0.4, 0.816, 0.372, 23),
    "h100-sxm": EngineError(0.099, 0.328, 0.065, 23),
    "h200": EngineError(0.344, 4.466, 0.097, 44),
    "any": EngineError(0.297, 3.238, 0.304, 178),
}

DRAFT_MODELS = "0.5.2"  # first releases with each feature
ADAPTIVE = "0.5.14"  # with slots by batch size, and with 0 among them
ALGORITHMS = {"model": "STANDALONE", "mtp": "EAGLE", "dflash": "DFLASH"}  # if not EAGLE3
SEPARATE_PREFILL = "with a drafter it prefills in separate batches, not together with decoding as colocated"
DEEPEP_MODES = {"deepep_low_latency": "low_latency", "deepep_high_throughput": "normal"}
MODES, PORTS = ("prefill", "decode"), (30100, 30200)
LOOKUPS = {
    "ngram": "its n-gram drafts are trees from a cache over all requests, which is not what was simulated",
    "suffix": "it has no suffix decoding",
}


class Sglang(InferenceEngine):
    """SGLang."""

    name, title, checked = "sglang", "SGLang", "0.5.18"
    padding = "sglang"
    graphs = GraphSizes((*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, 4097, 16)))
    pads = (
        "SGLang pads the requests of a step to 1 to 8, even numbers to 32, multiples of 4 to 64, of 8 to 256 and of 16"
    )
    at_0 = "at k=0 SGLang still runs the drafter"
    separate_prefill = sends_first_token = True
    waiting_weight = None
    eras, errors = ERAS, ERRORS

    def chunk(self, card: GpuSpec) -> int:
        """By memory (server_args.py): of an A100 or H100 8192, of a B200 16384."""
        return next(tokens for gib, tokens in CHUNKS if card.memory_bytes < gib * GIB)

    def commands(self, served: Served) -> list[Block]:
        """The SGLang server, and the configuration file of its adaptive speculation."""
        server, pair, k = served.experiment.server, served.pair, served.k
        label, kind = f"SGLang (checked against {self.checked})", server.drafted_by
        if k and (why := _lacks(served)):
            return [Block(label, "", (*served.notes, why))]
        hardware = served.experiment.hardware
        ranks = hardware.data_parallel_size  # SGLang divides both limits by them
        words = [
            *("python3", "-m", "sglang.launch_server", "--model-path", checkpoint(pair.target)),
            *("--max-running-requests", ranks * server.max_num_seqs),
            *("--chunked-prefill-size", ranks * server.max_num_batched_tokens),
            *(["--disable-cuda-graph"] if server.enforce_eager else []),
            *(["--disable-overlap-schedule"] if server.async_scheduling is False else []),
            *("--mem-fraction-static", hardware.gpu_memory_utilization),
            *shared_flags(served, k, "--context-length", "fp8_e4m3", ranks),
            *([] if server.enable_prefix_caching else ["--disable-radix-cache"]),
            *_ranks(hardware),
        ]
        notes = shared_notes(served, k)
        if hardware.kv_offload_gb:
            size = f"{hardware.kv_offload_gb / hardware.tensor_parallel_size:.4g}"  # of each GPU
            words += ["--enable-hierarchical-cache", "--hicache-size", size, "--hicache-write-policy", "write_through"]
        if hardware.kv_offload_ssd_gb:
            words += ["--hicache-storage-backend", "file"]
        if k:
            words += ["--speculative-algorithm", ALGORITHMS.get(kind, "EAGLE3")]
            if kind != "mtp":
                words += ["--speculative-draft-model-path", drafter_checkpoint(served.experiment)]
            if kind == "model" and is_fp8(pair.draft):
                words += ["--speculative-draft-model-quantization", "fp8"]
            words += ["--speculative-num-steps", k, "--speculative-eagle-topk", 1] if kind != "dflash" else []
            words += ["--speculative-num-draft-tokens", k + 1]
            if kind == "model":
                notes.append(f"needs SGLang {DRAFT_MODELS} or later, for draft models")
            notes.append(SEPARATE_PREFILL)
        elif hardware.predicted_engine != self.name:  # it was simulated with prompts in steps with decoding
            words.append("--enable-mixed-chunk")
        blocks = [Block(label, line(words), tuple(notes))]
        if served.varies:
            slots = {str(first): {"candidate_steps": [length]} for first, _, length in served.ranges}
            about = [f"for --speculative-adaptive --speculative-adaptive-config FILE, SGLang {ADAPTIVE} or later"]
            if kind == "model":
                about.append(
                    f"{self.checked} supports it only for EAGLE and EAGLE3 drafters: with a draft model it warns and "
                    "keeps its fixed draft length"
                )
            blocks.append(Block("SGLang's adaptive configuration, a file", json.dumps(slots), tuple(about)))
        return blocks

    def apart(self, experiment: Experiment) -> list[Block]:
        """Every kind of SGLang server of a disaggregated one, and the router before them."""
        blocks, router = [], ["python3", "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        for (name, side, count), mode, port in zip(sides_of(experiment), MODES, PORTS, strict=True):
            one, *more = self.commands(side)
            if not one.text:
                return [one]
            words = one.text.removesuffix(" --enable-mixed-chunk")
            words += f" --port {port} --disaggregation-mode {mode} --disaggregation-transfer-backend nixl"
            notes = [note for note in one.notes if note != SEPARATE_PREFILL]
            notes += [f"start {count} of them, each with another --port and its own GPUs"] if count > 1 else []
            blocks += [Block(f"{one.label}, {name}", words, tuple(notes)), *(more if mode == "decode" else [])]
            for at in range(count):
                router += [f"--{mode}", f"http://localhost:{port + at}"]
        router += ["--policy", "cache_aware" if experiment.hardware.router == "prefix-aware" else "power_of_two"]
        router += ["--port", "8000"]
        return [*blocks, Block("SGLang, the router", line(router), tuple(transfer_notes(experiment.hardware)))]


def _lacks(served: Served) -> str:
    """Why SGLang cannot draft as an experiment does; empty if it can."""
    server, draft, target = served.experiment.server, served.pair.draft, served.pair.target
    kind = server.drafted_by
    if server.controller == "adaptive-verification":
        return "it has no flag for adaptive verification of these drafts"
    if kind == "model" and draft.vocab != target.vocab:
        return f"it rejects vocabularies of different size ({draft.vocab:,} and {target.vocab:,})"
    if kind in ("pard", "p-eagle"):
        return f"it has no flag for {kind}: of parallel drafters it serves dflash"
    return LOOKUPS.get(kind, "")


def _ranks(hardware: Hardware) -> list[Any]:
    """Flags of ranks and of experts; SGLang's tensor parallelism counts the GPUs of all ranks."""
    ranks, gpus = hardware.data_parallel_size, hardware.data_parallel_size * hardware.tensor_parallel_size
    flags: list[Any] = ["--enable-dp-attention", "--dp-size", ranks] if ranks > 1 else []
    flags += ["--ep-size", gpus] if hardware.enable_expert_parallel else []
    if hardware.enable_eplb:
        copies = hardware.num_redundant_experts
        flags += ["--enable-eplb", *(["--ep-num-redundant-experts", copies] if copies else [])]
    if hardware.all2all_backend == "flashinfer_nvlink_two_sided":
        return [*flags, "--moe-a2a-backend", "flashinfer"]
    mode = DEEPEP_MODES.get(hardware.all2all_backend or "")
    return flags if mode is None else [*flags, "--moe-a2a-backend", "deepep", "--deepep-mode", mode]


SGLANG = Sglang()
