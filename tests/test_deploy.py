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
from pdvsim.decide.deploy import deployment, sglang, vllm
from pdvsim.decide.draft_lengths import find_table
from pdvsim.decide.draft_table import DraftQuestion, DraftTable, of_table
from pdvsim.decide.served import Block, Deployment
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.hardware.models import PRESETS, drafter_kind
from pdvsim.sim.hardware.names import CHECKPOINTS
from pdvsim.sim.policies import ARCHS, policy_of

# as in the documentation and source of vLLM 0.27.1 and SGLang 0.5.18
VLLM_FLAGS = {
    "--max-num-seqs", "--max-num-batched-tokens", "--enable-chunked-prefill", "--gpu-memory-utilization",
    "--max-model-len", "--speculative-config", "--quantization", "--kv-cache-dtype",
}  # fmt: skip
VLLM_FIELDS = {
    "method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "use_heterogeneous_vocab",
}  # fmt: skip
SGLANG_FLAGS = {
    "--model-path", "--max-running-requests", "--chunked-prefill-size", "--mem-fraction-static", "--context-length",
    "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-steps", "--speculative-eagle-topk",
    "--speculative-num-draft-tokens", "--enable-mixed-chunk", "--quantization", "--kv-cache-dtype",
    "--speculative-draft-model-quantization",
}  # fmt: skip

TRAFFIC = Traffic("random", input_len=64, output_len=16, num_prompts=8)
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
    config = speculative(vllm(of_table(draft_table)))
    assert config == {
        "method": "draft_model",
        "model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "num_speculative_tokens": max(draft_table.best),
        "num_speculative_tokens_per_batch_size": draft_table.ranges(),
    }
    assert len(draft_table.ranges()) > 1
    block = vllm(of_table(draft_table))
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
    line, file = sglang(of_table(by_formula()))
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


@pytest.mark.parametrize(
    ("kind", "method", "algorithm"),
    [("eagle3", "eagle3", "EAGLE3"), ("ngram", "ngram", ""), ("model", "draft_model", "STANDALONE")],
)
def test_a_drafter_is_set_for_the_engines(kind: str, method: str, algorithm: str) -> None:
    server = Server("llama-3.2-1b:llama-3.1-8b", 3, kind)  # type: ignore[arg-type]
    vllm, sglang, *_ = deployment(Experiment("colocated", server=server))
    config = json.loads(shlex.split(vllm.text)[-1])
    assert (config["method"], config["num_speculative_tokens"]) == (method, 3)
    assert config.get("model") == {
        "eagle3": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "model": "meta-llama/Llama-3.2-1B-Instruct",
    }.get(kind)
    assert ("prompt_lookup_min" in config) == (kind == "ngram")
    assert algorithm in sglang.text
    assert bool(sglang.text) == bool(algorithm)


def test_weights_and_caches_of_eight_bits_are_set_for_the_engines() -> None:
    server = Server("llama-3.2-1b-fp8:llama-3.1-8b", 3, quantization="fp8", kv_cache_dtype="fp8")
    vllm, sglang, *_ = deployment(Experiment("colocated", server=server))
    assert shlex.split(vllm.text)[2] == "meta-llama/Llama-3.1-8B-Instruct"
    given = flags(vllm.text)
    assert set(given) <= VLLM_FLAGS
    assert (given["--quantization"], given["--kv-cache-dtype"]) == ("fp8", "fp8")
    config = json.loads(given["--speculative-config"] or "")
    assert (config["model"], config["quantization"]) == ("meta-llama/Llama-3.2-1B-Instruct", "fp8")
    given = flags(sglang.text)
    assert set(given) <= SGLANG_FLAGS
    assert (given["--quantization"], given["--kv-cache-dtype"]) == ("fp8", "fp8_e4m3")
    assert given["--speculative-draft-model-quantization"] == "fp8"
    head = deployment(Experiment("colocated", server=Server("qwen3-30b-a3b-fp8", 3, "eagle3")))[0]
    assert json.loads(flags(head.text)["--speculative-config"] or "")["model"] == "AngelSlim/Qwen3-a3B_eagle3"
    published = deployment(Experiment("autoregressive", server=Server("gpt-oss-120b")))[0]  # quantised as it is
    assert "--quantization" not in published.text


def test_compressed_attention_has_the_cache_and_blocks_that_vllm_serves_it_with() -> None:
    hardware = Hardware("h200", tensor_parallel_size=4)
    vllm, sglang, *_ = deployment(Experiment("autoregressive", server=Server("deepseek-v4-flash"), hardware=hardware))
    given = flags(vllm.text)
    assert (given["--kv-cache-dtype"], given["--block-size"]) == ("fp8", "256")
    assert "--block-size" not in sglang.text


def test_an_mtp_layer_of_the_targets_own_checkpoint() -> None:
    server, hardware = Server("deepseek-v3", 1, "mtp"), Hardware(tensor_parallel_size=8)
    vllm, sglang, *_ = deployment(Experiment("colocated", server=server, hardware=hardware))
    config = json.loads(shlex.split(vllm.text)[-1])
    assert (config["method"], "model" in config) == ("mtp", False)
    assert flags(sglang.text)["--speculative-algorithm"] == "EAGLE"
    assert "--speculative-draft-model-path" not in sglang.text


def test_a_head_that_nobody_published_is_no_line() -> None:
    for kind in ("eagle3", "mtp"):
        server = Server("llama-2-7b", drafter=kind)  # type: ignore[arg-type]
        for block in deployment(Experiment("colocated", server=server))[:2]:
            assert not block.text
            assert "llama-2-7b" in block.notes[-1]


def test_a_model_of_ones_own_is_its_folder(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in (tmp_path, tmp_path / "config.json"):
        own = replace(COLOCATED, server=Server(pair=f"{name}:llama-2-7b"))
        assert speculative(deployment(own)[0])["model"] == str(tmp_path)


def test_the_text_has_every_block() -> None:
    blocks = deployment(COLOCATED)
    text = str(Deployment(blocks)).replace(" \\\n   ", "")
    for block in blocks:
        assert f"{block.label}:\n{block.text}" in text
        assert all(f"- {note}" in text for note in block.notes)


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


def test_kv_tiers_have_flags() -> None:
    """vLLM counts GiB of all GPUs, SGLang GB of each."""
    hardware = Hardware(kv_offload_gb=137.438953472, tensor_parallel_size=2)
    talks = replace(TRAFFIC, num_turns=2)
    blocks = deployment(replace(COLOCATED, traffic=talks, hardware=hardware))
    assert flags(blocks[0].text)["--kv-offloading-size"] == "128"
    assert flags(blocks[1].text)["--hicache-size"] == "68.72"
    ssd = deployment(replace(COLOCATED, traffic=talks, hardware=replace(hardware, kv_offload_ssd_gb=1000.0)))
    assert "LMCache" in " ".join(ssd[0].notes)
    assert flags(ssd[1].text)["--hicache-storage-backend"] == "file"


def test_ranks_and_spread_experts_have_each_engines_own_flags() -> None:
    """Two ranks of four GPUs. SGLang counts the GPUs of all ranks as tensor parallelism, and its limits are of all."""
    server = Server("none:deepseek-v3", max_num_seqs=64, max_num_batched_tokens=8192)
    hardware = Hardware(tensor_parallel_size=4, data_parallel_size=2, enable_expert_parallel=True)
    low = replace(hardware, all2all_backend="deepep_low_latency")
    mine, theirs, none, *_ = deployment(Experiment("autoregressive", TRAFFIC, server=server, hardware=low))
    given = flags(mine.text)
    assert (given["--data-parallel-size"], given["--tensor-parallel-size"]) == ("2", "4")
    assert "--enable-expert-parallel" in given
    assert given["--all2all-backend"] == "deepep_low_latency"
    assert given["--max-num-seqs"] == "64"
    given = flags(theirs.text)
    assert (given["--dp-size"], given["--tensor-parallel-size"], given["--ep-size"]) == ("2", "8", "8")
    assert "--enable-dp-attention" in given
    assert (given["--moe-a2a-backend"], given["--deepep-mode"]) == ("deepep", "low_latency")
    assert (given["--max-running-requests"], given["--chunked-prefill-size"]) == ("128", "16384")
    assert not none.text
    assert "data-parallel" in none.notes[0]
    all_ranks = replace(hardware, tensor_parallel_size=1, data_parallel_size=8)
    _, _, third, *_ = deployment(Experiment("autoregressive", TRAFFIC, server=server, hardware=all_ranks))
    assert third.label.startswith("TensorRT-LLM")
    assert (flags(third.text)["--tp_size"], flags(third.text)["--ep_size"]) == ("8", "8")
    assert "enable_attention_dp: true" in " ".join(third.notes)


def test_copies_of_experts_have_each_engines_own_flags() -> None:
    """32 copies of the 256 experts on 24 ranks, which begin prompts together."""
    server = Server("none:deepseek-v3", attention_dp_timeout_iters=60, attention_dp_batching_wait_iters=0)
    hardware = Hardware(
        "gb200", engine="trtllm", data_parallel_size=24, enable_expert_parallel=True, enable_eplb=True,
        num_redundant_experts=32, all2all_backend="flashinfer_nvlink_two_sided",
    )  # fmt: skip
    mine, theirs, third, *_ = deployment(Experiment("autoregressive", TRAFFIC, server=server, hardware=hardware))
    given = flags(mine.text)
    assert json.loads(given["--eplb-config"] or "") == {"num_redundant_experts": 32}
    assert "--enable-eplb" in given
    assert given["--all2all-backend"] == "flashinfer_nvlink_two_sided"
    given = flags(theirs.text)
    assert given["--ep-num-redundant-experts"] == "32"
    assert given["--moe-a2a-backend"] == "flashinfer"
    notes = " ".join(third.notes)
    assert "num_slots: 288" in notes
    assert "enable_balance: true, timeout_iters: 60, batching_wait_iters: 0" in notes
