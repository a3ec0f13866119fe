"""A model's shape from its Hugging Face configuration, config.json.

Supported are decoders, dense or with experts, with grouped or latent attention; layers with a window, sparse attention
or a state are counted in `mixers`. Quantised weights are known by their bytes. Other families are refused by name.

Chunks that Llama 4 attends to are taken as windows. Of a model that also sees or hears, the text decoder is meant.

Not modelled: expert parallelism, and groups of experts that a router is limited to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pdvsim.sim.models import mixers
from pdvsim.sim.models.layers import Experts, Latent
from pdvsim.sim.models.sizes import CHOSEN, EXPERT_COUNT_KEYS, EXPERT_SIZE, first_size, given_key, size, size_or_none
from pdvsim.sim.models.specs import ModelFamily, ModelSpec
from pdvsim.sim.reading import printable, quoted, read_json

DENSE: dict[str, ModelFamily] = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "cohere2": "cohere", "mimo": "qwen2", "qwen3_5_text": "qwen3",
    "apertus": "apertus",
}  # fmt: skip
WITH_EXPERTS: dict[str, ModelFamily] = {
    "mixtral": "mistral", "qwen2_moe": "qwen2", "qwen3_moe": "qwen3", "gpt_oss": "gpt_oss", "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek", "kimi_k2": "deepseek", "glm4_moe": "glm4", "glm4_moe_lite": "glm4",
    "llama4_text": "llama4", "minimax_m2": "minimax", "qwen3_next": "qwen3", "qwen3_5_moe_text": "qwen3",
    "nemotron_h": "nemotron", "kimi_linear": "kimi", "minimax": "lightning", "minimax_text_01": "lightning",
    "deepseek_v32": "deepseek", "glm_moe_dsa": "glm4", "minimax_m3": "minimax", "gemma4_text": "gemma4",
    "mimo_v2_flash": "mimo", "deepseek_v4": "deepseek",
}  # fmt: skip
NESTED = ("qwen3_5", "qwen3_5_moe", "gemma4")  # families whose text decoder is under text_config
FAMILIES: dict[str, ModelFamily] = DENSE | WITH_EXPERTS

_EXPERTS = "a mixture of experts of another kind than those supported"
_LATENT = "its attention keeps a compressed KV cache (MLA)"
_STATE = "it has no attention, or attention of another kind next to a state"
_UNLIKE = "its layers have attention of many sizes"
_BOTH_WAYS = "an encoder and a decoder, not a decoder alone"
_RESIDUAL = "its layers attend to the outputs of earlier layers"
REFUSED = {  # families that people try, and why no model here is like them
    **dict.fromkeys(("phimoe", "olmoe", "dbrx", "granitemoe", "ernie4_5_moe"), _EXPERTS),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba"), _STATE),
    **dict.fromkeys(("nemotron-nas", "step3p7"), _UNLIKE),
    "kimi_k3": _RESIDUAL,
    **dict.fromkeys(("t5", "mt5", "bart", "whisper"), _BOTH_WAYS),
    **dict.fromkeys(("gpt2", "opt", "gpt_neox", "bloom", "falcon", "phi", "mpt"), "its MLP has no gate"),
}
# families whose embeddings are tied unless their file says no
TIED = ("gemma", "gemma2", "gemma3_text", "gemma4_text", "cohere2")
WIDE_DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")  # engines serve 32 bits as 16
FP8_BYTES = 1.0
MXFP4_BYTES = 4.25 / 8  # 4 bits, and a scale of 8 per 32 weights
NVFP4_BYTES = 4.5 / 8  # 4 bits, and a scale of 8 per 16 weights
SCALE_BYTES = 2.5  # of a group of 4-bit weights: a scale of 16 bits and a zero of 4


class Quantised(NamedTuple):
    """Bytes per weight of the layers' products and of experts, where they are not those of the model's dtype."""

    layers: float | None = None
    experts: float | None = None


def read_config(path: Path) -> Mapping[str, Any]:
    """The dictionary in a config.json or in the folder that holds it."""
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file)
    if not isinstance(config, dict):
        raise ValueError("expected a JSON object")
    if file.with_name("hf_quant_config.json").exists():  # where NVIDIA's ModelOpt says it
        config.setdefault("quantization_config", {"quant_method": "modelopt"})
    return config


def from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The shape that a Hugging Face configuration describes; a ValueError if that is no decoder of a known family."""
    config = _text_config(config)
    kind = config.get("model_type")
    if reason := _no_known_decoder(config):
        raise ValueError(f"model family {quoted(kind)} is not supported: {reason}; supported: {', '.join(FAMILIES)}")
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    latent, quantised, blocks = _latent(config), _quantised(config), mixers.blocks(config)
    kv_heads, head_dim = _kv_heads(config, heads), _head_dim(config, latent)
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} kv heads evenly")
    tied = config.get("tie_word_embeddings", kind in TIED)
    if not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings: must be true or false, got {quoted(tied)}")
    experts = _experts(config, quantised.experts, blocks) if _has_experts(config) else None
    return ModelSpec(
        name=name,
        family=FAMILIES[str(kind)],
        layers=blocks.layers,
        hidden=hidden,
        intermediate=_intermediate(config, experts),
        heads=heads,
        kv_heads=1 if latent else kv_heads,
        head_dim=head_dim,
        vocab=size(config, "vocab_size"),
        tied_embeddings=tied,
        max_position_embeddings=size_or_none(config, "max_position_embeddings"),
        experts=experts,
        latent=latent,
        layer_bytes=quantised.layers,
        window=mixers.window(config),
        sparse=mixers.sparse(config),
        state=mixers.state(config),
        compressed=(compressed := mixers.compressed(config)),
        kv_dtype_bytes=1 if compressed else None,  # as all engines serve it
        value_dim=size(config, "v_head_dim") if kind == "mimo_v2_flash" else None,
        output_gate=kind in mixers.GATED_DELTA and config.get("attn_output_gate", True) is True,
        shared_keys=kind == "gemma4_text" and config.get("attention_k_eq_v") is True,
        gated=kind not in ("nemotron_h", "apertus"),
        layers_without_mlp=blocks.without_mlp,
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text decoder of a model that has other parts too, where its family is known to be served as text alone."""
    own = config.get("text_config")
    if config.get("architectures") == ["DeepseekV4ForCausalLM"]:  # SGLang's copies have another model_type
        return {**config, "model_type": "deepseek_v4"}
    if config.get("model_type") in NESTED and isinstance(own, dict):
        outer = ("tie_word_embeddings", "quantization_config", "compression_config")
        config = {key: config[key] for key in outer if key in config} | own
    layers = config.get("per_layer_config")
    if config.get("model_type") != "gemma4_text" or not isinstance(layers, dict) or not layers:
        return config
    first = next(iter(layers.values()))  # as transformers has come to write the heads of layers without a window
    if not isinstance(first, dict) or any(layer != first for layer in layers.values()):
        raise ValueError("per_layer_config: layers of more than two sizes are not supported")
    renamed = {"num_key_value_heads": "num_global_key_value_heads", "head_dim": "global_head_dim"}
    return {**config, **{renamed[key]: value for key, value in first.items() if key in renamed}}


def _has_experts(config: Mapping[str, Any]) -> bool:
    """Return whether a model of a family that may have experts has some."""
    if config["model_type"] == "gemma4_text":
        return config.get("enable_moe_block") is True
    return config["model_type"] in WITH_EXPERTS and (
        config["model_type"] != "nemotron_h" or mixers.blocks(config).moe > 0
    )


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """KV heads of the layers that attend to all tokens."""
    keys = ("num_global_key_value_heads", "num_key_value_heads")
    own = keys if config["model_type"] == "gemma4_text" and config.get("attention_k_eq_v") is True else keys[1:]
    return next((size(config, key) for key in own if config.get(key) is not None), heads)


def _intermediate(config: Mapping[str, Any], experts: Experts | None) -> int:
    """The size of a plain MLP. Where no layer has one and none is given, that of what a token takes of experts."""
    key = {"llama4_text": "intermediate_size_mlp", "minimax_m3": "dense_intermediate_size"}
    name = key.get(str(config["model_type"]), "intermediate_size")
    if experts is not None and not experts.dense_layers and config.get(name) is None:
        return experts.per_token * experts.intermediate + experts.shared
    return size(config, name)


def _no_known_decoder(config: Mapping[str, Any]) -> str | None:
    """Why a configuration is not of a decoder that is known; None if it is."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        return REFUSED[kind]
    if config.get("draft_vocab_size"):
        return "a draft head; give its target and --drafter eagle3"
    if config.get("attn_res_block_size"):
        return _RESIDUAL
    if config.get("hidden_size_per_layer_input") or config.get("num_kv_shared_layers"):
        return "its layers have embeddings of their own, or share their KV cache"
    if config.get("is_encoder_decoder"):
        return _BOTH_WAYS
    if isinstance(config.get("text_config"), dict):
        return "it is multimodal; give the configuration under its text_config"
    if isinstance(kind, str) and kind in WITH_EXPERTS:
        return None
    if any(config.get(key) for key in (*EXPERT_COUNT_KEYS, EXPERT_SIZE)):
        return _EXPERTS
    if config.get("kv_lora_rank"):
        return _LATENT
    return None if isinstance(kind, str) and kind in DENSE else "unknown family"


def _experts(config: Mapping[str, Any], weight_bytes: float | None, blocks: mixers.Blocks) -> Experts:
    """The experts of a configuration, and the layers that have none."""
    kind, layers = config["model_type"], blocks.layers
    count = first_size(config, EXPERT_COUNT_KEYS)
    per_token = first_size(config, CHOSEN)
    if per_token > count:
        raise ValueError(f"{given_key(config, CHOSEN)}: a token cannot take {per_token} of {count} experts")
    # those call it as dense models do
    own = kind in ("mixtral", "gpt_oss", "llama4_text", "minimax_m2", "minimax", "minimax_text_01")
    inner = size(config, "intermediate_size" if own else EXPERT_SIZE)
    dense = blocks.dense if kind == "nemotron_h" else _dense_layers(config, layers)
    if dense >= layers - blocks.without_mlp:
        raise ValueError(f"none of the {layers} layers has experts")
    latent = size_or_none(config, "moe_latent_size")
    return Experts(
        count, per_token, inner, _shared(config, 0 if own else inner), dense, weight_bytes=weight_bytes, latent=latent
    )


def _shared(config: Mapping[str, Any], inner: int) -> int:
    """The intermediate size of all experts that every token takes; of Gemma 4 the MLP next to the experts."""
    kind = str(config["model_type"])
    if kind == "llama4_text" or kind == "gemma4_text":
        return size(config, "intermediate_size")
    key = {"qwen2_moe": "shared_expert_intermediate_size", "nemotron_h": "moe_shared_expert_intermediate_size"}
    if kind in key or kind in mixers.GATED_DELTA:
        return size(config, key.get(kind, "shared_expert_intermediate_size"))
    return inner * (size_or_none(config, "n_shared_experts") or size_or_none(config, "num_shared_experts") or 0)


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers of a mixture of experts that have a plain MLP."""
    kinds, listed = config.get("mlp_layer_types"), config.get("moe_layer_freq")
    if isinstance(kinds, list):
        return kinds.count("dense")
    if isinstance(listed, list):
        return listed.count(0)
    step = size_or_none(config, "interleave_moe_layer_step") or size_or_none(config, "decoder_sparse_step") or 1
    plain = config.get("mlp_only_layers") or ()
    if not isinstance(plain, list | tuple):
        raise ValueError(f"mlp_only_layers: must be a list, got {quoted(plain)}")
    first = size_or_none(config, "first_k_dense_replace") or 0
    return sum(at < first or at in plain or (at + 1) % step != 0 for at in range(layers))


def _latent(config: Mapping[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        kv_rank=size(config, "kv_lora_rank"),
        rope_dim=size(config, "qk_rope_head_dim"),
        nope_dim=size(config, "qk_nope_head_dim"),
        value_dim=size(config, "v_head_dim"),
        query_rank=size_or_none(config, "q_lora_rank"),
    )


def _head_dim(config: Mapping[str, Any], latent: Latent | None) -> int:
    """The size of a head in layers that attend to all tokens."""
    if latent is not None:
        return latent.nope_dim + latent.rope_dim
    if config["model_type"] == "gemma4_text" and config.get("global_head_dim") is not None:
        return size(config, "global_head_dim")
    if (given := size_or_none(config, "head_dim") or size_or_none(config, "attention_head_dim")) is not None:
        return given
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    if hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of {heads} heads: head_dim is missing")
    return hidden // heads


def _quantised(config: Mapping[str, Any]) -> Quantised:
    """The bytes of weights of fewer than 16 bits; a ValueError names a method whose bytes are not known."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        dtype = config.get("dtype") or config.get("torch_dtype")
        if dtype is None or (isinstance(dtype, str) and dtype.removeprefix("torch.") in WIDE_DTYPES):
            return Quantised()
        raise _unknown_weights(f"dtype {quoted(dtype)}")
    method = given.get("quant_method") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(method, str) or not method:
        raise _unknown_weights("quantization_config" if config.get("quantization_config") else "compression_config")
    if method == "fp8":
        four = MXFP4_BYTES if config.get("expert_dtype") == "fp4" else None
        return Quantised(FP8_BYTES, NVFP4_BYTES if given.get("moe_quant_algo") == "NVFP4" else four)
    if method == "mxfp4" and config.get("model_type") in WITH_EXPERTS:
        return Quantised(None, MXFP4_BYTES)
    if method in ("awq", "gptq") and given.get("bits") == 4:
        return Quantised(_four_bits(given.get("group_size")))
    if method == "compressed-tensors" and (size := _compressed(given)):
        apart = any("self_attn" in str(name) for name in given.get("ignore") or ())
        return Quantised(None, size) if apart and config.get("model_type") in WITH_EXPERTS else Quantised(size)
    bits = given.get("bits")
    raise _unknown_weights(f"{method}, {bits} bits" if type(bits) is int else method)


def _compressed(given: Mapping[str, Any]) -> float | None:
    """Bytes per weight of a compressed-tensors configuration; None where it has other formats."""
    groups = given.get("config_groups")
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    formats = {(w.get("type"), w.get("num_bits")) for w in weights if isinstance(w, dict)}
    if formats == {("float", 8)}:
        return FP8_BYTES
    if formats == {("int", 4)} and isinstance(weights[0], dict):
        return _four_bits(weights[0].get("group_size"))
    return None


def _four_bits(group: object) -> float:
    """Bytes per weight of 4 bits with a scale and a zero per group; without a group they are per channel."""
    return 0.5 + (SCALE_BYTES / group if isinstance(group, int) and group > 0 else 0.0)


def _unknown_weights(what: str) -> ValueError:
    return ValueError(
        f"quantised weights ({printable(what)[:40]}) are not simulated: known are fp8, compressed-tensors (8-bit float "
        "or 4-bit integer), awq and gptq (4 bits) and mxfp4 of experts; or give the unquantised model's config.json"
    )
