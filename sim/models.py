"""Models by name: the nine presets, or any of their families from its Hugging Face configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pdvsim.sim.cards import GPUS, gpu
from pdvsim.sim.core import Family, ModelSpec, Pair

__all__ = ["FAMILIES", "GPUS", "MODELS", "from_config", "gpu", "model", "model_or_config", "pair", "read_config"]

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "gemma")

MODELS: dict[str, ModelSpec] = {
    m.name: m
    for m in (
        #         name              family  layers hidden  inter heads kv  dim   vocab   tied  bytes  context
        ModelSpec("tinyllama-1.1b", "llama", 22, 2048, 5632, 32, 4, 64, 32000, False, 2, 2048),
        ModelSpec("llama-2-7b", "llama", 32, 4096, 11008, 32, 32, 128, 32000, False, 2, 4096),
        ModelSpec("codellama-34b", "llama", 48, 8192, 22016, 64, 8, 128, 32000, False, 2, 16384),
        ModelSpec("llama-3.2-1b", "llama", 16, 2048, 8192, 32, 8, 64, 128256, True, 2, 131072),
        ModelSpec("llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256, False, 2, 131072),
        ModelSpec("qwen2-1.5b", "qwen2", 28, 1536, 8960, 12, 2, 128, 151936, True, 2, 131072),
        ModelSpec("qwen2-7b", "qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False, 2, 131072),
        ModelSpec("gemma-2b", "gemma", 18, 2048, 16384, 8, 1, 256, 256000, True, 2, 8192),
        ModelSpec("gemma-7b", "gemma", 28, 3072, 24576, 16, 16, 256, 256000, True, 2, 8192),
    )
}


def model(name: str) -> ModelSpec:
    """The preset called `name`; a ValueError naming the known ones otherwise."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    return MODELS[name]


def pair(name: str) -> Pair:
    """The pair written `draft:target`."""
    draft, colon, target = name.partition(":")
    if not colon:
        raise ValueError(f"pair {name!r} must be written draft:target, e.g. tinyllama-1.1b:llama-2-7b")
    return Pair(model_or_config(draft), model_or_config(target))


def model_or_config(name: str) -> ModelSpec:
    """A preset, or the model of a config.json or of the folder that holds one; it is then called by that path."""
    path = Path(name)
    if name in MODELS or not (path.suffix == ".json" or path.is_dir()):
        return model(name)
    try:
        return from_config(read_config(path), name)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"model {name}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"model {name}: {said}") from None


def read_config(path: Path) -> Mapping[str, Any]:
    """The dictionary in a config.json or in the folder that holds it."""
    found = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    return found


def from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The shape that a Hugging Face configuration describes; a ValueError if its family is not known."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model family {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    heads, context = int(config["num_attention_heads"]), config.get("max_position_embeddings")
    spec = ModelSpec(
        name=name,
        family=cast(Family, family),
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        vocab=int(config["vocab_size"]),
        tied_embeddings=bool(config.get("tie_word_embeddings", family == "gemma")),
        max_position_embeddings=None if context is None else int(context),
    )
    sizes = (spec.layers, spec.hidden, spec.intermediate, heads, spec.kv_heads, spec.head_dim, spec.vocab)
    if min(*sizes, 1 if context is None else int(context)) < 1:
        raise ValueError("sizes must be at least 1")
    if spec.heads % spec.kv_heads:
        raise ValueError(f"{spec.heads} heads cannot share {spec.kv_heads} kv heads evenly")
    return spec
