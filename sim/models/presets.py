"""Models by name: the presets, any of their families from its Hugging Face configuration, their shards and drafters.

A drafter is a model whose shape follows from its target's: `eagle3-NAME` and `mtp-NAME` are heads of one layer as wide
as the target's; `ngram`, `suffix` and `none` have no layers; `pard-NAME` is a draft model trained to draft in parallel.
EAGLE-3 heads are published so: SpecForge's configurations (github.com/sgl-project/SpecForge, configs/*-eagle3.json,
August 2026) for Llama-3 8B and 70B, Qwen2.5-7B, Qwen3-4B, 8B and 32B have one layer of the target's widths, and 32,000
draft tokens but for Qwen2.5-7B's 16,000. Those for mixtures of experts (the same folder: Qwen3-30B and 235B, gpt-oss,
DeepSeek-V3) have a plain MLP and plain attention. MTP layers as in MiMo-7B (`MiMoMTPLayers`) and DeepSeek-V3: a layer
of the target's own kind, experts included. `p-eagle-NAME` has four layers (model cards of amazon/gpt-oss-120b-p-eagle
and amazon/GPT-OSS-20B-P-EAGLE) of the EAGLE-3 head's widths, which is assumed. `dflash-NAME` has five, five states,
blocks of 16 and the target's widths (z-lab/Qwen3-8B-DFlash-b16); for Qwen3-32B those of chutesai/Qwen3-32B-FP8-DFLASH.
Keys and values that DFlash makes of hidden states are priced as tokens of its forward, and its attention within a block
as causal.

`NAME-fp8` is a model whose layers' weights have 8 bits, `NAME-nvfp4` one of 4 bits with NVIDIA's scales; embeddings,
output projection and EAGLE-3 heads keep 16. Of a mixture that is published in 8 bits, or whose experts have 4-bit
integers, or whose layers have states or sparse attention, nvfp4 means its experts, as in NVIDIA's checkpoints; of
DeepSeek-V4, whose experts have MXFP4, either does.
"""

from __future__ import annotations

import tomllib
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pdvsim.sim.core import LOOKED_UP, DrafterKind
from pdvsim.sim.models.configs import FP8_BYTES, NVFP4_BYTES
from pdvsim.sim.models.configs import from_config as from_config
from pdvsim.sim.models.configs import read_config as read_config
from pdvsim.sim.models.layers import All2All
from pdvsim.sim.models.names import CHECKPOINTS, WITH_MTP, model_name, unknown
from pdvsim.sim.models.specs import OWN_PROJECTION, HeadKind, ModelSpec, Pair
from pdvsim.sim.reading import error_text

HEADS: tuple[HeadKind, ...] = ("eagle3", "p-eagle", "dflash", "dspark", "mtp")
PARD = "pard-"  # before the name of a draft model that was trained to draft in parallel
LAYERS = {"p-eagle": 4, "dflash": 5, "dspark": 5}  # of a head, where it has more than one
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of a configuration
SAME_VOCABULARY = 0.01  # vocabularies that differ by less are one, padded differently
DFLASH_SIZES = {"qwen3-32b": {"intermediate": 9728, "heads": 32}}  # that are not the target's
DRAFT_VOCABULARY = 32_000  # of an EAGLE-3 head, ...
DRAFT_VOCABULARIES = {"qwen2-7b": 16_000}  # ... but for those of these targets
# Intermediate sizes of EAGLE-3 heads that are not their target's, and the attention of those whose target has MLA
HEAD_SIZES = {"qwen3-235b-a22b": 24_576, "gpt-oss-20b": 17_280, "gpt-oss-120b": 17_280, "deepseek-v3": 40_960}
HEAD_DIM, HEAD_KV_HEADS = 128, 8
FP8, NVFP4 = "-fp8", "-nvfp4"  # what follows the name of a model whose layers have such weights, ...
PUBLISHED = {"-fp8-dynamic": FP8, FP8: FP8, NVFP4: NVFP4}  # ... and the names of such checkpoints


def _presets(measured: bool) -> dict[str, ModelSpec]:
    """The models of `data/models.toml` that were measured, or the others."""
    groups = tomllib.loads((Path(__file__).parent / "data" / "models.toml").read_text(encoding="utf-8"))["group"]
    return {
        name: from_config(group["config"] | dict(zip(group["columns"], sizes, strict=True)), name)
        for group in groups
        for name, sizes in group["models"].items()
        if group.get("measured", False) is measured
    }


MODELS = _presets(measured=True)
PRESETS: Mapping[str, ModelSpec] = ChainMap(_presets(measured=False), MODELS)  # read from the last on: the nine first


def _taken_apart(name: str) -> tuple[DrafterKind | None, str]:
    """The kind of head, or of draft model, that a name begins with; None: there is none. And the rest of the name."""
    kinds: tuple[DrafterKind, ...] = (*HEADS, "pard")
    kind = next((kind for kind in kinds if name.startswith(f"{kind}-")), None)
    return kind, name.removeprefix(f"{kind}-")


def model(name: str) -> ModelSpec:
    """The model that a name means; a ValueError naming the presets otherwise.

    A preset, a head of one, or the model of a config.json or of the folder that holds it, which is called by that path.
    """
    kind, base = _taken_apart(name)
    if kind is not None:
        return in_parallel(model(base)) if kind == "pard" else drafter(kind, model(base))
    if (plain := unquantised(name)) != name:
        return quantised(model(plain), bits_of(name))
    if name not in PRESETS and is_config(name):
        try:
            return from_config(read_config(Path(name)), name)
        except (OSError, ValueError) as error:
            raise ValueError(f"model {name}: {error_text(error)}") from None
    taken = model_name(name, PRESETS)
    if taken not in PRESETS:
        raise unknown("model", name, PRESETS, "a config.json of Hugging Face's (nothing is fetched)")
    return PRESETS[taken]


def in_parallel(spec: ModelSpec) -> ModelSpec:
    """A draft model as one that drafts in parallel; its forwards are the same, and so is its name."""
    return replace(spec, parallel=True)


def unquantised(name: str) -> str:
    """Return the name of a model without its quantisation; a folder of that name is meant as it is.

    Quantised checkpoints often have another owner, which is left out.
    """
    suffix = next((end for end in PUBLISHED if name.lower().endswith(end)), "")
    if not suffix or is_config(name):
        return name
    plain = name[: -len(suffix)]
    return plain if is_config(plain) else plain.rpartition("/")[2]


def bits_of(name: str) -> str:
    """Return the suffix of a quantised model's preset name; an empty one for other models."""
    return next((kind for end, kind in PUBLISHED.items() if name.lower().endswith(end)), "")


def quantised(spec: ModelSpec, bits: str = FP8) -> ModelSpec:
    """The model with fewer bits in its layers' weights; a ValueError if they have so few already."""
    name, item = f"{spec.name}{bits}", FP8_BYTES if bits == FP8 else NVFP4_BYTES
    own = None if spec.experts is None else spec.experts.weight_bytes or spec.layer_bytes
    experts_alone = (own is not None and own > NVFP4_BYTES) or spec.state is not None or spec.sparse is not None
    if spec.experts is not None and (spec.compressed is not None or (bits == NVFP4 and experts_alone)):
        return replace(spec, name=name, experts=replace(spec.experts, weight_bytes=item))
    if spec.is_quantised:
        raise ValueError(f"{spec.name} has quantised weights as it is published: leave out {bits[1:]}")
    return replace(spec, name=name, layer_bytes=item)


def pair(name: str) -> Pair:
    """The pair written `draft:target`."""
    draft, colon, given = pair_name(name).partition(":")
    if not colon:
        raise ValueError(f"pair {name!r} must be written draft:target, e.g. tinyllama-1.1b:llama-2-7b")
    kind = drafter_kind(draft)
    if kind in ("model", "pard"):
        return Pair(model(draft), model(given))
    target = model(given)
    if kind in HEADS and draft != f"{kind}-{given}":
        raise ValueError(f"pair {name!r}: {draft} is not the head of {given}, which is {kind}-{given}")
    return Pair(drafter(kind, target), target)


def drafter(kind: DrafterKind, target: ModelSpec) -> ModelSpec:
    """Return the drafter of a target without a draft model; see the module."""
    if kind not in HEADS:
        return ModelSpec(kind, target.family, 0, 0, 0, 0, 0, 0, target.vocab)
    sparse, compressed, experts = target.sparse, target.compressed, target.experts
    shape: dict[str, Any] = {"window": None, "state": None, "layers_without_mlp": 0, "kind": kind}
    shape |= {"name": f"{kind}-{target.name}", "layers": LAYERS.get(kind, 1), "parallel": kind in LAYERS}
    if kind == "mtp":  # a layer that selects for itself, or of DeepSeek-V4 has a window alone
        own = compressed and replace(compressed, layers=1, selecting=0, whole=0)
        shape |= {"sparse": sparse and replace(sparse, layers=1, scans=1), "compressed": own}
        return replace(target, **shape, experts=experts and replace(experts, dense_layers=0))
    whole = unquantised(target.name)
    shape |= dict.fromkeys(("sparse", "compressed", "experts", "latent", "layer_bytes", "value_dim"))
    shape |= {"output_gate": False, "shared_keys": False, "gated": True}
    shape["intermediate"] = HEAD_SIZES.get(whole, target.intermediate)
    if kind in OWN_PROJECTION:
        shape["vocab"] = min(DRAFT_VOCABULARIES.get(whole, DRAFT_VOCABULARY), target.vocab)
    if kind == "dflash":
        shape |= DFLASH_SIZES.get(whole, {})
    if target.latent is not None or compressed is not None:
        shape |= {"heads": target.hidden // HEAD_DIM, "kv_heads": HEAD_KV_HEADS, "head_dim": HEAD_DIM}
    return replace(target, **shape)


def with_vocabulary(head: ModelSpec, tokens: int | None) -> ModelSpec:
    """A head with that many draft tokens; None, and models that draft from their target's tokens: as they are."""
    if tokens in (None, head.vocab) or head.kind not in OWN_PROJECTION:
        return head
    return replace(head, name=f"{head.name}/vocab{tokens}", vocab=tokens)


@cache
def drafter_kind(pair: str) -> DrafterKind:
    """The kind of drafter of a pair written draft:target."""
    draft, _, _ = pair.partition(":")
    unmodelled: tuple[DrafterKind, ...] = (*LOOKED_UP, "none")
    return next((kind for kind in unmodelled if draft == kind), _taken_apart(draft)[0] or "model")


def same_vocabulary(a: ModelSpec, b: ModelSpec) -> bool:
    """Return whether two models may have the same tokens, by their number."""
    return abs(a.vocab - b.vocab) <= SAME_VOCABULARY * b.vocab


def natural_draft(target: ModelSpec) -> str | None:
    """The smallest preset that may draft for a model: of its family and tokens, and at most a third of its size.

    A measured one comes first. Sizes are the weights that one token takes, so that a mixture of experts counts by how
    fast it is.
    """

    def size(spec: ModelSpec) -> int:
        return spec.params - spec.layer_params + spec.active_params

    able = [
        draft
        for draft in PRESETS.values()
        if draft.family == target.family and same_vocabulary(draft, target) and 3 * size(draft) <= size(target)
        if draft.state is None and draft.compressed is None  # engines draft with plain models
    ]
    return min(able, key=lambda draft: (draft.name not in MODELS, size(draft))).name if able else None


def can_load(kind: DrafterKind, target: str) -> bool:
    """Whether an engine can load such a drafter: a published head, or the MTP layers of the target's own checkpoint."""
    own = _own_name(unquantised(target))
    if kind in LAYERS or kind == "eagle3":
        return f"{kind}-{own}" in CHECKPOINTS
    if kind == "pard":
        return f"{PARD}{natural_draft(model(target))}" in CHECKPOINTS
    if kind == "mtp":
        if own in WITH_MTP or not is_config(own):
            return own in WITH_MTP
        config = read_config(Path(own))
        text = config.get("text_config")
        return any(part.get(key) for part in (config, text if isinstance(text, dict) else {}) for key in MTP_LAYERS)
    return kind != "model" or natural_draft(model(target)) is not None


def drafted_by(kind: DrafterKind | None, pair: str) -> str:
    """The pair with that drafter for its target, which may stand alone; None: as it is.

    For a target alone None is its natural draft model, else its own MTP layers, else an EAGLE-3 head.
    """
    draft, colon, target = pair.partition(":")
    if kind == "pard":
        return f"{PARD}{drafted_by('model', pair.removeprefix(PARD))}"
    if not colon and kind in (None, "model") and drafter_kind(pair) == "model":
        natural = natural_draft(model(pair))
        if natural is None and kind == "model":
            raise ValueError(f"--drafter model: no preset drafts for {pair}; write --pair draft:target")
        head = "mtp" if natural is None and can_load("mtp", pair) else "eagle3"
        return f"{natural or f'{head}-{pair}'}:{pair}"
    if kind == "model" and drafter_kind(pair) != "model":
        raise ValueError(f"--drafter model needs a draft model: write --pair draft:target, got {pair}")
    if kind is None or kind == "model":
        return pair
    target = target or draft
    return f"{kind}-{target}:{target}" if kind in HEADS else f"{kind}:{target}"


def with_fp8_target(pair: str) -> str:
    """The pair with 8-bit weights in its target's layers."""
    draft, _, target = pair.partition(":")
    if unquantised(target) != target:
        return pair
    kind = drafter_kind(draft)
    return f"{kind}-{target}{FP8}:{target}{FP8}" if kind in HEADS else f"{draft}:{target}{FP8}"


def is_config(name: str) -> bool:
    """Return whether a name is that of a file or folder, not of a preset."""
    return name.endswith(".json") or (bool(name) and "\0" not in name and Path(name).is_dir())


def pair_name(name: str) -> str:
    """A pair with presets by their own names; files, and what is unknown, as they were given."""
    parts = str(name).split(":", 1)  # what a file of runs says may be no text
    return ":".join(map(_own_name, parts))


def _own_name(name: str) -> str:
    kind, base = _taken_apart(name)
    if kind is not None:
        return f"{kind}-{_own_name(base)}"
    if (whole := unquantised(name)) != name:
        return f"{_own_name(whole)}{bits_of(name)}"
    plain = name in PRESETS or name in (*LOOKED_UP, "none") or is_config(name)
    return name if plain else model_name(name, PRESETS)


class CannotShard(ValueError):
    """A model whose sizes are no multiple of the number of GPUs."""


def shard(
    spec: ModelSpec, gpus: int, ranks: int = 1, spread: bool = False, all2all: All2All | None = None,
    copies: int = 0, balanced: bool = False,
) -> ModelSpec:  # fmt: skip
    """Return the shard of a model on one of `gpus`: its share of heads, MLP, every expert and vocabulary.

    Fewer KV heads than GPUs are on several, routers, indexers and the compressed KV cache of MLA on all. With
    data-parallel `ranks`, each of `gpus` GPUs, experts are divided over the GPUs of all of them: a share of each or,
    `spread`, whole ones, with `copies` of some and `balanced` if EPLB places them. A ValueError where vLLM would not
    divide it.
    """
    if spec.on_host or (gpus == 1 and (spec.experts is None or ranks == 1)):
        return spec

    def part(what: str, size: int, parts: int = gpus) -> int:
        if size % parts:
            raise CannotShard(f"{spec.name} cannot be sharded over {parts} GPUs: its {what}, {size}, is no multiple")
        return size // parts

    def kv_part(kv_heads: int) -> int:
        if spec.latent is None and max(kv_heads, gpus) % min(kv_heads, gpus):
            raise CannotShard(f"{spec.name} cannot be sharded over {gpus} GPUs: it has {kv_heads} KV heads")
        return max(1, kv_heads // gpus)

    divided: dict[str, Any] = {"shards": gpus, "heads": part("heads", spec.heads), "vocab": -(-spec.vocab // gpus)}
    if (state := spec.state) is not None:
        value_heads = part("value heads of its states", state.value_heads)
        divided["state"] = replace(state, key_heads=max(1, state.key_heads // gpus), value_heads=value_heads)
    if (compressed := spec.compressed) is not None:
        divided["compressed"] = replace(compressed, output_groups=part("groups of heads", compressed.output_groups))
    divided["intermediate"] = spec.intermediate // gpus
    if spec.experts is None or spec.experts.dense_layers:
        part("intermediate size", spec.intermediate)
    name = f"{spec.name}/tp{gpus}" if gpus > 1 else spec.name
    if (experts := spec.experts) is not None:
        experts = replace(experts, shared=part("shared experts", experts.shared), all2all=all2all or experts.all2all)
        if spread:
            part("number of experts" + (" with copies" if copies else ""), experts.count + copies, gpus * ranks)
            experts = replace(experts, ranks=gpus * ranks, copies=copies, balanced=balanced)
        else:
            inner = part("experts' intermediate size", experts.intermediate, gpus * ranks)
            experts = replace(experts, intermediate=inner)
        divided |= {"experts": experts, "data_ranks": ranks}
        name += (f"/dp{ranks}" if ranks > 1 else "") + ("/ep" if spread else "")
    divided["kv_heads"] = kv_part(spec.kv_heads)
    if (window := spec.window) is not None and window.kv_heads:
        divided["window"] = replace(window, kv_heads=kv_part(window.kv_heads))
    return replace(spec, name=name, **divided)


def model_or_shard(name: str) -> ModelSpec:
    """A preset, or one shard of it, as llama-3.1-70b/tp4: what is measured on one GPU."""
    whole, slash, size = name.rpartition("/tp")
    return shard(model(whole), int(size)) if slash and size.isdecimal() and int(size) else model(name)
