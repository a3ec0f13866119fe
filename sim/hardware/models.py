"""Models by name: the presets, any of their families from its Hugging Face configuration, their shards and drafters.

A drafter is a model whose shape follows from its target's: `eagle3-NAME` and `mtp-NAME` are heads of one layer as wide
as the target's, `ngram` and `none` have no layers. EAGLE-3 heads are published so: SpecForge's configurations
(github.com/sgl-project/SpecForge, configs/*-eagle3.json, August 2026) for Llama-3 8B and 70B, Qwen2.5-7B, Qwen3-4B, 8B
and 32B have one layer of the target's widths, and 32,000 draft tokens but for Qwen2.5-7B's 16,000. MTP layers as in
MiMo-7B (`MiMoMTPLayers`) and DeepSeek-V3 but for its experts.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from pdvsim.sim.core import DrafterKind, HeadKind, HeadSpec, ModelFamily, ModelSpec, Pair
from pdvsim.sim.hardware.cards import GPUS as GPUS
from pdvsim.sim.hardware.cards import gpu as gpu
from pdvsim.sim.hardware.names import model_name, unknown
from pdvsim.sim.limits import Range, shown
from pdvsim.sim.reading import printable, quoted, read_json, said

HEADS: tuple[HeadKind, ...] = ("eagle3", "mtp")
SAME_VOCABULARY = 0.01  # vocabularies that differ by less are one, padded differently
DRAFT_VOCABULARY = 32_000  # of an EAGLE-3 head, ...
DRAFT_VOCABULARIES = {"qwen2-7b": 16_000}  # ... but for those of these targets
FAMILIES: tuple[ModelFamily, ...] = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma")

_EXPERTS = "a mixture of experts: which weights a forward reads depends on its tokens"
_LATENT = "its attention keeps a compressed KV cache (MLA)"
_STATE = "it keeps a state instead of a KV cache"
_LOCAL = "its layers alternate between a sliding window and the whole context"
_BOTH_WAYS = "an encoder and a decoder, not a decoder alone"
REFUSED = {  # families that people try, and why a dense decoder is no model of them
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "olmoe", "dbrx", "gpt_oss", "llama4", "llama4_text",
                     "granitemoe", "jamba", "glm4_moe", "ernie4_5_moe"), _EXPERTS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), f"{_EXPERTS}, and {_LATENT}"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma"), _STATE),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text", "cohere2"), _LOCAL),
    **dict.fromkeys(("t5", "mt5", "bart", "whisper"), _BOTH_WAYS),
    **dict.fromkeys(("gpt2", "opt", "gpt_neox", "bloom", "falcon", "phi", "mpt"), "its MLP has no gate"),
}  # fmt: skip
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")

MODELS: dict[str, ModelSpec] = {  # measured
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

UNMEASURED: dict[str, ModelSpec] = {  # targets of published heads, and for several GPUs
    m.name: m
    for m in (
        ModelSpec("llama-2-70b", "llama", 80, 8192, 28672, 64, 8, 128, 32000, False, 2, 4096),
        ModelSpec("llama-3.1-70b", "llama", 80, 8192, 28672, 64, 8, 128, 128256, False, 2, 131072),
        ModelSpec("llama-3.3-70b", "llama", 80, 8192, 28672, 64, 8, 128, 128256, False, 2, 131072),
        ModelSpec("qwen3-4b", "qwen3", 36, 2560, 9728, 32, 8, 128, 151936, True, 2, 40960),
        ModelSpec("qwen3-8b", "qwen3", 36, 4096, 12288, 32, 8, 128, 151936, False, 2, 40960),
        ModelSpec("qwen3-32b", "qwen3", 64, 5120, 25600, 64, 8, 128, 151936, False, 2, 40960),
        ModelSpec("qwen2.5-72b", "qwen2", 80, 8192, 29568, 64, 8, 128, 152064, False, 2, 32768),
    )
}

PRESETS: Mapping[str, ModelSpec] = ChainMap(UNMEASURED, MODELS)  # read from the last on: the nine first


SIZES = {  # of a config.json; several times those of the largest models known
    "num_hidden_layers": Range(1, 1000),
    "hidden_size": Range(8, 131_072),
    "intermediate_size": Range(8, 1_048_576),
    "num_attention_heads": Range(1, 1024),
    "num_key_value_heads": Range(1, 1024),
    "head_dim": Range(1, 1024),
    "vocab_size": Range(2, 10_000_000),
    "max_position_embeddings": Range(1, 1_000_000_000),
    "sliding_window": Range(1, 1_000_000_000),
}


WIDE_DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")  # engines serve 32 bits as 16


def model(name: str) -> ModelSpec:
    """The preset that `name` means, or the head of one; a ValueError naming the known ones otherwise."""
    for kind in HEADS:
        if name.startswith(f"{kind}-"):
            return drafter(kind, model(name.removeprefix(f"{kind}-")))
    taken = model_name(name, PRESETS)
    if taken not in PRESETS:
        raise unknown("model", name, PRESETS, "a config.json of Hugging Face's (nothing is fetched)")
    return PRESETS[taken]


def pair(name: str) -> Pair:
    """The pair written `draft:target`."""
    draft, colon, given = pair_name(name).partition(":")
    if not colon:
        raise ValueError(f"pair {name!r} must be written draft:target, e.g. tinyllama-1.1b:llama-2-7b")
    kind = drafter_kind(draft)
    if kind == "model":
        return Pair(model_or_config(draft), model_or_config(given))
    target = model_or_config(given)
    if kind in ("eagle3", "mtp") and draft != f"{kind}-{given}":
        raise ValueError(f"pair {name!r}: {draft} is not the head of {given}, which is {kind}-{given}")
    return Pair(drafter(kind, target), target)


def drafter(kind: DrafterKind, target: ModelSpec) -> ModelSpec:
    """What drafts for a target without a model of its own; see the module."""
    if kind == "eagle3" or kind == "mtp":
        most = DRAFT_VOCABULARIES.get(target.name, DRAFT_VOCABULARY) if kind == "eagle3" else target.vocab
        shape = {f.name: getattr(target, f.name) for f in fields(ModelSpec)}
        return HeadSpec(
            **shape | {"name": f"{kind}-{target.name}", "layers": 1, "vocab": min(most, target.vocab)}, kind=kind
        )
    return ModelSpec(kind, target.family, 0, 0, 0, 0, 0, 0, target.vocab)


def drafter_kind(pair: str) -> DrafterKind:
    """Who drafts, of a pair written draft:target."""
    draft, _, _ = pair.partition(":")
    unmodelled: tuple[DrafterKind, ...] = ("ngram", "none")
    named = [kind for kind in unmodelled if draft == kind]
    headed: list[DrafterKind] = [kind for kind in HEADS if draft.startswith(f"{kind}-")]
    return next(iter(named + headed), "model")


def same_vocabulary(a: ModelSpec, b: ModelSpec) -> bool:
    """Whether two models may have the same tokens, by their number."""
    return abs(a.vocab - b.vocab) <= SAME_VOCABULARY * b.vocab


def natural_draft(target: ModelSpec) -> str | None:
    """The smallest preset that may draft for a model: of its family and tokens, and at most a third of its size."""
    able = [
        draft
        for draft in PRESETS.values()
        if draft.family == target.family and same_vocabulary(draft, target) and 3 * draft.params <= target.params
    ]
    return min(able, key=lambda draft: draft.params).name if able else None


def drafted_by(kind: DrafterKind | None, pair: str) -> str:
    """The pair with that drafter for its target, which may stand alone; None: as it is.

    For a target alone None is its natural draft model, or an EAGLE-3 head where there is none.
    """
    draft, colon, target = pair.partition(":")
    if not colon and kind in (None, "model") and drafter_kind(pair) == "model":
        natural = natural_draft(model_or_config(pair))
        if natural is None and kind == "model":
            raise ValueError(f"--drafter model: no preset drafts for {pair}; write --pair draft:target")
        return f"{natural or f'eagle3-{pair}'}:{pair}"
    if kind == "model" and drafter_kind(pair) != "model":
        raise ValueError(f"--drafter model needs a draft model: write --pair draft:target, got {pair}")
    if kind is None or kind == "model":
        return pair
    target = target or draft
    return f"{kind}-{target}:{target}" if kind in HEADS else f"{kind}:{target}"


def model_or_config(name: str) -> ModelSpec:
    """A preset, or the model of a config.json or of the folder that holds one; it is then called by that path."""
    if name in PRESETS or not is_config(name):
        return model(name)
    try:
        return from_config(read_config(Path(name)), name)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {name}: {said(error)}") from None


def is_config(name: str) -> bool:
    """Whether a name is that of a file or folder, not of a preset."""
    return name.endswith(".json") or (bool(name) and "\0" not in name and Path(name).is_dir())


def pair_name(name: str) -> str:
    """A pair with presets by their own names; files, and what is unknown, as they were given."""
    parts = str(name).split(":", 1)  # what a file of runs says may be no text
    return ":".join(map(_own_name, parts))


def _own_name(name: str) -> str:
    for kind in HEADS:
        if name.startswith(f"{kind}-"):
            return f"{kind}-{_own_name(name.removeprefix(f'{kind}-'))}"
    plain = name in PRESETS or name in ("ngram", "none") or is_config(name)
    return name if plain else model_name(name, PRESETS)


def shard(spec: ModelSpec, gpus: int) -> ModelSpec:
    """What one of `gpus` runs of a model: its share of heads, MLP and vocabulary; fewer KV heads are on several.

    A ValueError where vLLM would not divide it.
    """
    if gpus == 1 or spec.on_host:
        return spec
    for what, size in (("heads", spec.heads), ("intermediate size", spec.intermediate)):
        if size % gpus:
            raise ValueError(f"{spec.name} cannot be sharded over {gpus} GPUs: its {what}, {size}, is no multiple")
    if max(spec.kv_heads, gpus) % min(spec.kv_heads, gpus):
        raise ValueError(f"{spec.name} cannot be sharded over {gpus} GPUs: it has {spec.kv_heads} KV heads")
    return replace(
        spec,
        name=f"{spec.name}/tp{gpus}",
        intermediate=spec.intermediate // gpus,
        heads=spec.heads // gpus,
        kv_heads=max(1, spec.kv_heads // gpus),
        vocab=-(-spec.vocab // gpus),
        shards=gpus,
    )


def model_or_shard(name: str) -> ModelSpec:
    """A preset, or what one of so many GPUs runs of it, as llama-3.1-70b/tp4: what is measured on one GPU."""
    whole, slash, size = name.rpartition("/tp")
    return shard(model(whole), int(size)) if slash and size.isdecimal() and int(size) else model(name)


def read_config(path: Path) -> Mapping[str, Any]:
    """The dictionary in a config.json or in the folder that holds it."""
    file = path / "config.json" if path.is_dir() else path
    found = read_json(file)
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    if file.with_name("hf_quant_config.json").exists():  # where NVIDIA's ModelOpt says it
        found.setdefault("quantization_config", {"quant_method": "modelopt"})
    return found


def from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The shape that a Hugging Face configuration describes; a ValueError if that is no dense decoder of a family."""
    family = config.get("model_type")
    if reason := _no_dense_decoder(config):
        raise ValueError(f"model family {quoted(family)} is not supported: {reason}; supported: {', '.join(FAMILIES)}")
    if method := _quantised(config):
        raise ValueError(
            f"quantised weights ({method}) are not simulated: give the config.json of the unquantised model, "
            "which is simulated with 16-bit weights"
        )
    sizes = {key: _size(config, key) for key in ("num_attention_heads", "hidden_size")}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    kv_heads = heads if config.get("num_key_value_heads") is None else _size(config, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} kv heads evenly")
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of {heads} heads: head_dim is missing")
    tied = config.get("tie_word_embeddings", family == "gemma")
    if not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings: must be true or false, got {quoted(tied)}")
    return ModelSpec(
        name=name,
        family=cast(ModelFamily, family),
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_size(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads if config.get("head_dim") is None else _size(config, "head_dim"),
        vocab=_size(config, "vocab_size"),
        tied_embeddings=tied,
        max_position_embeddings=_size_or_none(config, "max_position_embeddings"),
        sliding_window=_window(config),
    )


def _no_dense_decoder(config: Mapping[str, Any]) -> str | None:
    """Why a configuration is not of a dense decoder that is known; None if it is."""
    family = config.get("model_type")
    if isinstance(family, str) and family in REFUSED:
        return REFUSED[family]
    if any(config.get(key) for key in EXPERT_KEYS):
        return _EXPERTS
    if config.get("draft_vocab_size"):
        return "a draft head; give its target and --drafter eagle3"
    if config.get("kv_lora_rank"):
        return _LATENT
    if config.get("is_encoder_decoder"):
        return _BOTH_WAYS
    if isinstance(config.get("text_config"), dict):
        return "it is multimodal; give the configuration under its text_config"
    return None if family in FAMILIES else "unknown family"


def _quantised(config: Mapping[str, Any]) -> str | None:
    """How a configuration says that weights have fewer than 16 bits; None if it does not."""
    for key in ("quantization_config", "compression_config"):
        if given := config.get(key):
            method = given.get("quant_method") if isinstance(given, dict) else None
            return printable(method)[:40] if isinstance(method, str) and method else key
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is None or (isinstance(dtype, str) and dtype.removeprefix("torch.") in WIDE_DTYPES):
        return None
    return f"dtype {quoted(dtype)}"


def _window(config: Mapping[str, Any]) -> int | None:
    """The sliding window, where one is used and shorter than the longest context."""
    window = _size_or_none(config, "sliding_window") if config.get("use_sliding_window", True) else None
    longest = _size_or_none(config, "max_position_embeddings")
    return None if window is None or (longest is not None and window >= longest) else window


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
