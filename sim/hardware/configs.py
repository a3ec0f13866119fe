"""A model's shape from its Hugging Face configuration, config.json.

Supported are decoders whose MLP has a gate, dense or with experts, with grouped or latent attention. Quantised weights
are known by their bytes. Other families are refused by name.

Layers with a sliding window are counted, and those of Llama 4 that attend to chunks, as if a chunk were a window.

Not modelled: expert parallelism, and groups of experts that a router is limited to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pdvsim.sim.core import Experts, Latent, ModelFamily, ModelSpec
from pdvsim.sim.limits import Range, shown
from pdvsim.sim.reading import printable, quoted, read_json

DENSE: dict[str, ModelFamily] = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "cohere2": "cohere", "mimo": "qwen2",
}  # fmt: skip
WITH_EXPERTS: dict[str, ModelFamily] = {
    "mixtral": "mistral", "qwen2_moe": "qwen2", "qwen3_moe": "qwen3", "gpt_oss": "gpt_oss", "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek", "kimi_k2": "deepseek", "glm4_moe": "glm4", "glm4_moe_lite": "glm4",
    "llama4_text": "llama4", "minimax_m2": "minimax",
}  # fmt: skip
FAMILIES: dict[str, ModelFamily] = DENSE | WITH_EXPERTS

_EXPERTS = "a mixture of experts of another kind than those supported"
_LATENT = "its attention keeps a compressed KV cache (MLA)"
_STATE = "it keeps a state instead of a KV cache"
_SPARSE = "its attention selects tokens of the context (sparse attention)"
_UNLIKE = "its layers have attention of different sizes"
_BOTH_WAYS = "an encoder and a decoder, not a decoder alone"
REFUSED = {  # families that people try, and why no model here is like them
    **dict.fromkeys(("phimoe", "olmoe", "dbrx", "granitemoe", "jamba", "ernie4_5_moe"), _EXPERTS),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "nemotron_h", "qwen3_next"), _STATE),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "kimi_k3", "kimi_linear"), _STATE),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "minimax_m3", "minimax_m3_vl"), _SPARSE),
    **dict.fromkeys(("gemma4", "gemma4_text", "nemotron-nas", "mimo_v2_flash", "step3p7"), _UNLIKE),
    **dict.fromkeys(("t5", "mt5", "bart", "whisper"), _BOTH_WAYS),
    **dict.fromkeys(("gpt2", "opt", "gpt_neox", "bloom", "falcon", "phi", "mpt"), "its MLP has no gate"),
}  # fmt: skip
EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token")
EXPERT_SIZE = "moe_intermediate_size"
TIED = ("gemma", "gemma2", "gemma3_text", "cohere2")  # families whose embeddings are tied unless their file says no
# Of so many layers one has no window where a configuration does not list them, by transformers' defaults
WINDOW_PATTERNS = {"gpt_oss": 2, "gemma2": 2, "gemma3_text": 6, "cohere2": 4, "llama4_text": 4}
WINDOWED_KINDS = ("sliding_attention", "chunked_attention")

_WIDTH, _HEADS, _HEAD_SIZE = Range(8, 1_048_576), Range(1, 1024), Range(1, 1024)
SIZES = {  # several times those of the largest models known
    "num_hidden_layers": Range(1, 1000),
    "hidden_size": Range(8, 131_072),
    "intermediate_size": _WIDTH,
    "intermediate_size_mlp": _WIDTH,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": _HEAD_SIZE,
    "vocab_size": Range(2, 10_000_000),
    "max_position_embeddings": Range(1, 1_000_000_000),
    "sliding_window": Range(1, 1_000_000_000),
    "sliding_window_pattern": Range(1, 1000),
    "max_window_layers": Range(0, 1000),
    "attention_chunk_size": Range(1, 1_000_000_000),
    **dict.fromkeys(EXPERT_COUNT_KEYS, Range(2, 4096)),
    **dict.fromkeys(CHOSEN, Range(1, 4096)),
    EXPERT_SIZE: _WIDTH,
    "shared_expert_intermediate_size": _WIDTH,
    "n_shared_experts": Range(0, 256),
    "first_k_dense_replace": Range(0, 1000),
    "decoder_sparse_step": Range(1, 1000),
    "interleave_moe_layer_step": Range(1, 1000),
    "kv_lora_rank": Range(1, 65_536),
    "q_lora_rank": Range(1, 65_536),
    "qk_rope_head_dim": _HEAD_SIZE,
    "qk_nope_head_dim": _HEAD_SIZE,
    "v_head_dim": _HEAD_SIZE,
}

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
    kind = config.get("model_type")
    if reason := _no_known_decoder(config):
        raise ValueError(f"model family {quoted(kind)} is not supported: {reason}; supported: {', '.join(FAMILIES)}")
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    kv_heads = heads if config.get("num_key_value_heads") is None else _size(config, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} kv heads evenly")
    latent, quantised = _latent(config), _quantised(config)
    if latent is None and config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of {heads} heads: head_dim is missing")
    tied = config.get("tie_word_embeddings", kind in TIED)
    if not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings: must be true or false, got {quoted(tied)}")
    window = _window(config)
    windowed = _windowed_layers(config) if window else 0
    return ModelSpec(
        name=name,
        family=FAMILIES[str(kind)],
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_size(config, "intermediate_size_mlp" if kind == "llama4_text" else "intermediate_size"),
        heads=heads,
        kv_heads=1 if latent else kv_heads,
        head_dim=_head_dim(config, latent),
        vocab=_size(config, "vocab_size"),
        tied_embeddings=tied,
        max_position_embeddings=_size_or_none(config, "max_position_embeddings"),
        sliding_window=window if windowed else None,
        experts=_experts(config, quantised.experts) if kind in WITH_EXPERTS else None,
        latent=latent,
        layer_bytes=quantised.layers,
        windowed_layers=windowed,
    )


def _no_known_decoder(config: Mapping[str, Any]) -> str | None:
    """Why a configuration is not of a decoder that is known; None if it is."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        return REFUSED[kind]
    if config.get("draft_vocab_size"):
        return "a draft head; give its target and --drafter eagle3"
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


def _experts(config: Mapping[str, Any], weight_bytes: float | None) -> Experts:
    """The experts of a configuration, and the layers that have none."""
    kind, layers = config["model_type"], _size(config, "num_hidden_layers")
    count = _first_size(config, EXPERT_COUNT_KEYS)
    per_token = _first_size(config, CHOSEN)
    if per_token > count:
        raise ValueError(f"{_given(config, CHOSEN)}: a token cannot take {per_token} of {count} experts")
    own = kind in ("mixtral", "gpt_oss", "llama4_text", "minimax_m2")  # that call it as dense models do
    size = _size(config, "intermediate_size" if own else EXPERT_SIZE)
    shared = size * (_size_or_none(config, "n_shared_experts") or 0) if not own else 0
    if kind == "llama4_text":
        shared = size
    elif kind == "qwen2_moe":
        shared = _size(config, "shared_expert_intermediate_size")
    dense = _dense_layers(config, layers)
    if dense >= layers:
        raise ValueError(f"none of the {layers} layers has experts")
    return Experts(count, per_token, size, shared, dense, weight_bytes=weight_bytes)


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers of a mixture of experts that have a plain MLP."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return kinds.count("dense")
    step = _size_or_none(config, "interleave_moe_layer_step") or _size_or_none(config, "decoder_sparse_step") or 1
    plain = config.get("mlp_only_layers") or ()
    if not isinstance(plain, list | tuple):
        raise ValueError(f"mlp_only_layers: must be a list, got {quoted(plain)}")
    first = _size_or_none(config, "first_k_dense_replace") or 0
    return sum(at < first or at in plain or (at + 1) % step != 0 for at in range(layers))


def _latent(config: Mapping[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        kv_rank=_size(config, "kv_lora_rank"),
        rope_dim=_size(config, "qk_rope_head_dim"),
        nope_dim=_size(config, "qk_nope_head_dim"),
        value_dim=_size(config, "v_head_dim"),
        query_rank=_size_or_none(config, "q_lora_rank"),
    )


def _head_dim(config: Mapping[str, Any], latent: Latent | None) -> int:
    if latent is not None:
        return latent.nope_dim + latent.rope_dim
    if config.get("head_dim") is None:
        return _size(config, "hidden_size") // _size(config, "num_attention_heads")
    return _size(config, "head_dim")


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
        return Quantised(FP8_BYTES)
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


def _windowed_layers(config: Mapping[str, Any]) -> int:
    """Layers that have the window: those listed, or by the family's pattern; without one, all."""
    kinds, layers = config.get("layer_types"), _size(config, "num_hidden_layers")
    if isinstance(kinds, list):
        return sum(kind in WINDOWED_KINDS for kind in kinds)
    pattern = _size_or_none(config, "sliding_window_pattern") or WINDOW_PATTERNS.get(str(config["model_type"]))
    if pattern is None:  # Qwen's first layers have none
        return max(0, layers - (_size_or_none(config, "max_window_layers") or 0))
    return layers - layers // pattern


def _window(config: Mapping[str, Any]) -> int | None:
    """The sliding window, or the chunk that attention keeps to, where it is shorter than the longest context."""
    key = "attention_chunk_size" if config.get("model_type") == "llama4_text" else "sliding_window"
    used = config.get("use_sliding_window", not str(config["model_type"]).startswith("qwen")) and config.get(key) != 0
    window = _size_or_none(config, key) if used else None
    longest = _size_or_none(config, "max_position_embeddings")
    return None if window is None or (longest is not None and window >= longest) else window


def _given(config: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """The first of several names that a configuration has for one size."""
    return next((key for key in keys if config.get(key) is not None), "")


def _first_size(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    if not (key := _given(config, keys)):
        raise ValueError(f"{keys[0]} is missing")
    return _size(config, key)


def _size_or_none(config: Mapping[str, Any], key: str) -> int | None:
    return None if config.get(key) is None else _size(config, key)


def _size(config: Mapping[str, Any], key: str) -> int:
    """A whole number within its range; a ValueError names the key otherwise."""
    if key not in config:
        raise ValueError(f"{key} is missing")
    value = config[key]
    if type(value) is not int:
        raise ValueError(f"{key}: must be a whole number, got {quoted(value)}")
    if not SIZES[key].holds(value):
        raise ValueError(f"{key}: must be {SIZES[key]}, got {shown(value)}")
    return value
