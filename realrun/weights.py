"""A model's weights on one device: random ones of the right shape, or a local safetensors checkpoint.

Projections that read the same input are stored as one matrix: q, k, v in `qkv`; gate above up in `gate_up`. Norm
weights are float32 with gemma's offset added. Nothing is fetched, no pickle is opened, no checkpoint code runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdvsim.realrun.arch import Architecture


@dataclass(slots=True)
class LayerWeights:
    """One transformer block; matrices are (outputs, inputs)."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(slots=True)
class Weights:
    """All weights of one model; `head` is `embedding` itself where the two are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    head: Tensor


def random_weights(arch: Architecture, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Normal weights of variance 1 / fan-in, drawn on `device`: activations stay finite at any depth."""
    generator = torch.Generator(device=device).manual_seed(seed)
    spec = arch.spec

    def matrix(outputs: int, inputs: int) -> Tensor:
        empty = torch.empty(outputs, inputs, device=device, dtype=dtype)
        return empty.normal_(0.0, inputs**-0.5, generator=generator)

    def norm() -> Tensor:
        spread = torch.randn(spec.hidden, device=device, dtype=torch.float32, generator=generator)
        return 1.0 + 0.1 * spread

    def bias() -> Tensor | None:
        if not arch.qkv_bias:
            return None
        return torch.randn(arch.qkv_width, device=device, dtype=torch.float32, generator=generator).to(dtype)

    embedding = matrix(spec.vocab, spec.hidden)
    layers = [
        LayerWeights(
            input_norm=norm(),
            qkv=matrix(arch.qkv_width, spec.hidden),
            qkv_bias=bias(),
            output=matrix(spec.hidden, arch.q_width),
            mlp_norm=norm(),
            gate_up=matrix(2 * spec.intermediate, spec.hidden),
            down=matrix(spec.hidden, spec.intermediate),
        )
        for _ in range(spec.layers)
    ]
    head = embedding if spec.tied_embeddings else matrix(spec.vocab, spec.hidden)
    return Weights(embedding, layers, norm(), head)


class Checkpoint:
    """The tensors of a local checkpoint folder by name, from one safetensors file or a sharded index."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        for path in _shards(folder):
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            self._files.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor called `name`; a ValueError where it is missing or not of `shape`."""
        if name not in self._files:
            raise ValueError(f"checkpoint has no tensor {name!r}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, its config asks for {shape}")
        return tensor


def _shards(folder: Path) -> Iterator[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        yield single
    elif index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"shard {name!r} of {index} lies outside the checkpoint folder")
            yield folder / name
    else:
        raise ValueError(f"{folder} holds no model.safetensors and no model.safetensors.index.json")


def load_weights(arch: Architecture, folder: Path | str, device: torch.device, dtype: torch.dtype) -> Weights:
    """The weights of the Hugging Face checkpoint in `folder`, fused and moved to `device` block by block."""
    spec = arch.spec
    hidden, wide = spec.hidden, spec.intermediate
    with ExitStack() as stack:
        checkpoint = Checkpoint(Path(folder), stack)

        def norm(name: str) -> Tensor:
            return checkpoint.get(name, (hidden,)).to(device, torch.float32) + arch.norm_offset

        def fused(*parts: Tensor) -> Tensor:
            return torch.cat(parts).to(device, dtype)

        def block(i: int) -> LayerWeights:
            attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            widths = {"q": arch.q_width, "k": arch.kv_width, "v": arch.kv_width}
            qkv = [checkpoint.get(f"{attention}.{p}_proj.weight", (w, hidden)) for p, w in widths.items()]
            bias = None
            if arch.qkv_bias:
                bias = fused(*(checkpoint.get(f"{attention}.{p}_proj.bias", (w,)) for p, w in widths.items()))
            return LayerWeights(
                input_norm=norm(f"model.layers.{i}.input_layernorm.weight"),
                qkv=fused(*qkv),
                qkv_bias=bias,
                output=fused(checkpoint.get(f"{attention}.o_proj.weight", (hidden, arch.q_width))),
                mlp_norm=norm(f"model.layers.{i}.post_attention_layernorm.weight"),
                gate_up=fused(*(checkpoint.get(f"{mlp}.{p}_proj.weight", (wide, hidden)) for p in ("gate", "up"))),
                down=fused(checkpoint.get(f"{mlp}.down_proj.weight", (hidden, wide))),
            )

        embedding = fused(checkpoint.get("model.embed_tokens.weight", (spec.vocab, hidden)))
        tied = spec.tied_embeddings
        head = embedding if tied else fused(checkpoint.get("lm_head.weight", (spec.vocab, hidden)))
        return Weights(embedding, [block(i) for i in range(spec.layers)], norm("model.norm.weight"), head)
