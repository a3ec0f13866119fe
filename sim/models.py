"""Presets: the nine models and the cards whose ceilings are known."""

from __future__ import annotations

from pdvsim.sim.core import GpuSpec, ModelSpec, Pair

MODELS: dict[str, ModelSpec] = {
    m.name: m
    for m in (
        #         name              family  layers hidden  inter heads kv  dim   vocab
        ModelSpec("tinyllama-1.1b", "llama", 22, 2048, 5632, 32, 4, 64, 32000),
        ModelSpec("llama-2-7b", "llama", 32, 4096, 11008, 32, 32, 128, 32000),
        ModelSpec("codellama-34b", "llama", 48, 8192, 22016, 64, 8, 128, 32000),
        ModelSpec("llama-3.2-1b", "llama", 16, 2048, 8192, 32, 8, 64, 128256, tied_embeddings=True),
        ModelSpec("llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256),
        ModelSpec("qwen2-1.5b", "qwen2", 28, 1536, 8960, 12, 2, 128, 151936, tied_embeddings=True),
        ModelSpec("qwen2-7b", "qwen2", 28, 3584, 18944, 28, 4, 128, 152064),
        ModelSpec("gemma-2b", "gemma", 18, 2048, 16384, 8, 1, 256, 256000, tied_embeddings=True),
        ModelSpec("gemma-7b", "gemma", 28, 3072, 24576, 16, 16, 256, 256000, tied_embeddings=True),
    )
}

GPUS: dict[str, GpuSpec] = {
    "h200": GpuSpec(
        "h200",
        bandwidth_bytes_per_s=4.27e12,
        flops_per_s=790e12,
        memory_bytes=143771 * 2**20,
        source="measured on one H200 SXM: device-to-device copy and 8192^3 bf16 matrix product on random data",
        measured=True,
    ),
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
    return Pair(model(draft), model(target))


def gpu(name: str) -> GpuSpec:
    """The card called `name`; a ValueError naming the known ones otherwise."""
    if name not in GPUS:
        raise ValueError(f"unknown gpu {name!r}; known: {', '.join(GPUS)}")
    return GPUS[name]
