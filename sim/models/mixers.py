"""Sizes in a Hugging Face configuration, and which of its layers have a window, select tokens, keep a state or an MLP.

A size is a whole number within its range; families differ in the keys (`data/families.toml`).

States are kept in the type that a configuration names, else in the model's 16 bits, as vLLM does; those of KDA in 32.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pdvsim.sim.limits import Range, shown
from pdvsim.sim.models.layers import Compressed, SlidingWindow, Sparse, State
from pdvsim.sim.reading import quoted

_TABLE = tomllib.loads((Path(__file__).parent / "data" / "families.toml").read_text(encoding="utf-8"))
FAMILIES: dict[str, dict[str, Any]] = _TABLE["families"]  # by model_type
REFUSED: dict[str, str] = {kind: why for why, kinds in _TABLE["refused"].items() for kind in kinds}
SIZES = {key: Range(*sizes["range"]) for sizes in _TABLE["sizes"] for key in sizes["keys"]}
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "top_k_experts")
WINDOWED_KINDS = ("sliding_attention", "chunked_attention")
DSA = ("deepseek_v32", "glm_moe_dsa")
CSA_RATIO, HCA_RATIO = 4, 128  # tokens per entry of DeepSeek-V4's compressed attention
COMPRESSED_KINDS = {
    "sliding_attention": 0, "compressed_sparse_attention": CSA_RATIO, "heavily_compressed_attention": HCA_RATIO
}  # fmt: skip
INDEX_SCALE_BYTES = 4  # of the scale of an indexer's key, which has 8 bits (DSA in vLLM)
STATE_TYPES = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
# Blocks of Nemotron-H by letter, and as transformers has come to call them
NEMOTRON_BLOCKS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
RENAMED_BLOCKS = {"linear_attention": "mamba", "full_attention": "attention"}


def given_key(config: Mapping[str, Any], *keys: str) -> str:
    """The first of several names of one size that a configuration has; the first of all if it has none."""
    return next((key for key in keys if config.get(key) is not None), keys[0])


def size_or_none(config: Mapping[str, Any], *keys: str) -> int | None:
    """The size under the first of its names that is given, or None where it is missing or null."""
    return None if config.get(given_key(config, *keys)) is None else size(config, *keys)


def size(config: Mapping[str, Any], *keys: str) -> int:
    """A whole number within its range; a ValueError names the key otherwise."""
    key = given_key(config, *keys)
    if key not in config:
        raise ValueError(f"{key} is missing")
    value = config[key]
    if type(value) is not int:
        raise ValueError(f"{key}: must be a whole number, got {quoted(value)}")
    if not SIZES[key].holds(value):
        raise ValueError(f"{key}: must be {SIZES[key]}, got {shown(value)}")
    return value


class Blocks(NamedTuple):
    """How many layers mix tokens; how many of them have no MLP or keep a state; MLPs next to experts, and these."""

    layers: int
    without_mlp: int = 0
    states: int = 0
    dense: int = 0
    moe: int = 0


def blocks(config: Mapping[str, Any]) -> Blocks:
    """The layers of a configuration. Those of Nemotron-H are a mixer or an MLP each: counted here are the mixers."""
    if config["model_type"] != "nemotron_h":
        return Blocks(size(config, "num_hidden_layers"))
    pattern, kinds = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if isinstance(pattern, str):
        kinds = [NEMOTRON_BLOCKS.get(letter) for letter in pattern]
    kinds = [RENAMED_BLOCKS.get(str(kind), kind) for kind in kinds] if isinstance(kinds, list) else [None]
    if not set(kinds) <= set(NEMOTRON_BLOCKS.values()):
        raise ValueError("hybrid_override_pattern: must have the letters M, *, E and - (or give layers_block_type)")
    counts = {kind: kinds.count(kind) for kind in NEMOTRON_BLOCKS.values()}
    mixers, mlps = counts["mamba"] + counts["attention"], counts["moe"] + counts["mlp"]
    if mlps > mixers or not counts["attention"]:
        raise ValueError(f"{mixers} layers that mix tokens and {mlps} MLPs: not a Nemotron-H model that is supported")
    return Blocks(mixers, mixers - mlps, counts["mamba"], counts["mlp"] if counts["moe"] else 0, counts["moe"])


def window(config: Mapping[str, Any]) -> SlidingWindow | None:
    """The layers with a sliding window, or with a chunk that attention keeps to, if contexts can be longer."""
    kind, pattern = str(config["model_type"]), config.get("hybrid_layer_pattern")
    family = FAMILIES[kind]
    key = family.get("window", "sliding_window")
    if not key or config.get(key) == 0 or not config.get("use_sliding_window", not kind.startswith("qwen")):
        return None
    tokens, longest = size_or_none(config, key), size_or_none(config, "max_position_embeddings")
    if tokens is None or (longest is not None and tokens >= longest):
        return None
    layers = sum(map(bool, pattern)) if isinstance(pattern, list) else _windowed_layers(config, family)
    heads = [size(config, key) for key in family.get("window_heads", ())]
    return SlidingWindow(layers, tokens, *heads) if layers else None


def _windowed_layers(config: Mapping[str, Any], family: Mapping[str, Any]) -> int:
    """Layers that have the window: those listed, or by the family's pattern; without one, all."""
    kinds, layers = config.get("layer_types"), size(config, "num_hidden_layers")
    if isinstance(kinds, list):
        return sum(kind in WINDOWED_KINDS for kind in kinds)
    pattern = size_or_none(config, "sliding_window_pattern") or family.get("window_every")
    if pattern is None:  # Qwen's first layers have none
        return max(0, layers - (size_or_none(config, "max_window_layers") or 0))
    return layers - layers // int(pattern)


def sparse(config: Mapping[str, Any]) -> Sparse | None:
    """The layers whose attention selects tokens."""
    kind = config["model_type"]
    if kind in DSA:
        layers, heads, width = (size(config, key) for key in ("num_hidden_layers", "index_n_heads", "index_head_dim"))
        topk, scans = size(config, "index_topk"), _scanning_layers(config)
        return Sparse(layers, topk, scans, heads, width, width + INDEX_SCALE_BYTES, size(config, "q_lora_rank"))
    if kind != "minimax_m3":
        return None
    own = config.get("sparse_attention_config")
    chosen = own.get("sparse_attention_freq") if isinstance(own, dict) else None
    if not isinstance(own, dict) or not isinstance(chosen, list):
        raise ValueError("sparse_attention_config: must have sparse_attention_freq, a list of 0 and 1")
    layers, width = sum(map(bool, chosen)), size(own, "sparse_index_dim")
    topk = size(own, "sparse_topk_blocks") * size(own, "sparse_block_size")
    return Sparse(layers, topk, layers, size(own, "sparse_num_index_heads"), width, 2 * width)


def compressed(config: Mapping[str, Any]) -> Compressed | None:
    """Attention to entries that stand for several tokens."""
    if (keys := FAMILIES[config["model_type"]].get("compressed")) is None:
        return None
    ratios, heads, groups = _ratios(config), size(config, "num_attention_heads"), size(config, "o_groups")
    if heads % groups:
        raise ValueError(f"o_groups: {heads} heads are no multiple of {groups} groups")
    return Compressed(
        layers=len(ratios),
        selecting=ratios.count(CSA_RATIO),
        whole=ratios.count(HCA_RATIO),
        ratio=CSA_RATIO,
        wide_ratio=HCA_RATIO,
        rope_dim=size_or_none(config, "qk_rope_head_dim") or 64,
        **{name: size(config, key) for name, key in keys.items()},
    )


def _ratios(config: Mapping[str, Any]) -> list[int]:
    """Tokens per entry of each layer of DeepSeek-V4; 0: it has a window alone. What follows is of MTP layers."""
    layers, ratios = size(config, "num_hidden_layers"), config.get("compress_ratios")
    if isinstance(kinds := config.get("layer_types"), list):  # as transformers has come to write it
        ratios = [COMPRESSED_KINDS.get(kind) for kind in kinds]
    if not isinstance(ratios, list) or len(ratios) < layers or not set(ratios) <= set(COMPRESSED_KINDS.values()):
        raise ValueError(f"compress_ratios: must have 0, {CSA_RATIO} or {HCA_RATIO} for each of {layers} layers")
    return ratios[:layers]


def _scanning_layers(config: Mapping[str, Any]) -> int:
    """Layers that select for themselves; the others use an earlier one's selection (GLM-5.2)."""
    layers, pattern = size(config, "num_hidden_layers"), config.get("index_topk_pattern")
    if isinstance(pattern, str | list):
        return layers - int(sum(letter == "S" for letter in pattern))
    every, offset = size_or_none(config, "index_topk_freq") or 1, size_or_none(config, "index_skip_topk_offset")
    first = 1 if offset is None else offset - 1
    return sum(max(0, at - first) % every == 0 for at in range(layers))


def state(config: Mapping[str, Any]) -> State | None:
    """The layers that keep a state."""
    family, own = FAMILIES[config["model_type"]], config.get("linear_attn_config")
    if "state" not in family:
        return None
    kind, *keys = family["state"]
    if kind == "kda" and isinstance(own, dict):  # as it was written before transformers had it
        if not isinstance(listed := own.get("kda_layers"), list):
            raise ValueError("linear_attn_config: must have kda_layers, a list of layers")
        own_keys = ("num_heads", "num_heads", "head_dim", "head_dim", "short_conv_kernel_size")
        return replace(State("kda", len(listed), *(size(own, key) for key in own_keys)), item_bytes=4)
    if kind == "lightning" and config.get("head_dim") is None:
        config = {**config, "head_dim": size(config, "hidden_size") // size(config, "num_attention_heads")}
    layers = blocks(config).states if kind == "mamba2" else _linear_layers(config, family["state_every"])
    if not layers and kind == "mamba2":
        return None
    item = 4 if kind == "kda" else _item(config)
    return replace(State(kind, layers, *(size(config, key) for key in keys)), item_bytes=item)


def _linear_layers(config: Mapping[str, Any], every: int) -> int:
    """Layers of linear attention: those listed, or all but every so many."""
    kinds, layers = config.get("layer_types"), size(config, "num_hidden_layers")
    if isinstance(kinds, list):
        return sum(kind == "linear_attention" for kind in kinds)
    if isinstance(listed := config.get("attn_type_list"), Sequence):
        return sum(kind == 0 for kind in listed)
    return layers - layers // (size_or_none(config, "full_attention_interval") or every)


def _item(config: Mapping[str, Any]) -> int:
    """Bytes per value of a state."""
    given = next((config[key] for key in STATE_TYPES if config.get(key) is not None), "bfloat16")
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    if given not in sizes:
        raise ValueError(f"mamba_ssm_dtype: must be {', '.join(sizes)}, got {quoted(given)}")
    return sizes[given]
