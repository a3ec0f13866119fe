"""An experiment as a command to start: vLLM, SGLang, `pdvsim run` and `realrun`.

Flags and fields are those of the versions named below; each command states the minimum version it needs. Features that
an engine does not have, such as lanes, are not translated: the command then starts colocated batching at its best.

Not checked: that the command starts. Nothing of vLLM or SGLang is imported or run.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import asdict, replace
from typing import Any

from pdvsim.common.commandline import command_line
from pdvsim.decide.served import Block, Served, as_served, checkpoint, drafter_checkpoint, served_as, unknown_head
from pdvsim.realrun import ngram
from pdvsim.realrun.machine import Machine, refuse
from pdvsim.sim.config import Experiment, Hardware
from pdvsim.sim.core import LOOKED_UP, ServingEngine
from pdvsim.sim.hardware.kernels import shipped_tables
from pdvsim.sim.hardware.links import NODE
from pdvsim.sim.hardware.models import FP8, NVFP4, bits_of, unquantised
from pdvsim.sim.policies.options import Server
from pdvsim.sim.specs import ModelSpec
from pdvsim.sim.workload.suffix import SuffixOptions

VLLM = "0.27.1"  # releases that the flags were checked against
SGLANG = "0.5.18"
TENSORRT_LLM = "1.4.0rc1"
VLLM_DRAFT_MODELS = "0.15.0"  # first releases with each feature
VLLM_PARALLEL = "0.16.0"
VLLM_TABLE = "0.24.0"
VLLM_UNLIKE_VOCABULARIES = "0.25.0"
VLLM_ADAPTIVE_VERIFICATION = "0.32.0"  # of drafters without a confidence head (pull request 52228)
SGLANG_DRAFT_MODELS = "0.5.2"
SGLANG_ADAPTIVE = "0.5.14"  # with slots by batch size, and with 0 among them

METHODS = {"model": "draft_model", "pard": "draft_model", "p-eagle": "eagle3"}  # vLLM's, if not as the drafter
ALGORITHMS = {"model": "STANDALONE", "mtp": "EAGLE", "dflash": "DFLASH"}  # SGLang's, if not EAGLE3
SIDES = ("the engines that prefill", "the engines that decode")
VLLM_ROLES = ("kv_producer", "kv_consumer")
GIB = 2**30
SEPARATE_PREFILL = "with a drafter it prefills in separate batches, not together with decoding as colocated"
ENGINES: dict[str, ServingEngine] = {
    "vLLM": "vllm", "SGLang": "sglang", "TensorRT-LLM's": "trtllm", "TensorRT-LLM": "trtllm",
}  # fmt: skip
VLLM_FP8 = "fp8"
COMPRESSED_BLOCK = 256  # tokens: what InferenceX's scripts give vLLM for DeepSeek-V4, as vLLM's recipes do
DEEPEP_MODES = {"deepep_low_latency": "low_latency", "deepep_high_throughput": "normal"}  # SGLang's names


def deployment(experiment: Experiment, fixed: Experiment | None = None) -> list[Block]:
    """Commands for an experiment; if engines do not support it, `fixed` is colocated batching at its best k."""
    served = served_as(experiment, fixed)
    if not isinstance(served, Served):
        engines = [Block("vLLM, SGLang", "", (served,))]
    elif served.experiment.sides is not None:
        engines = [*vllm_apart(served.experiment), *sglang_apart(served.experiment)]
    else:
        engines = [vllm(served), *sglang(served)]
        if (block := trtllm_serve(served)) is not None:
            engines.append(block)
    engines = [_of_engine(block, experiment) for block in engines]
    return [*engines, Block("pdvsim", command_line("pdvsim run", experiment)), realrun(experiment)]


def _of_engine(block: Block, experiment: Experiment) -> Block:
    """The block with a note where another engine than its own was predicted."""
    engine = ENGINES.get(block.label.partition(" ")[0])
    predicted, card = experiment.hardware.predicted_engine, experiment.hardware.gpu
    if engine is None or engine == predicted or not block.text:
        return block
    known = any((engine, card) == tables[:2] for tables in shipped_tables())
    how = f"--engine {engine} predicts its own" if known else f"its own on {card} are not known"
    return replace(block, notes=(*block.notes, f"the figures are of the engine {predicted}: {how}"))


def vllm(served: Served) -> Block:
    """The vLLM server."""
    server, pair, longest = served.experiment.server, served.pair, served.longest
    label = f"vLLM (checked against {VLLM})"
    if longest and (why := unknown_head(served.experiment)):
        return Block(label, "", (*served.notes, why))
    kind = server.drafted_by
    # vLLM reserves one slot of this budget per request for a draft model
    budget = server.max_num_batched_tokens + (server.max_num_seqs if longest and kind == "model" else 0)
    words = [
        *("vllm", "serve", checkpoint(pair.target)),
        *("--max-num-seqs", server.max_num_seqs, "--max-num-batched-tokens", max(budget, server.max_num_seqs)),
        *("--enable-chunked-prefill", "--gpu-memory-utilization", served.experiment.hardware.gpu_memory_utilization),
        *_shared_flags(served, longest, "--max-model-len", VLLM_FP8, "--no-enable-prefix-caching"),
        *_vllm_ranks(served.experiment.hardware),
    ]
    notes = _shared_notes(served, longest)
    if host_gb := served.experiment.hardware.kv_offload_gb:
        words += ["--kv-offloading-size", f"{host_gb * 1e9 / GIB:.4g}", "--kv-offloading-backend", "native"]
    if served.experiment.hardware.kv_offload_ssd_gb:
        notes.append("for the SSD use LMCache (--kv-offloading-backend lmcache, and its local_disk)")
    if longest:
        parallel = pair.draft.parallel
        config: dict[str, Any] = {"method": METHODS.get(kind, kind)}
        if kind == "ngram":
            config |= {"prompt_lookup_min": ngram.LEAST, "prompt_lookup_max": ngram.MOST}
        elif kind == "suffix":
            config |= asdict(SuffixOptions())
        elif kind != "mtp":
            config["model"] = drafter_checkpoint(served.experiment)
        if kind == "model" and _is_fp8(pair.draft):
            config["quantization"] = "fp8"
        config["num_speculative_tokens"] = longest
        if kind in ("pard", "p-eagle"):
            config["parallel_drafting"] = True
        if kind not in LOOKED_UP and (size := served.experiment.hardware.tensor_parallel_size) > 1:
            config["draft_tensor_parallel_size"] = size
        needs = f"needs vLLM {VLLM_DRAFT_MODELS} or later, for draft models" if kind == "model" else ""
        needs = f"needs vLLM {VLLM_PARALLEL} or later, for parallel drafting" if parallel else needs
        if served.varies:
            config["num_speculative_tokens_per_batch_size"] = served.ranges
            needs = f"needs vLLM {VLLM_TABLE} or later, for the table"
        if kind == "model" and pair.draft.vocab != pair.target.vocab:
            config["use_heterogeneous_vocab"] = True
            needs = f"needs vLLM {VLLM_UNLIKE_VOCABULARIES} or later, for vocabularies of different size"
        if server.controller == "adaptive-verification":
            config["enable_adaptive_verification"] = True
            needs = f"needs vLLM {VLLM_ADAPTIVE_VERIFICATION} or later, with its V2 model runner and full CUDA graphs"
            words = ["VLLM_USE_V2_MODEL_RUNNER=1", *_profiled(server), *words]
            notes += _adaptive_notes(server)
        words += ["--speculative-config", json.dumps(config)]
        notes += [needs] if needs else []
        if kind == "suffix":
            notes.append("needs the package arctic-inference; vLLM then schedules synchronously")
        if kind == "model":
            notes.append(
                f"{server.max_num_seqs} of --max-num-batched-tokens are the slots that vLLM keeps for its drafter"
            )
    if served.varies:
        one = f"k={served.k}" if served.k else "no drafter"
        notes += ["with a draft model vLLM's V1 runner uses piecewise CUDA graphs"] if kind == "model" else []
        known = not math.isnan(served.single_lost)
        notes += [
            "vLLM counts all requests of a step, those in prefill included",
            *([f"the table is {served.single_lost:.1%} faster than {one} throughout"] if known else []),
            "vLLM's tests of the table are with EAGLE and DFlash: measure at the edges of the ranges (issue 49548)",
        ]
    return Block(label, _line(words), tuple(notes))


def _profiled(server: Server) -> list[str]:
    """vLLM's setting of the context at which it times its steps, if it is not the default."""
    context_len = server.adaptive_verification_profile_context_len
    usual = context_len in (0, Server.adaptive_verification_profile_context_len)
    return [] if usual else [f"VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN={context_len}"]


def _adaptive_notes(server: Server) -> list[str]:
    notes = ["vLLM estimates acceptance from draft logits or a confidence head; simulated: from a request's verdicts"]
    if not server.adaptive_verification_profile_context_len:
        notes.append("simulated with the costs of each step; vLLM times steps once, at a context of 8,192 tokens")
    return notes


def sglang(served: Served) -> list[Block]:
    """The SGLang server, and the configuration file of its adaptive speculation."""
    server, pair, k = served.experiment.server, served.pair, served.k
    label, kind = f"SGLang (checked against {SGLANG})", server.drafted_by
    if k and (why := _not_in_sglang(served)):
        return [Block(label, "", (*served.notes, why))]
    hardware = served.experiment.hardware
    ranks = hardware.data_parallel_size  # SGLang divides both limits by them
    words = [
        *("python3", "-m", "sglang.launch_server", "--model-path", checkpoint(pair.target)),
        *("--max-running-requests", ranks * server.max_num_seqs),
        *("--chunked-prefill-size", ranks * server.max_num_batched_tokens),
        *("--mem-fraction-static", hardware.gpu_memory_utilization),
        *_shared_flags(served, k, "--context-length", "fp8_e4m3", "--disable-radix-cache", ranks),
        *_sglang_ranks(hardware),
    ]
    notes = _shared_notes(served, k)
    if hardware.kv_offload_gb:
        size = f"{hardware.kv_offload_gb / hardware.tensor_parallel_size:.4g}"  # of each GPU
        words += ["--enable-hierarchical-cache", "--hicache-size", size, "--hicache-write-policy", "write_through"]
    if hardware.kv_offload_ssd_gb:
        words += ["--hicache-storage-backend", "file"]
    if k:
        words += ["--speculative-algorithm", ALGORITHMS.get(kind, "EAGLE3")]
        if kind != "mtp":
            words += ["--speculative-draft-model-path", drafter_checkpoint(served.experiment)]
        if kind == "model" and _is_fp8(pair.draft):
            words += ["--speculative-draft-model-quantization", "fp8"]
        words += ["--speculative-num-steps", k, "--speculative-eagle-topk", 1] if kind != "dflash" else []
        words += ["--speculative-num-draft-tokens", k + 1]
        if kind == "model":
            notes.append(f"needs SGLang {SGLANG_DRAFT_MODELS} or later, for draft models")
        notes.append(SEPARATE_PREFILL)
    elif served.experiment.hardware.predicted_engine != "sglang":  # it was simulated with prompts in separate batches
        words.append("--enable-mixed-chunk")
    blocks = [Block(label, _line(words), tuple(notes))]
    if served.varies:
        slots = {str(first): {"candidate_steps": [length]} for first, _, length in served.ranges}
        about = [f"for --speculative-adaptive --speculative-adaptive-config FILE, SGLang {SGLANG_ADAPTIVE} or later"]
        if kind == "model":
            about.append(
                f"{SGLANG} supports it only for EAGLE and EAGLE3 drafters: with a draft model it warns and keeps "
                "its fixed draft length"
            )
        blocks.append(Block("SGLang's adaptive configuration, a file", json.dumps(slots), tuple(about)))
    return blocks


def _not_in_sglang(served: Served) -> str:
    """Why SGLang cannot draft as an experiment does; empty if it can."""
    server, draft, target = served.experiment.server, served.pair.draft, served.pair.target
    kind = server.drafted_by
    if server.controller == "adaptive-verification":
        return "it has no flag for adaptive verification of these drafts"
    if kind == "model" and draft.vocab != target.vocab:
        return f"it rejects vocabularies of different size ({draft.vocab:,} and {target.vocab:,})"
    if kind in ("pard", "p-eagle") and not unknown_head(served.experiment):
        return f"it has no flag for {kind}: of parallel drafters it serves dflash"
    lookups = {
        "ngram": "its n-gram drafts are trees from a cache over all requests, which is not what was simulated",
        "suffix": "it has no suffix decoding",
    }
    return lookups.get(kind) or unknown_head(served.experiment)


def vllm_apart(experiment: Experiment) -> list[Block]:
    """Every kind of vLLM server of a disaggregated one, and the proxy before them."""
    sides, counts = experiment.sides, experiment.hardware.groups()
    assert sides is not None
    blocks = []
    for name, role, side, count, port in zip(SIDES, VLLM_ROLES, sides, counts, (8100, 8200), strict=True):
        one = vllm(as_served(side))
        if not one.text:
            return [one]
        config = {"kv_connector": "NixlConnector", "kv_role": role}
        words = f"{one.text} --port {port} {_line(['--kv-transfer-config', json.dumps(config)])}"
        notes = [*one.notes, *_counted(count, "another --port and VLLM_NIXL_SIDE_CHANNEL_PORT")]
        if side.hardware.kv_offload_gb:
            notes.append("name both connectors, of the transfer and of the KV tier, in a MultiConnector")
        blocks.append(Block(f"{one.label}, {name}", words, tuple(notes)))
    ports = [[str(first + at) for at in range(count)] for first, count in zip((8100, 8200), counts, strict=True)]
    proxy = [
        *("python", "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py", "--port", "8000"),
        *("--prefiller-hosts", *["localhost"] * counts[0], "--prefiller-ports", *ports[0]),
        *("--decoder-hosts", *["localhost"] * counts[1], "--decoder-ports", *ports[1]),
    ]
    about = [
        "from vLLM's repository; it takes engines in turn, simulated: the least loaded",
        *_transfer_notes(experiment),
    ]
    return [*blocks, Block("vLLM, the proxy", _line(proxy), tuple(about))]


def sglang_apart(experiment: Experiment) -> list[Block]:
    """Every kind of SGLang server of a disaggregated one, and the router before them."""
    sides, counts = experiment.sides, experiment.hardware.groups()
    assert sides is not None
    blocks, router = [], ["python3", "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    for name, mode, side, count, port in zip(SIDES, ("prefill", "decode"), sides, counts, (30100, 30200), strict=True):
        one, *more = sglang(as_served(side))
        if not one.text:
            return [one]
        words = one.text.removesuffix(" --enable-mixed-chunk")
        words += f" --port {port} --disaggregation-mode {mode} --disaggregation-transfer-backend nixl"
        notes = [note for note in one.notes if note != SEPARATE_PREFILL] + _counted(count, "another --port")
        blocks += [Block(f"{one.label}, {name}", words, tuple(notes)), *(more if mode == "decode" else [])]
        for at in range(count):
            router += [f"--{mode}", f"http://localhost:{port + at}"]
    router += ["--policy", "cache_aware" if experiment.hardware.router == "prefix-aware" else "power_of_two"]
    router += ["--port", "8000"]
    return [*blocks, Block("SGLang, the router", _line(router), tuple(_transfer_notes(experiment)))]


def _counted(count: int, changed: str) -> list[str]:
    return [f"start {count} of them, each with {changed} and its own GPUs"] if count > 1 else []


def _transfer_notes(experiment: Experiment) -> list[str]:
    """How the transfer of the KV cache was simulated."""
    hardware = experiment.hardware
    sent = "layer by layer during the prefill" if hardware.kv_transfer == "layers" else "after the prefill"
    notes = [f"simulated with the KV cache sent {sent}, over {hardware.kv_link or hardware.link}"]
    if hardware.kv_transfer == "layers":
        notes.append("NIXL sends it after the prefill: --kv-transfer prompt")
    return notes


def tensorrt_llm(served: Served) -> Block:
    """The fields of TensorRT-LLM's `speculative_config` that hold the table."""
    label = f"TensorRT-LLM's speculative_config (checked against {TENSORRT_LLM})"
    if not served.longest:
        return Block(label, "", ("no drafter: plain decoding is faster at every size",))
    schedule = {str(last): k for _, last, k in served.ranges}
    notes = ("add the drafter's own fields; above the last batch size it does not draft",)
    return Block(label, json.dumps({"max_draft_len": served.longest, "draft_len_schedule": schedule}), notes)


def _vllm_ranks(hardware: Hardware) -> list[Any]:
    """vLLM's flags of data-parallel ranks and of experts on several GPUs."""
    flags: list[Any] = ["--data-parallel-size", hardware.data_parallel_size] if hardware.data_parallel_size > 1 else []
    flags += ["--enable-expert-parallel"] if hardware.enable_expert_parallel else []
    if hardware.enable_eplb:
        copies = json.dumps({"num_redundant_experts": hardware.num_redundant_experts})
        flags += ["--enable-eplb", *(["--eplb-config", copies] if hardware.num_redundant_experts else [])]
    return flags if hardware.all2all_backend is None else [*flags, "--all2all-backend", hardware.all2all_backend]


def _sglang_ranks(hardware: Hardware) -> list[Any]:
    """The same of SGLang, whose tensor parallelism counts the GPUs of all ranks."""
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


def trtllm_serve(served: Served) -> Block | None:
    """The TensorRT-LLM server where ranks or experts are on several GPUs; None elsewhere."""
    hardware, server = served.experiment.hardware, served.experiment.server
    ranks, gpus = hardware.data_parallel_size, hardware.data_parallel_size * hardware.tensor_parallel_size
    if ranks == 1 and not hardware.enable_expert_parallel:
        return None
    label = f"TensorRT-LLM (names as of {TENSORRT_LLM})"
    if served.longest:
        return Block(label, "", (*served.notes, "its drafters are set in a file, which is not written here"))
    if 1 < ranks < gpus:
        return Block(label, "", (*served.notes, "its attention is data-parallel over all GPUs or over none"))
    words = [
        *("trtllm-serve", checkpoint(served.pair.target), "--tp_size", gpus),
        *(("--ep_size", gpus) if hardware.enable_expert_parallel else ()),
        *("--max_batch_size", server.max_num_seqs, "--max_num_tokens", server.max_num_batched_tokens),
        *(("--config", "ranks.yaml") if (lines := _trtllm_config(served)) else ()),
    ]
    notes = [*served.notes, *([f"ranks.yaml has the lines {'; '.join(lines)}"] if lines else [])]
    return Block(label, _line(words), tuple(notes))


def _trtllm_config(served: Served) -> list[str]:
    """TensorRT-LLM's settings of ranks and experts in a file."""
    hardware, server = served.experiment.hardware, served.experiment.server
    lines = ["enable_attention_dp: true"] if hardware.data_parallel_size > 1 else []
    if server.attention_dp_timeout_iters is not None:
        waits = f"timeout_iters: {server.attention_dp_timeout_iters}, "
        waits += f"batching_wait_iters: {server.attention_dp_batching_wait_iters}"
        lines.append(f"attention_dp_config: {{enable_balance: true, {waits}}}")
    if hardware.enable_eplb and (experts := served.experiment.pair.target.experts) is not None:
        lines.append(f"moe_config: {{load_balancer: {{num_slots: {experts.slots}, layer_updates_per_iter: 1}}}}")
    return lines


def realrun(experiment: Experiment) -> Block:
    """The run of the same policy on this machine's GPU, or why there is none."""
    try:
        refuse(experiment, Machine())
    except ValueError as error:
        return Block("realrun", "", (str(error),))
    return Block("realrun", command_line("realrun", experiment))


def _is_fp8(model: ModelSpec) -> bool:
    """Whether the engine must quantise the checkpoint, which is not so where it comes quantised."""
    return bits_of(model.name) == FP8 and unquantised(model.name) != model.name


def _shared_flags(served: Served, k: int, context: str, fp8: str, uncached: str, ranks: int = 1) -> list[Any]:
    """Flags of both engines: context, shards, 8-bit weights and KV cache, and no prefix cache.

    The context is the drafter's if it is shorter than the target's: nothing was simulated beyond it. `ranks` are those
    that the engine counts among its shards.
    """
    server, size = served.experiment.server, ranks * served.experiment.hardware.tensor_parallel_size
    mine, whole = (model.max_position_embeddings for model in (served.pair.draft, served.pair.target))
    flags: list[Any] = [context, mine] if k and mine is not None and (whole is None or mine < whole) else []
    flags += ["--tensor-parallel-size", size] if size > 1 else []
    flags += ["--quantization", "fp8"] if _is_fp8(served.pair.target) else []
    compressed = served.pair.target.compressed is not None and fp8 == VLLM_FP8  # SGLang caches it in 8 bits unasked
    flags += ["--kv-cache-dtype", fp8] if compressed or server.kv_cache_dtype == "fp8" else []
    flags += ["--block-size", COMPRESSED_BLOCK] if compressed else []
    return flags if server.enable_prefix_caching else [*flags, uncached]


def _shared_notes(served: Served, k: int) -> list[str]:
    """Notes for both engines, on replicas and on a drafter that is sharded otherwise than its target.

    vLLM refuses a draft model of another size than its target's (draft_model.py); SGLang has one size for both.
    """
    notes, hardware = list(served.notes), served.experiment.hardware
    if hardware.tensor_parallel_size * hardware.data_parallel_size > NODE:
        notes.append(
            "on several machines: add vLLM's --data-parallel-size-local and --data-parallel-address, or SGLang's "
            "--nnodes, --node-rank and --dist-init-addr"
        )
    if bits_of(served.pair.target.name) == NVFP4:
        notes.append("name a checkpoint with NVFP4 weights instead")
    if hardware.kv_offload_gb or hardware.kv_offload_ssd_gb:
        notes.append("simulated with fetches only where they are faster than a prefill; the engine always fetches")
    if hardware.replicas > 1:
        notes.append(f"start {hardware.replicas} of them with a router; data parallelism turns vLLM's table off")
    if k and hardware.draft_tensor_parallel_size not in (None, hardware.tensor_parallel_size):
        notes.append("simulated with the drafter on one GPU of the group; the engine shards it like the target")
    return notes


def _line(words: list[Any]) -> str:
    return shlex.join(str(word).removesuffix(".0") if isinstance(word, float) else str(word) for word in words)
