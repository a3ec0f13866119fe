"""Sizes in a Hugging Face configuration, each a whole number within its range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdvsim.sim.limits import Range, shown
from pdvsim.sim.reading import quoted

EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "top_k_experts")
EXPERT_SIZE = "moe_intermediate_size"

RANGES = {  # several times the sizes of the largest models known
    Range(8, 131_072): "hidden_size",
    Range(8, 1_048_576): "intermediate_size intermediate_size_mlp dense_intermediate_size moe_intermediate_size "
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size moe_latent_size",
    Range(0, 1_048_576): "shared_intermediate_size",
    Range(0, 131_072): "hidden_size_per_layer_input",
    Range(1, 1000): "num_hidden_layers sliding_window_pattern decoder_sparse_step interleave_moe_layer_step "
    "full_attention_interval index_topk_freq",
    Range(0, 1000): "max_window_layers first_k_dense_replace num_kv_shared_layers index_skip_topk_offset",
    Range(1, 1024): "num_attention_heads num_key_value_heads head_dim attention_head_dim qk_rope_head_dim "
    "qk_nope_head_dim v_head_dim num_global_key_value_heads global_head_dim swa_num_key_value_heads swa_head_dim "
    "linear_num_key_heads linear_num_value_heads linear_num_heads num_heads mamba_num_heads n_groups "
    "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_head_dim ssm_state_size index_n_heads "
    "sparse_num_index_heads index_head_dim sparse_index_dim o_groups",
    Range(2, 10_000_000): "vocab_size",
    Range(1, 1_000_000_000): "max_position_embeddings sliding_window attention_chunk_size",
    Range(2, 4096): " ".join(EXPERT_COUNT_KEYS),
    Range(1, 4096): " ".join(CHOSEN),
    Range(0, 256): "n_shared_experts num_shared_experts",
    Range(1, 65_536): "kv_lora_rank q_lora_rank o_lora_rank",
    Range(1, 64): "linear_conv_kernel_dim conv_kernel short_conv_kernel_size hc_mult",
    Range(1, 1_000_000): "index_topk sparse_topk_blocks sparse_block_size",
}
SIZES = {key: allowed for allowed, keys in RANGES.items() for key in keys.split()}


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
