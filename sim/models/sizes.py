"""Families of Hugging Face configurations, and the sizes in one, each a whole number within its range.

A table (`data/families.toml`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdvsim.sim.limits import Range, shown
from pdvsim.sim.reading import quoted

_TABLE = tomllib.loads((Path(__file__).parent / "data" / "families.toml").read_text(encoding="utf-8"))
FAMILIES: dict[str, dict[str, Any]] = _TABLE["families"]  # by model_type
REFUSED: dict[str, str] = {kind: why for why, kinds in _TABLE["refused"].items() for kind in kinds}
SIZES = {key: Range(*sizes["range"]) for sizes in _TABLE["sizes"] for key in sizes["keys"]}
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "top_k_experts")


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
