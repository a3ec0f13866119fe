"""What to start: lines that the engines can read, and no line for what they cannot do."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pdvsim.cli.realrun import RealrunCommand
from pdvsim.cli.run import RunCommand
from pdvsim.common.commandline import parse
from pdvsim.decide.deploy import deployment
from pdvsim.decide.draft_lengths import find_table
from pdvsim.decide.draft_table import DraftQuestion, DraftTable, of_table
from pdvsim.sim.assembly import ServerParts
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.engines.served import Block
from pdvsim.sim.engines.sglang import SGLANG
from pdvsim.sim.engines.vllm import VLLM
from pdvsim.sim.models.names import CHECKPOINTS
from pdvsim.sim.models.presets import PRESETS, drafter_kind
from pdvsim.sim.policies import ARCHS, policy_of

# as in the documentation and source of vLLM 0.27.1, SGLang 0.5.18 and TensorRT-LLM 1.4.0rc1
VLLM_FLAGS = {
    "--max-num-seqs", "--max-num-batched-tokens", "--enable-chunked-prefill", "--gpu-memory-utilization",
    "--enable-prefix-caching", "--max-model-len", "--speculative-config", "--quantization", "--kv-cache-dtype",
    "--tensor-parallel-size", "--block-size", "--data-parallel-size", "--enable-expert-parallel", "--all2all-backend",
    "--enable-eplb", "--eplb-config", "--kv-offloading-size", "--kv-offloading-backend",
}  # fmt: skip
VLLM_FIELDS = {
    "method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "use_heterogeneous_vocab",
}  # fmt: skip
SGLANG_FLAGS = {
    "--model-path", "--max-running-requests", "--chunked-prefill-size", "--mem-fraction-static", "--context-length",
    "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-steps", "--speculative-eagle-topk",
    "--speculative-num-draft-tokens", "--enable-mixed-chunk", "--quantization", "--kv-cache-dtype",
    "--speculative-draft-model-quantization", "--tensor-parallel-size", "--dp-size", "--ep-size", "--moe-a2a-backend",
    "--enable-dp-attention", "--deepep-mode", "--enable-eplb", "--ep-num-redundant-experts", "--hicache-size",
    "--enable-hierarchical-cache", "--hicache-write-policy", "--hicache-storage-backend",
}  # fmt: skip
TENSORRT_FLAGS = {"--tp_size", "--ep_size", "--max_batch_size", "--max_num_tokens", "--config"}
FLAGS = {"vLLM": VLLM_FLAGS, "SGLang": SGLANG_FLAGS, "TensorRT-LLM": TENSORRT_FLAGS}

TRAFFIC = Traffic("random", input_len=64, output_len=16, num_prompts=8)
CONTEXTS = ("--max-model-len", "--context-length")
COLOCATED = Experiment("colocated", TRAFFIC, server=Server("tinyllama-1.1b:llama-2-7b", max_num_seqs=128))


@cache
def by_formula(rate: float = 0.6, pair: str = COLOCATED.server.pair, replicas: int = 1) -> DraftTable:
    server, hardware = replace(COLOCATED.server, pair=pair), Hardware(replicas=replicas)
    base = replace(COLOCATED, acceptance=Acceptance(acceptance_rate=rate), server=server, hardware=hardware)
    return find_table(DraftQuestion(base, indifference=0.005))


def flags(line: str) -> dict[str, str | None]:
    """The flags of a line with their values; one that has none is None."""
    words = [*shlex.split(line), "--"]
    return {a: None if b.startswith("--") else b for a, b in pairwise(words) if a.startswith("--") and a != "--"}


def speculative(block: Block) -> dict[str, Any]:
    """The configuration in a vLLM line, held to vLLM's own rules."""
    given = flags(block.text)
    assert set(given) <= VLLM_FLAGS
    config: dict[str, Any] = json.loads(given["--speculative-config"] or "")
    assert set(config) <= VLLM_FIELDS
    assert config["num_speculative_tokens"] > 0
    ranges = config.get("num_speculative_tokens_per_batch_size", [[1, 1, 1]])
    assert ranges[0][0] == 1
    assert all(last < first for (_, last, _), (first, _, _) in pairwise(ranges))
    for first, last, k in ranges:
        assert first <= last
        assert 0 <= k <= config["num_speculative_tokens"]
    return config


def test_the_table_the_limits_and_the_versions_are_in_the_line() -> None:
    draft_table = by_formula()
    [block] = VLLM.commands(of_table(draft_table))
    config = speculative(block)
    assert config == {
        "method": "draft_model",
        "model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "num_speculative_tokens": max(draft_table.best),
        "num_speculative_tokens_per_batch_size": draft_table.ranges(),
    }
    assert len(draft_table.ranges()) > 1
    [block] = VLLM.commands(of_table(draft_table))
    given = flags(block.text)
    assert shlex.split(block.text)[:3] == ["vllm", "serve", "meta-llama/Llama-2-7b-chat-hf"]
    assert given["--max-num-seqs"] == "128"
    assert given["--max-num-batched-tokens"] == str(2048 + 128)  # a slot a request is the drafter's
    assert given["--gpu-memory-utilization"] == "0.9"
    assert given["--max-model-len"] == "2048"  # the drafter's, which is the shorter
    assert block.label == "vLLM (checked against 0.27.1)"
    assert any("vLLM 0.24.0" in note for note in block.notes)


@pytest.mark.parametrize("k", [1, 3, 4, 7])
def test_every_line_has_the_draft_length_that_is_advised(k: int) -> None:
    """vLLM's, SGLang's and our own; whatever a table would say at other batch sizes."""
    advised = replace(COLOCATED, server=replace(COLOCATED.server, num_speculative_tokens=k))
    other = replace(COLOCATED, server=replace(COLOCATED.server, num_speculative_tokens=k + 1))
    first, second, ours, _ = deployment(advised, other)
    assert speculative(first)["num_speculative_tokens"] == k
    assert "num_speculative_tokens_per_batch_size" not in speculative(first)  # one needs no table
    assert any("vLLM 0.15.0" in note for note in first.notes)
    assert flags(second.text)["--speculative-num-steps"] == str(k)
    assert parse(RunCommand, shlex.split(ours.text)[2:]).experiment.server.num_speculative_tokens == k


def test_what_a_controller_does_is_not_translated() -> None:
    """Engines get the best fixed draft length, and a note about it."""
    moving = replace(COLOCATED, server=replace(COLOCATED.server, controller="goodput"))
    fixed = replace(COLOCATED, server=replace(COLOCATED.server, num_speculative_tokens=2))
    first, second, *_ = deployment(moving, fixed)
    assert speculative(first)["num_speculative_tokens"] == 2
    assert flags(second.text)["--speculative-num-steps"] == "2"
    assert "--controller goodput" in first.notes[0]


@pytest.mark.parametrize("arch", ["autoregressive", "colocated"])
def test_without_drafts_there_is_no_drafter(arch: str) -> None:
    plain = replace(COLOCATED, arch=arch, server=replace(COLOCATED.server, num_speculative_tokens=0))
    for given in (None, COLOCATED):
        first, second, *_ = deployment(plain, given)
        assert "--speculative-config" not in flags(first.text)
        assert flags(first.text)["--max-num-batched-tokens"] == "2048"
        assert "--speculative-algorithm" not in flags(second.text)
        assert flags(second.text)["--enable-mixed-chunk"] is None


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch not in ("autoregressive", "colocated")])
def test_lanes_are_not_translated(arch: str) -> None:
    lanes = replace(COLOCATED, arch=arch)
    blocks = deployment(lanes, COLOCATED)
    assert [block.text for block in blocks[:2]] == [block.text for block in deployment(COLOCATED)[:2]]
    for block in blocks[:2]:
        assert block.notes[0].startswith(f"{arch} {policy_of(arch).not_in_engines}: ")
    first, *rest = deployment(lanes)
    assert (first.label, first.text) == ("vLLM, SGLang", "")
    assert [block.label for block in rest] == ["pdvsim", "realrun"]


def test_a_second_gpu_and_a_policy_of_ones_own_are_named(tmp_path: Path) -> None:
    second = replace(COLOCATED, arch="pdv", hardware=Hardware(place=("prefill=1", "verify=1")))
    assert "several GPUs" in deployment(second, COLOCATED)[0].notes[0]
    file = tmp_path / "mine.py"
    file.write_text("from pdvsim.sim.policies.colocated import Colocated\n\n\nclass Mine(Colocated): ...\n", "utf-8")
    assert "is a custom policy" in deployment(replace(COLOCATED, arch=f"{file}:Mine"), COLOCATED)[0].notes[0]


def test_sglang_has_one_length_for_a_draft_model() -> None:
    line, file = SGLANG.commands(of_table(by_formula()))
    given = flags(line.text)
    assert set(given) <= SGLANG_FLAGS
    assert shlex.split(line.text)[:3] == ["python3", "-m", "sglang.launch_server"]
    assert (given["--speculative-algorithm"], given["--speculative-eagle-topk"]) == ("STANDALONE", "1")
    steps = by_formula().single
    assert (given["--speculative-num-steps"], given["--speculative-num-draft-tokens"]) == (str(steps), str(steps + 1))
    assert (given["--max-running-requests"], given["--chunked-prefill-size"]) == ("128", "2048")
    slots = json.loads(file.text)
    assert slots == {str(first): {"candidate_steps": [k]} for first, _, k in by_formula().ranges()}
    assert "EAGLE3" in file.notes[1]


def test_vocabularies_of_unlike_size() -> None:
    first, second, *_ = deployment(replace(COLOCATED, server=Server(pair="qwen2-1.5b:qwen2-7b")))
    assert speculative(first)["use_heterogeneous_vocab"] is True
    assert any("vLLM 0.25.0" in note for note in first.notes)
    assert second.text == ""
    assert "151,936 and 152,064" in second.notes[0]


def test_replicas_are_servers() -> None:
    for block in deployment(replace(COLOCATED, hardware=Hardware(replicas=3)))[:2]:
        assert any(note.startswith("start 3 of them") for note in block.notes)


@pytest.mark.parametrize("arch", ["colocated", "pdv", "autoregressive"])
def test_our_own_lines_run_just_this(arch: str) -> None:
    experiment = replace(COLOCATED, arch=arch)
    ours, real = deployment(experiment)[-2:]
    assert parse(RunCommand, shlex.split(ours.text)[2:]).experiment == experiment
    assert parse(RealrunCommand, shlex.split(real.text)[1:]).experiment == experiment


def test_every_preset_has_a_checkpoint() -> None:
    drafters = {name for name in CHECKPOINTS if drafter_kind(name) != "model"}
    assert set(CHECKPOINTS) - drafters == set(PRESETS)
    assert {name.removeprefix(f"{drafter_kind(name)}-") for name in drafters} <= set(PRESETS)


def test_a_head_that_nobody_published_is_a_placeholder() -> None:
    for kind in ("eagle3", "mtp"):
        server = Server("llama-2-7b", drafter=kind)  # type: ignore[arg-type]
        for block in deployment(Experiment("colocated", server=server))[:2]:
            assert ("YOUR-EAGLE3-HEAD" in block.text) is (kind == "eagle3")
            assert "llama-2-7b is known" in block.notes[0]
    unknown = Server("llama-3.1-70b", drafter="eagle3")
    assert "the nearest model that has one is llama-3.3-70b" in deployment(Experiment(server=unknown))[0].notes[0]


def test_a_context_that_the_cache_has_no_room_for_is_limited() -> None:
    """vLLM refuses to start where one request of the model's context would not fit."""
    server, hardware = Server("none:llama-3.1-70b"), Hardware("h100-sxm", tensor_parallel_size=2, engine="vllm")
    for block, flag in zip(deployment(Experiment(server=server, hardware=hardware))[:2], CONTEXTS, strict=True):
        tokens = int(flags(block.text)[flag])
        assert 16_384 < tokens < ServerParts(Experiment(server=server, hardware=hardware)).kv_capacity
    wider = Experiment(server=server, hardware=replace(hardware, tensor_parallel_size=4))
    assert not set(CONTEXTS) & flags(deployment(wider)[0].text).keys()


def test_a_model_of_ones_own_is_its_folder(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in (tmp_path, tmp_path / "config.json"):
        own = replace(COLOCATED, server=Server(pair=f"{name}:llama-2-7b"))
        assert speculative(deployment(own)[0])["model"] == str(tmp_path)


@pytest.mark.parametrize("drafter", ["none", "eagle3"])
@pytest.mark.parametrize("draft_kv", ["sent", "recomputed"])
def test_a_disaggregated_server_is_its_engines_and_a_router(drafter: Any, draft_kv: Any) -> None:
    """Each engine with its own shards, the drafter where its KV cache is computed, and a port for each."""
    server = Server("llama-3.1-8b", drafter=drafter) if drafter == "eagle3" else Server("none:llama-3.1-8b")
    if drafter == "eagle3" and draft_kv == "recomputed":
        server = Server("llama-3.2-1b:llama-3.1-8b")
    hardware = Hardware(
        disaggregate="2p3d", tensor_parallel_size=4, prefill_tensor_parallel_size=2, draft_kv=draft_kv, engine="vllm"
    )
    blocks = {block.label: block for block in deployment(Experiment("pd", TRAFFIC, server=server, hardware=hardware))}
    engines = {
        name: [block for label, block in blocks.items() if label.startswith(name)] for name in ("vLLM", "SGLang")
    }
    for name, transfer, spec in (
        ("vLLM", "--kv-transfer-config", "--speculative-config"),
        ("SGLang", "--disaggregation-mode", "--speculative-algorithm"),
    ):
        prefill, decode, router = engines[name]
        assert [flags(side.text)["--tensor-parallel-size"] for side in (prefill, decode)] == ["2", "4"]
        modes = [flags(side.text)[transfer] for side in (prefill, decode)]
        roles = [json.loads(mode or "")["kv_role"] for mode in modes] if name == "vLLM" else modes
        assert roles == (["kv_producer", "kv_consumer"] if name == "vLLM" else ["prefill", "decode"])
        drafts = [spec in flags(side.text) for side in (prefill, decode)]
        speculates = server.drafted_by != "none"
        assert drafts == [speculates and draft_kv == "sent", speculates]
        assert router.text.count("localhost") == 5
        assert "start 3 of them" in " ".join(decode.notes)
    assert "--disaggregate 2p3d" in blocks["pdvsim"].text


LLAMA, V3 = "--pair llama-3.2-1b:llama-3.1-8b", "--pair none:deepseek-v3 --arch autoregressive"
EIGHT_BITS = "--pair llama-3.2-1b-fp8:llama-3.1-8b --quantization fp8 --kv-cache-dtype fp8"
MTP, V4 = (
    "--model deepseek-v3 --drafter mtp --tensor-parallel-size 8",
    "--model deepseek-v4-flash --arch autoregressive",
)
TIERS = "--num-turns 2 --tensor-parallel-size 2 --kv-offload-gb 137.438953472"  # vLLM counts GiB of all GPUs
SSD = f"{TIERS} --kv-offload-ssd-gb 1000"
SPREAD = f"{V3} --enable-expert-parallel --max-num-seqs 64 --max-num-batched-tokens 8192"
RANKS = f"{SPREAD} --tensor-parallel-size 4 --data-parallel-size 2 --all2all-backend deepep_low_latency"
COPIES = (  # 32 of the 256 experts on 24 ranks, which begin prompts together
    f"{V3} --gpu gb200 --engine trtllm --data-parallel-size 24 --enable-expert-parallel --enable-eplb "
    "--num-redundant-experts 32 --all2all-backend flashinfer_nvlink_two_sided --attention-dp-timeout-iters 60 "
    "--attention-dp-batching-wait-iters 0"
)
LINES = [  # options, an engine, its flags or the fields of its configuration, a flag that it lacks, words of its notes
    (f"{LLAMA} --drafter eagle3", "vLLM", {"method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}, "", ""),
    (f"{LLAMA} --drafter eagle3", "SGLang", "--speculative-algorithm EAGLE3", "", ""),
    (f"{LLAMA} --drafter ngram", "vLLM", {"method": "ngram", "model": None, "prompt_lookup_min": 3}, "", ""),
    (f"{LLAMA} --drafter ngram", "SGLang", "", "--model-path", "trees"),
    (LLAMA, "vLLM", {"method": "draft_model", "model": "meta-llama/Llama-3.2-1B-Instruct"}, "", ""),
    (LLAMA, "vLLM", {"num_speculative_tokens": 4, "prompt_lookup_min": None}, "", ""),
    (LLAMA, "SGLang", "--speculative-algorithm STANDALONE", "", ""),
    (f"{LLAMA} --tensor-parallel-size 4", "vLLM", {"draft_tensor_parallel_size": 4}, "", ""),
    (f"{LLAMA} --tensor-parallel-size 4", "vLLM", "--tensor-parallel-size 4", "", ""),
    (f"{LLAMA} --tensor-parallel-size 4", "SGLang", "--tensor-parallel-size 4", "", ""),
    (f"{LLAMA} --tensor-parallel-size 4 --draft-tensor-parallel-size 1", "vLLM", "", "", "the engine shards it"),
    (LLAMA, "vLLM", "", "--tensor-parallel-size", ""),
    (EIGHT_BITS, "vLLM", "--quantization fp8 --kv-cache-dtype fp8", "", ""),
    (EIGHT_BITS, "vLLM", {"model": "meta-llama/Llama-3.2-1B-Instruct", "quantization": "fp8"}, "", ""),
    (EIGHT_BITS, "SGLang", "--model-path meta-llama/Llama-3.1-8B-Instruct --quantization fp8", "", ""),
    (EIGHT_BITS, "SGLang", "--kv-cache-dtype fp8_e4m3 --speculative-draft-model-quantization fp8", "", ""),
    ("--model qwen3-30b-a3b-fp8 --drafter eagle3", "vLLM", {"model": "AngelSlim/Qwen3-a3B_eagle3"}, "", ""),
    ("--model gpt-oss-120b --arch autoregressive", "vLLM", "", "--quantization", ""),  # quantised as it is
    (V4, "vLLM", "--kv-cache-dtype fp8 --block-size 256", "", ""),
    (V4, "SGLang", "", "--block-size", ""),
    (MTP, "vLLM", {"method": "mtp", "model": None}, "", ""),
    (MTP, "SGLang", "--speculative-algorithm EAGLE", "--speculative-draft-model-path", ""),
    (TIERS, "vLLM", "--kv-offloading-size 128", "", ""),
    (TIERS, "SGLang", "--hicache-size 68.72", "", ""),  # GB of each GPU
    (SSD, "vLLM", "", "", "LMCache"),
    (SSD, "SGLang", "--hicache-storage-backend file", "", ""),
    (RANKS, "vLLM", "--data-parallel-size 2 --tensor-parallel-size 4 --max-num-seqs 64", "", ""),
    (RANKS, "vLLM", "--enable-expert-parallel --all2all-backend deepep_low_latency", "", ""),
    (RANKS, "SGLang", "--dp-size 2 --tensor-parallel-size 8 --ep-size 8 --enable-dp-attention", "", ""),  # of all ranks
    (RANKS, "SGLang", "--max-running-requests 128 --chunked-prefill-size 16384", "", ""),
    (RANKS, "SGLang", "--moe-a2a-backend deepep --deepep-mode low_latency", "", ""),
    (RANKS, "TensorRT-LLM", "", "--tp_size", "data-parallel"),
    (f"{SPREAD} --data-parallel-size 8", "TensorRT-LLM", "--tp_size 8 --ep_size 8", "", "enable_attention_dp: true"),
    (COPIES, "vLLM", "--enable-eplb --all2all-backend flashinfer_nvlink_two_sided", "", ""),
    (COPIES, "vLLM", """--eplb-config '{"num_redundant_experts": 32}'""", "", ""),
    (COPIES, "SGLang", "--ep-num-redundant-experts 32 --moe-a2a-backend flashinfer", "", ""),
    (COPIES, "TensorRT-LLM", "", "", "num_slots: 288"),
    (COPIES, "TensorRT-LLM", "", "", "enable_balance: true, timeout_iters: 60, batching_wait_iters: 0"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "engine", "has", "lacks", "noted"), LINES)
def test_an_option_is_what_each_engine_calls_it(options: str, engine: str, has: Any, lacks: str, noted: str) -> None:
    experiment = parse(RunCommand, shlex.split(f"--num-prompts 8 {options}")).experiment
    [block] = [block for block in deployment(experiment) if block.label.startswith(engine)]
    given = flags(block.text)
    if isinstance(has, dict):
        config = json.loads(given["--speculative-config"] or "")
        assert {name: config.get(name) for name in has} == has
    else:
        assert flags(has).items() <= given.items()
    assert set(given) <= FLAGS[engine]
    assert lacks not in given
    assert noted in " ".join(block.notes)
