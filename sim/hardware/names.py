"""Names that people type, as the presets they mean: cards as drivers and shops call them, models by Hugging Face id.

A table, and nothing is fetched. A model stands for a preset only where every size is the same; of models that were
tuned further the longest context may differ, and is the preset's here.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable

CARDS: dict[str, tuple[str, ...]] = {  # preset: other names, in lower case, with hyphens, without the maker's
    "h200": ("h200-sxm", "h200-sxm5", "h200-141gb"),
    "a100-40gb": ("a100-40g", "a100-sxm-40gb", "a100-sxm4-40gb"),
    "a100-40gb-pcie": ("a100-pcie-40gb",),
    "a100-80gb": ("a100", "a100-80g", "a100-sxm", "a100-sxm4", "a100-sxm-80gb", "a100-sxm4-80gb"),
    "a100-80gb-pcie": ("a100-pcie", "a100-pcie-80gb"),
    "h100-sxm": ("h100", "h100-80gb", "h100-sxm5", "h100-sxm-80gb", "h100-sxm5-80gb", "h100-80gb-hbm3"),
    "h100-pcie": ("h100-pcie-80gb", "h100-80gb-pcie"),
    "h100-nvl": ("h100-nvl-94gb",),
    "rtx-4090": ("4090", "rtx4090"),
    "b200": ("b200-sxm", "hgx-b200"),
}

MODELS: dict[str, tuple[str, ...]] = {  # preset: Hugging Face ids, each also known without its owner
    "tinyllama-1.1b": (
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        "TinyLlama/TinyLlama_v1.1",
        "TinyLlama",
    ),
    "llama-2-7b": (
        "meta-llama/Llama-2-7b",
        "meta-llama/Llama-2-7b-hf",
        "meta-llama/Llama-2-7b-chat",
        "meta-llama/Llama-2-7b-chat-hf",
        "NousResearch/Llama-2-7b-hf",
        "lmsys/vicuna-7b-v1.5",
        "llama2-7b",
    ),
    "codellama-34b": (
        "codellama/CodeLlama-34b-hf",
        "codellama/CodeLlama-34b-Instruct-hf",
        "codellama/CodeLlama-34b-Python-hf",
        "meta-llama/CodeLlama-34b-hf",
        "meta-llama/CodeLlama-34b-Instruct-hf",
        "meta-llama/CodeLlama-34b-Python-hf",
    ),
    "llama-3.2-1b": (
        "meta-llama/Llama-3.2-1B",
        "meta-llama/Llama-3.2-1B-Instruct",
        "unsloth/Llama-3.2-1B",
        "unsloth/Llama-3.2-1B-Instruct",
    ),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "NousResearch/Meta-Llama-3.1-8B",
        "NousResearch/Meta-Llama-3.1-8B-Instruct",
        "unsloth/Meta-Llama-3.1-8B",
        "unsloth/Meta-Llama-3.1-8B-Instruct",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    ),
    "llama-3.3-70b": (
        "meta-llama/Llama-3.3-70B-Instruct",
        "unsloth/Llama-3.3-70B-Instruct",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    ),
    "qwen2-1.5b": (
        "Qwen/Qwen2-1.5B",
        "Qwen/Qwen2-1.5B-Instruct",
        "Qwen/Qwen2.5-1.5B",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "Qwen/Qwen2.5-Coder-1.5B",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    ),
    "qwen2-7b": (
        "Qwen/Qwen2-7B",
        "Qwen/Qwen2-7B-Instruct",
        "Qwen/Qwen2.5-7B",
        "Qwen/Qwen2.5-7B-Instruct",
        "Qwen/Qwen2.5-Coder-7B",
        "Qwen/Qwen2.5-Coder-7B-Instruct",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    ),
    "qwen3-4b": ("Qwen/Qwen3-4B",),
    "qwen3-8b": ("Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
    "gemma-2b": ("google/gemma-2b", "google/gemma-2b-it", "google/gemma-1.1-2b-it"),
    "gemma-7b": ("google/gemma-7b", "google/gemma-7b-it", "google/gemma-1.1-7b-it"),
    "llama-2-70b": (
        "meta-llama/Llama-2-70b",
        "meta-llama/Llama-2-70b-hf",
        "meta-llama/Llama-2-70b-chat",
        "meta-llama/Llama-2-70b-chat-hf",
        "llama2-70b",
    ),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.1-70B-Instruct",
        "meta-llama/Meta-Llama-3.1-70B",
        "meta-llama/Meta-Llama-3.1-70B-Instruct",
    ),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B", "Qwen/Qwen2.5-72B-Instruct"),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B",),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Thinking-2507"),
    "qwen3-235b-a22b": (
        "Qwen/Qwen3-235B-A22B",
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
        "Qwen/Qwen3-235B-A22B-Thinking-2507",
    ),
    "gpt-oss-20b": ("openai/gpt-oss-20b",),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3",
        "deepseek-ai/DeepSeek-V3-0324",
        "deepseek-ai/DeepSeek-V3.1",
        "deepseek-ai/DeepSeek-R1",
        "deepseek-ai/DeepSeek-R1-0528",
    ),
}  # fmt: skip


class Note(UserWarning):
    """What was taken for what a user gave; no reason to doubt it."""


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


_CARD_OF = {other: card for card, others in CARDS.items() for other in others}
_MODEL_OF = {_plain(n): model for model, ids in MODELS.items() for id in ids for n in (id, id.rpartition("/")[2])}


def card_name(name: str, known: Iterable[str]) -> str:
    """The card of `known` that a name means, which is said; the name itself where it means none."""
    plain = _plain(name).removeprefix("nvidia-").removeprefix("geforce-")
    return _said(name, plain if plain in known else _CARD_OF.get(plain, name))


def model_name(name: str, known: Iterable[str]) -> str:
    """The same of a model."""
    plain = _plain(name)
    return _said(name, plain if plain in known else _MODEL_OF.get(plain, name))


def _said(given: str, taken: str) -> str:
    """What was taken, with a note unless only the writing differs."""
    if taken not in (given, _plain(given)):
        warnings.warn(f"{given} is read as {taken}", Note, stacklevel=2)
    return taken


def unknown(what: str, name: str, known: Iterable[str], others: str) -> ValueError:
    """The error about a name that nothing is called, with the one that is most like it."""
    called = {known_name: known_name for known_name in known}
    others_of = _CARD_OF if what == "gpu" else _MODEL_OF
    close = difflib.get_close_matches(_plain(name).rpartition("/")[2], [*called, *others_of], n=1)
    hint = f" (did you mean {(called | others_of)[close[0]]}?)" if close else ""
    return ValueError(f"unknown {what} {name!r}{hint}; known: {', '.join(called)}, or {others}")
