"""Logits against transformers' own models: every family, prompt and cached decoding, from one file or several."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import CPU

from pdvsim.realrun.engine.arch import FAMILIES, Llama3Rope, from_config, preset
from pdvsim.realrun.engine.batch import ForwardBatch
from pdvsim.realrun.engine.cache import Sequences
from pdvsim.realrun.engine.model import Transformer
from pdvsim.realrun.engine.weights import load_weights
from pdvsim.realrun.machine import Machine
from pdvsim.realrun.site import serve
from pdvsim.realrun.texts import next_turns, prompts
from pdvsim.sim.config import Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.models.presets import PRESETS as SPECS
from pdvsim.sim.relevance import applicable
from pdvsim.sim.workload.requests import make_requests
from studies.engine_check import put

SHAPE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
TIED = {"tie_word_embeddings": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("Llama", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "llama-gqa-scaled-rope": ("Llama", WIDE | {"rope_parameters": LLAMA3}),
    "llama-tied": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16} | TIED),
    "qwen2": ("Qwen2", GROUPED),
    "qwen2-tied": ("Qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3} | TIED),
    "mistral": ("Mistral", WIDE | {"sliding_window": None}),
    "qwen3": ("Qwen3", WIDE),
    "qwen3-tied": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8} | TIED),
    "mixtral": ("Mixtral", WIDE | {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": ("Qwen3Moe", WIDE | EXPERTS),
    "phi3": ("Phi3", GROUPED | {"pad_token_id": 0}),
    "gemma": ("Gemma", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}),
}


def config_of(family: str, **changes: Any) -> Any:
    """transformers' own configuration; it takes seconds to import, which every process would pay at the top."""
    import transformers

    return getattr(transformers, f"{family}Config")(**SHAPE, **changes)


def model_of(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)


def scrambled(config: Any) -> Any:
    """The model with norms and biases that matter: transformers starts them at one and zero."""
    torch.manual_seed(3)
    model = model_of(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)  # logits large enough that a wrong term cannot hide
    return model


def feed(model: Transformer, cache: Any, sequences: Sequences, rows: int, width: int, chunk: int, n: int) -> Any:
    ints = lambda *v: torch.tensor(v, dtype=torch.int32)  # noqa: E731
    batch = ForwardBatch(
        rows, width, chunk, ints(*[0] * rows), ints(*[0] * 4), ints(*[0] * 4),
        ints(0, *[n] * 4), sequences.pages, sequences.scratch,
    )  # fmt: skip
    return model.logits(model.forward(batch, cache, sequences).stream)


@pytest.mark.parametrize(
    ("case", "sharded"), [*((case, False) for case in CASES), ("llama-tied", True), ("qwen3-moe", True)]
)
def test_logits_match(case: str, sharded: bool, tmp_path: Path) -> None:
    family, changes = CASES[case]
    reference = scrambled(config_of(family, **changes))
    reference.save_pretrained(tmp_path, max_shard_size="40KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    tokens = torch.randint(0, 67, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    expected = reference(torch.tensor([tokens])).logits[0].detach()

    model = Transformer.load(tmp_path, 128, CPU, torch.float32)
    sequences = Sequences(2, 128, CPU)
    cache = model.new_cache(sequences.pool)
    put(sequences, 0, tokens, settled=True)
    whole = feed(model, cache, sequences, 0, 0, 64, 40)[:40]
    torch.testing.assert_close(whole, expected, rtol=2e-5, atol=2e-5)

    fresh = model.new_cache(sequences.pool)
    feed(model, fresh, sequences, 0, 0, 32, 30)  # a prompt, then cached decoding one and several tokens at a time
    for width, upto in ((1, 31), (1, 32), (4, 36), (3, 39)):
        sequences.length[0] = upto - width + 1
        decoded = feed(model, fresh, sequences, 1, width, 0, 0)
        torch.testing.assert_close(decoded, expected[upto - width : upto], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("arch", ["autoregressive", "colocated"])
def test_conversations_over_cached_prefixes_read_as_in_transformers(arch: Arch, tmp_path: Path) -> None:
    """Every served token is the one that transformers finds most likely after the whole text, without any cache."""
    reference = scrambled(config_of("Llama", num_attention_heads=4))
    reference.save_pretrained(tmp_path)
    folder = str(tmp_path)
    machine = Machine(device="cpu", draft_path=folder if arch != "autoregressive" else None, target_path=folder)
    talks = Traffic("random", num_prompts=12, num_turns=3, prefix_len=35, input_len=12, output_len=10, seed=1)
    chosen = applicable(
        Experiment(arch, talks, server=Server(max_num_seqs=4), hardware=Hardware(kv_capacity_tokens=240))
    )
    requests, outputs = make_requests(chosen.traffic, chosen.acceptance), dict[int, list[int]]()
    result = serve(chosen, machine, requests=requests, outputs=outputs)
    assert result.requests["num_cached_tokens"].sum() > 200
    assert result.meta["prefix_cache_evictions"] > 0
    texts, following = prompts(requests, 67, talks.seed), next_turns(requests)
    for request in requests:
        conversation = torch.tensor([*texts[request.id].tolist(), *outputs[request.id]])
        likely = reference(conversation[None].long()).logits[0].argmax(-1)
        assert likely[request.prompt_tokens - 1 : -1].tolist() == outputs[request.id]
        if (turn := following.get(request.id)) is not None:
            texts[turn.id][: len(conversation)] = conversation.numpy()


def test_old_style_rope_keys_read_the_same() -> None:
    new = config_of("Llama", num_attention_heads=4, rope_parameters=LLAMA3).to_dict()
    old = {**new, "rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    del old["rope_parameters"]
    assert from_config(old) == from_config(new)
    assert from_config(new).rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "mamba"}, "family 'mamba'"),
        ({"sliding_window": 64}, "sliding"),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"hidden_act": "relu"}, "relu"),
        ({"num_key_value_heads": 3}, "evenly"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], complaint: str) -> None:
    config = {**config_of("Llama", num_attention_heads=4).to_dict(), **change}
    with pytest.raises(ValueError, match=complaint):
        from_config(config)


def test_checkpoint_that_disagrees_with_its_config_is_refused(tmp_path: Path) -> None:
    model_of(config_of("Llama", num_attention_heads=4)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match="shape"):
        load_weights(from_config({**config, "intermediate_size": 96}), tmp_path, CPU, torch.float32)


def test_presets_are_those_of_the_simulator() -> None:
    """Every preset of a family that the engine runs; of others it says why not."""
    archs = {}
    for name in SPECS:
        with suppress(ValueError):
            archs[name] = preset(name)
    assert len(archs) > 40
    assert {arch.spec.family for arch in archs.values()} == set(FAMILIES)
    assert all(arch.spec is SPECS[name] for name, arch in archs.items())
    assert {a.spec.family for a in archs.values() if a.qkv_bias} == {"qwen2"}
    assert {n for n, a in archs.items() if a.scale_embedding} == {"gemma-2b", "gemma-7b"}
    for name, reason in (("mistral-7b-v0.1", "sliding"), ("deepseek-v3", "family deepseek")):
        with pytest.raises(ValueError, match=reason):
            preset(name)
