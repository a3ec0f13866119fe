"""A model's shape from its Hugging Face configuration, config.json.

Supported are decoders, dense or with experts, with grouped or latent attention; layers with a window, sparse attention
or a state are counted in `mixers`. Quantised weights are known by their bytes. Other families are refused by name.

Chunks that Llama 4 attends to are taken as windows. Of a model that also sees or hears, the text decoder is meant.

Not modelled: expert parallelism, and groups of experts that a router is limited to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdvsim.sim.models import mixers
from pdvsim.sim.models.layers import Experts, Latent
from pdvsim.sim.models.mixers import CHOSEN, EXPERT_COUNTS, FAMILIES, REFUSED, given_key, size, size_or_none
from pdvsim.sim.models.specs import ModelSpec
from pdvsim.sim.reading import printable, quoted, read_json

NESTED = ("qwen3_5", "qwen3_5_moe", "gemma4")  # families whose text decoder is under text_config
WIDE_DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")  # engines serve 32 bits as 16
FP8_BYTES = 1.0
MXFP4_BYTES = 4.25 / 8  # 4 bits, and a scale of 8 per 32 weights
NVFP4_BYTES = 4.5 / 8  # 4 bits, and a scale of 8 per 16 weights
SCALE_BYTES = 2.5  # of a group of 4-bit weights: a scale of 16 bits and a zero of 4


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
    family = FAMILIES[str(kind)]
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    latent, (layer_bytes, expert_bytes), blocks = _latent(config), _quantised(config), mixers.blocks(config)
    shared_keys = kind == "gemma4_text" and config.get("attention_k_eq_v") is True
    own = ("num_global_key_value_heads",) if shared_keys else ()  # of layers that attend to all tokens
    kv_heads = size_or_none(config, *own, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} kv heads evenly")
    tied = config.get("tie_word_embeddings", family.get("tied", False))
    if not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings: must be true or false, got {quoted(tied)}")
    experts = _experts(config, expert_bytes, blocks) if _has_experts(config, blocks) else None
    return ModelSpec(
        name=name,
        family=family["family"],
        layers=blocks.layers,
        hidden=hidden,
        intermediate=_intermediate(config, experts),
        heads=heads,
        kv_heads=1 if latent else kv_heads,
        head_dim=_head_dim(config, latent),
        vocab=size(config, "vocab_size"),
        tied_embeddings=tied,
        max_position_embeddings=size_or_none(config, "max_position_embeddings"),
        experts=experts,
        latent=latent,
        layer_bytes=layer_bytes,
        window=mixers.window(config),
        sparse=mixers.sparse(config),
        state=mixers.state(config),
        compressed=(compressed := mixers.compressed(config)),
        kv_dtype_bytes=1 if compressed else None,  # as all engines serve it
        value_dim=size(config, "v_head_dim") if kind == "mimo_v2_flash" else None,
        output_gate=family.get("state", ("",))[0] == "gdn" and config.get("attn_output_gate", True) is True,
        shared_keys=shared_keys,
        gated=family.get("gated", True),
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


def _has_experts(config: Mapping[str, Any], blocks: mixers.Blocks) -> bool:
    """Return whether a model of a family that may have experts has some."""
    kind = config["model_type"]
    if kind == "gemma4_text":
        return config.get("enable_moe_block") is True
    return "experts" in FAMILIES[kind] and (kind != "nemotron_h" or blocks.moe > 0)


def _intermediate(config: Mapping[str, Any], experts: Experts | None) -> int:
    """The size of a plain MLP. Where no layer has one and none is given, that of what a token takes of experts."""
    name = FAMILIES[config["model_type"]].get("intermediate", "intermediate_size")
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
        return REFUSED["kimi_k3"]
    if config.get("hidden_size_per_layer_input") or config.get("num_kv_shared_layers"):
        return "its layers have embeddings of their own, or share their KV cache"
    if config.get("is_encoder_decoder"):
        return REFUSED["t5"]
    if isinstance(config.get("text_config"), dict):
        return "it is multimodal; give the configuration under its text_config"
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is not None and "experts" in family:
        return None
    if any(config.get(key) for key in (*EXPERT_COUNTS, "moe_intermediate_size")):
        return REFUSED["olmoe"]
    if config.get("kv_lora_rank"):
        return "its attention keeps a compressed KV cache (MLA)"
    return "unknown family" if family is None else None


def _experts(config: Mapping[str, Any], weight_bytes: float | None, blocks: mixers.Blocks) -> Experts:
    """The experts of a configuration, and the layers that have none."""
    kind, layers = config["model_type"], blocks.layers
    count, per_token = size(config, *EXPERT_COUNTS), size(config, *CHOSEN)
    if per_token > count:
        raise ValueError(f"{given_key(config, *CHOSEN)}: a token cannot take {per_token} of {count} experts")
    dense = blocks.dense if kind == "nemotron_h" else _dense_layers(config, layers)
    if dense >= layers - blocks.without_mlp:
        raise ValueError(f"none of the {layers} layers has experts")
    family, latent = FAMILIES[kind], size_or_none(config, "moe_latent_size")
    inner = size(config, family["experts"])
    if "shared" in family:
        shared = size(config, family["shared"])
    else:  # experts of the same size, in families that have a name for that
        named = family["experts"] != "intermediate_size"
        shared = inner * (size_or_none(config, "n_shared_experts", "num_shared_experts") or 0) if named else 0
    return Experts(count, per_token, inner, shared, dense, weight_bytes=weight_bytes, latent=latent)


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers of a mixture of experts that have a plain MLP."""
    kinds, listed = config.get("mlp_layer_types"), config.get("moe_layer_freq")
    if isinstance(kinds, list):
        return kinds.count("dense")
    if isinstance(listed, list):
        return listed.count(0)
    step = size_or_none(config, "interleave_moe_layer_step", "decoder_sparse_step") or 1
    plain = config.get("mlp_only_layers") or ()
    if not isinstance(plain, list | tuple):
        raise ValueError(f"mlp_only_layers: must be a list, got {quoted(plain)}")
    first = size_or_none(config, "first_k_dense_replace") or 0
    return sum(at < first or at in plain or (at + 1) % step != 0 for at in range(layers))


def _latent(config: Mapping[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    keys = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return replace(Latent(*(size(config, key) for key in keys)), query_rank=size_or_none(config, "q_lora_rank"))


def _head_dim(config: Mapping[str, Any], latent: Latent | None) -> int:
    """The size of a head in layers that attend to all tokens."""
    if latent is not None:
        return latent.nope_dim + latent.rope_dim
    own = ("global_head_dim",) if config["model_type"] == "gemma4_text" else ()
    if (given := size_or_none(config, *own, "head_dim", "attention_head_dim")) is not None:
        return given
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    if hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of {heads} heads: head_dim is missing")
    return hidden // heads


def _quantised(config: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Bytes per weight of the layers' products and of experts, where they are not those of the model's dtype.

    A ValueError names a method whose bytes are not known.
    """
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        dtype = config.get("dtype") or config.get("torch_dtype")
        if dtype is None or (isinstance(dtype, str) and dtype.removeprefix("torch.") in WIDE_DTYPES):
            return None, None
        raise _unknown_weights(f"dtype {quoted(dtype)}")
    method = given.get("quant_method") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(method, str) or not method:
        raise _unknown_weights("quantization_config" if config.get("quantization_config") else "compression_config")
    routed = "experts" in FAMILIES[config["model_type"]]
    if method == "fp8":
        four = MXFP4_BYTES if config.get("expert_dtype") == "fp4" else None
        return FP8_BYTES, NVFP4_BYTES if given.get("moe_quant_algo") == "NVFP4" else four
    if method == "mxfp4" and routed:
        return None, MXFP4_BYTES
    if method in ("awq", "gptq") and given.get("bits") == 4:
        return _four_bits(given.get("group_size")), None
    if method == "compressed-tensors" and (size := _compressed(given)):
        apart = any("self_attn" in str(name) for name in given.get("ignore") or ())
        return (None, size) if apart and routed else (size, None)
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
