"""Sizes in a Hugging Face configuration, each a whole number within its range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdvsim.sim.limits import Range, shown
from pdvsim.sim.reading import quoted

EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "top_k_experts")
EXPERT_SIZE = "moe_intermediate_size"

_WIDTH, _HEADS, _HEAD_SIZE = Range(8, 1_048_576), Range(1, 1024), Range(1, 1024)
SIZES = {  # several times those of the largest models known
    "num_hidden_layers": Range(1, 1000),
    "hidden_size": Range(8, 131_072),
    "intermediate_size": _WIDTH,
    "intermediate_size_mlp": _WIDTH,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": _HEAD_SIZE,
    "attention_head_dim": _HEAD_SIZE,
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
    "num_global_key_value_heads": _HEADS,
    "global_head_dim": _HEAD_SIZE,
    "swa_num_key_value_heads": _HEADS,
    "swa_head_dim": _HEAD_SIZE,
    "dense_intermediate_size": _WIDTH,
    "moe_shared_expert_intermediate_size": _WIDTH,
    "shared_intermediate_size": Range(0, 1_048_576),
    "num_shared_experts": Range(0, 256),
    "moe_latent_size": _WIDTH,
    "hidden_size_per_layer_input": Range(0, 131_072),
    "num_kv_shared_layers": Range(0, 1000),
    "full_attention_interval": Range(1, 1000),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("mamba_num_heads", "n_groups"), _HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), _HEAD_SIZE),
    **dict.fromkeys(("mamba_head_dim", "ssm_state_size"), _HEAD_SIZE),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "short_conv_kernel_size"), Range(1, 64)),
    **dict.fromkeys(("index_topk", "sparse_topk_blocks", "sparse_block_size"), Range(1, 1_000_000)),
    **dict.fromkeys(("index_n_heads", "sparse_num_index_heads"), _HEADS),
    **dict.fromkeys(("index_head_dim", "sparse_index_dim"), _HEAD_SIZE),
    "index_topk_freq": Range(1, 1000),
    "o_lora_rank": Range(1, 65_536),
    "o_groups": _HEADS,
    "hc_mult": Range(1, 64),
    "index_skip_topk_offset": Range(0, 1000),
}


def given_key(config: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """The first of several names that a configuration has for one size."""
    return next((key for key in keys if config.get(key) is not None), "")


def first_size(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """The size under the first of several names that a configuration has; a ValueError if it has none."""
    if not (key := given_key(config, keys)):
        raise ValueError(f"{keys[0]} is missing")
    return size(config, key)


def size_or_none(config: Mapping[str, Any], key: str) -> int | None:
    """The size, or None where it is missing or null."""
    return None if config.get(key) is None else size(config, key)


def size(config: Mapping[str, Any], key: str) -> int:
    """A whole number within its range; a ValueError names the key otherwise."""
    if key not in config:
        raise ValueError(f"{key} is missing")
    value = config[key]
    if type(value) is not int:
        raise ValueError(f"{key}: must be a whole number, got {quoted(value)}")
    if not SIZES[key].holds(value):
        raise ValueError(f"{key}: must be {SIZES[key]}, got {shown(value)}")
    return value
