"""A model's config.json as Hugging Face publishes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
}  # fmt: skip
MIXED = {**SHAPE, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def config_file(folder: Path, **changes: Any) -> Path:
    """The configuration of Llama-3.1-8B with these changes, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(SHAPE | changes), encoding="utf-8")
    return path
