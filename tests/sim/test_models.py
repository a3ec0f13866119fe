"""Models from the config.json files that Hugging Face publishes, and those that are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from configs import MIXED, SHAPE, config_file

from pdvsim.sim.models.presets import PRESETS, from_config, model, pair

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
PUBLISHED: dict[str, tuple[str, dict[str, Any], float]] = {  # sizes, and billions of parameters by the makers' account
    "mistral-7b-v0.3": ("Mistral", {"vocab_size": 32768, "sliding_window": None}, 7.25),
    "qwen2.5-3b": ("Qwen2", {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
        "tie_word_embeddings": True}, 3.09),
    "qwen3-8b": ("Qwen3", {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}, 8.2),
    "qwen3-0.6b": ("Qwen3", {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True}, 0.6),
    "phi-3-mini": ("Phi3", {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}, 3.82),
    "mixtral-8x7b": ("Mixtral", {"vocab_size": 32000}, 46.7),
    "qwen1.5-moe-a2.7b": ("Qwen2Moe", {}, 14.3),
    "qwen3-30b-a3b": ("Qwen3Moe", {"num_hidden_layers": 48, "head_dim": 128}, 30.5),
    "gpt-oss-120b": ("GptOss", {}, 116.8),
    "deepseek-v2-lite": ("DeepseekV2", {"hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408, "q_lora_rank": None,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1}, 15.7),
    "deepseek-v3": ("DeepseekV3", {}, 671.0),
    "glm-4.5-air": ("Glm4Moe", {"head_dim": 128}, 106.0),
    "glm-4.7-flash": ("Glm4MoeLite", {}, 30.0),
    "llama-4-scout": ("Llama4Text", {}, 107.8),
    "llama-4-maverick": ("Llama4Text", {"num_local_experts": 128, "interleave_moe_layer_step": 2}, 400.0),
    "qwen3-next-80b-a3b": ("Qwen3Next", {}, 79.7),
    "qwen3.5-27b": ("Qwen3_5Text", {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_value_heads": 48}, 26.9),
    "qwen3.5-35b-a3b": ("Qwen3_5MoeText", {}, 34.7),
    "nemotron-3-nano-30b-a3b": ("NemotronH", {"hybrid_override_pattern": NANO, "hidden_size": 2688,
        "intermediate_size": 1856, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128}, 31.6),
    "minimax-text-01": ("MiniMax", {"hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80,
        "num_attention_heads": 64, "head_dim": 128, "vocab_size": 200064, "num_local_experts": 32,
        "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10}, 456.0),
    "kimi-linear-48b-a3b": ("KimiLinear", {}, 49.1),
    "deepseek-v3.2": ("DeepseekV32", {}, 671.9),
    "deepseek-v4-flash": ("DeepseekV4", {"layer_types": ["sliding_attention"] * 2 + [CSA, HCA] * 20 + [CSA]}, 284.0),
    "glm-5": ("GlmMoeDsa", {}, 743.9),
    "gemma-4-31b": ("Gemma4Text", {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
        "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 1024}, 30.7),
    "gemma-4-26b-a4b": ("Gemma4Text", {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 1024}, 25.2),
    "llama-3.2-3b": ("Llama", {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True}, 3.21),
}  # fmt: skip


SMALL = (
    "_bias", "shared_expert_gate.weight", "conv1d.weight", "A_log", "_hc.fn", "hc_fn",
)  # in two or three dimensions, but a few vectors each  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    """Its parameters are those of transformers' own model, but for norms and biases, and those of its makers."""
    import torch
    import transformers

    family, sizes, billions = PUBLISHED[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    config.save_pretrained(tmp_path)
    spec = model(str(tmp_path))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    matrices = {n: p.numel() for n, p in theirs.named_parameters() if p.dim() > 1 and not n.endswith(SMALL)}
    assert spec.params == sum(matrices.values())
    assert spec.params / 1e9 == pytest.approx(billions, rel=0.01)
    if spec.latent is None and family != "Gemma4Text":  # whose layers differ
        assert spec.kv_heads == config.num_key_value_heads
    assert pair(f"{tmp_path}:{tmp_path}").draft == spec


@pytest.mark.parametrize(("family", "why"), [
    ("Olmoe", "mixture of experts"),
    ("Gemma3", "text_config"),
    ("T5", "an encoder and a decoder"),
    ("GPT2", "no gate"),
    ("Mamba", "no attention"),
])  # fmt: skip
def test_what_is_no_dense_decoder_is_refused_by_name(
    family: str, why: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")()
    config.save_pretrained(tmp_path)
    line = refused(["run", "--pair", f"tinyllama-1.1b:{tmp_path}"])
    assert f"model family '{config.model_type}' is not supported: " in line
    assert why in line


# billions of parameters by the makers' model cards; of GLM without its MTP layer, of Gemma 3 without its vision tower
BILLIONS = {
    "llama-2-13b": 13.0, "llama-3-8b": 8.03, "llama-3-70b": 70.6, "llama-3.1-405b": 406.0, "llama-3.2-3b": 3.21,
    "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8,
    "qwen2.5-0.5b": 0.49, "qwen2.5-3b": 3.09, "qwen2.5-14b": 14.7, "qwen2.5-32b": 32.5, "qwen2.5-72b": 72.7,
    "mimo-7b": 7.6, "mistral-7b": 7.25, "mistral-7b-v0.1": 7.24, "mistral-nemo-12b": 12.2, "mistral-small-24b": 23.6,
    "codestral-22b": 22.2, "mistral-large-123b": 123.0, "phi-3.5-mini": 3.82, "phi-4": 14.7, "phi-4-mini": 3.84,
    "gemma-2-2b": 2.61, "gemma-2-9b": 9.24, "gemma-2-27b": 27.2, "gemma-3-1b": 1.0, "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.8, "gemma-3-27b": 27.0, "mixtral-8x22b": 141.0, "qwen3-coder-480b-a35b": 480.0, "kimi-k2": 1026.0,
    "kimi-k2.5": 1026.0, "glm-4.5-air": 106.9, "glm-4.6": 353.0, "llama-4-scout": 107.8, "llama-4-maverick": 400.7,
    "minimax-m2": 229.0, "qwen3-next-80b-a3b": 80.0, "qwen3.5-397b-a17b": 397.0, "nemotron-3-super-120b-a12b": 120.0,
    "mimo-v2-flash": 309.0, "glm-5": 744.0, "minimax-text-01": 456.0, "nemotron-3-ultra-550b-a55b": 550.0,
    "qwen3.5-9b": 9.0, "deepseek-v4-flash": 284.0,
}  # fmt: skip


@pytest.mark.parametrize("name", BILLIONS)
def test_presets_have_the_parameters_that_their_makers_state(name: str) -> None:
    assert PRESETS[name].params / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


FLOAT8 = {"group_0": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8}}}


@pytest.mark.parametrize(("given", "layer_bytes"), [
    ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, 1.0),
    ({"quant_method": "compressed-tensors", "config_groups": FLOAT8}, 1.0),
    ({"quant_method": "awq", "bits": 4, "group_size": 64}, 0.5 + 2.5 / 64),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 0.5),
])  # fmt: skip
def test_quantised_weights_are_known_by_their_bytes(given: dict[str, Any], layer_bytes: float) -> None:
    """Those of the layers; embeddings and output projection keep 16 bits."""
    plain, spec = from_config(SHAPE, "m"), from_config(SHAPE | {"quantization_config": given}, "m")
    assert spec.params == plain.params
    assert plain.weight_bytes - spec.weight_bytes == pytest.approx((2 - layer_bytes) * plain.layer_params, abs=1)
    assert spec.kv_bytes_per_token == plain.kv_bytes_per_token


def test_published_experts_of_four_bits() -> None:
    """The checkpoint of gpt-oss-120b has 60.8 GiB and that of gpt-oss-20b 12.8 (its model card, arXiv 2508.10925)."""
    for name, gib in (("gpt-oss-120b", 60.8), ("gpt-oss-20b", 12.8)):
        assert PRESETS[name].weight_bytes / 2**30 == pytest.approx(gib, rel=0.01)
    shape = {"model_type": "gpt_oss", "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    shape |= {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "vocab_size": 201088}
    shape |= {"num_local_experts": 128, "experts_per_token": 4, "sliding_window": 128, "tie_word_embeddings": False}
    shape |= {"max_position_embeddings": 131072, "quantization_config": {"quant_method": "mxfp4"}}
    assert from_config(shape, "gpt-oss-120b") == PRESETS["gpt-oss-120b"]


NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "ME*E", "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "n_groups": 2,
    "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 64, "conv_kernel": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 128,
}  # fmt: skip
V4: dict[str, Any] = {
    "model_type": "deepseek_v4", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 1000, "q_lora_rank": 64, "o_lora_rank": 32,
    "o_groups": 2, "index_topk": 16, "index_n_heads": 2, "index_head_dim": 32, "sliding_window": 16, "hc_mult": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "compress_ratios": [4, 128, 0],
}  # fmt: skip
QUANTISED = [
    ({"quant_method": "gptq", "bits": 3}, "gptq, 3 bits"),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    (["fp8"], "quantization_config"),
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (SHAPE, {"vocab_size": True}, "vocab_size: must be a whole number, got True"),
    (SHAPE, {"num_attention_heads": 32.9}, "num_attention_heads: must be a whole number, got 32.9"),
    (SHAPE, {"num_hidden_layers": 10**400}, "num_hidden_layers: must be 1 to 1000, got a number of 19 or more digits"),
    (SHAPE, {"tie_word_embeddings": "false"}, "tie_word_embeddings: must be true or false, got 'false'"),
    (SHAPE, {"num_attention_heads": 7, "num_key_value_heads": 7}, "is no multiple of 7 heads: head_dim is missing"),
    (SHAPE, {"num_key_value_heads": 3}, "32 heads cannot share 3 kv heads"),
    (SHAPE, {"num_local_experts": 8}, "mixture of experts"),
    (SHAPE, {"kv_lora_rank": 512}, "compressed KV cache"),
    (SHAPE, {"model_type": "llava", "text_config": {}}, "text_config"),
    # served as 16-bit weights they would move more bytes
    *((SHAPE, {"quantization_config": given}, rf"quantised weights \(.*{named}") for given, named in QUANTISED),
    (SHAPE, {"compression_config": {"format": "float-quantized"}}, r"quantised weights \(.*compression_config"),
    (SHAPE, {"torch_dtype": "float8_e4m3fn"}, r"quantised weights \(.*float8_e4m3fn"),
    (MIXED, {"num_experts": None}, "num_local_experts is missing"),
    (MIXED, {"num_experts_per_tok": 129}, "num_experts_per_tok: a token cannot take 129 of 128 experts"),
    (MIXED, {"decoder_sparse_step": 64}, "none of the 32 layers has experts"),
    (MIXED, {"mlp_only_layers": 3}, "mlp_only_layers: must be a list"),
    (MIXED, {"model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts": None, "kv_lora_rank": 512},
     "qk_rope_head_dim is missing"),
    (NEMOTRON, {"hybrid_override_pattern": "MEX"}, "letters M"),
    (NEMOTRON, {"hybrid_override_pattern": "MEME"}, "not a Nemotron-H model"),
    (NEMOTRON, {"mamba_ssm_cache_dtype": "int3"}, "mamba_ssm_dtype: must be float32"),
    (V4, {"compress_ratios": [4]}, "compress_ratios"),
    (V4, {"o_groups": 3}, "4 heads are no multiple of 3 groups"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "more", "why"), REFUSED)
def test_a_configuration_that_cannot_be_is_refused_in_one_line(
    base: dict[str, Any], more: dict[str, Any], why: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    path = config_file(tmp_path, **base | more)
    message = refused(["run", "--pair", f"tinyllama-1.1b:{path}", "--num-prompts", "4"])
    assert re.search(why, message)
    assert str(path) in message


def test_a_quantisation_in_a_file_of_its_own_is_refused(tmp_path: Path) -> None:
    """As NVIDIA publishes fp8 checkpoints: config.json alone says bfloat16."""
    config_file(tmp_path, torch_dtype="bfloat16")
    assert model(str(tmp_path)).dtype_bytes == 2
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    for name in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ValueError, match=r"quantised weights \(modelopt\)"):
            model(str(name))


def test_a_sliding_window_counts_if_contexts_can_pass_it(tmp_path: Path) -> None:
    for window, longest, seen in ((None, 32768, None), (4096, 4096, None), (4096, 32768, 4096)):
        path = config_file(tmp_path, model_type="mistral", sliding_window=window, max_position_embeddings=longest)
        spec = model(str(path))
        assert (spec.reach, spec.window and spec.window.layers) == (seen, 32 if seen else None)
