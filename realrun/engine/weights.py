"""A model's weights on one device: random ones of the right shape, or a local safetensors checkpoint.

Projections that read the same input are stored as one matrix: q, k, v in `qkv`; gate and up in `gate_up`, alternating
in blocks of `Architecture.gate_block` rows. The weight of a norm is folded into the matrix that reads it, in float32
before rounding: one rounding where the reference implementation makes two. Nothing is fetched, no pickle is opened, no
checkpoint code runs.
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

from pdvsim.realrun.engine.arch import ModelArchitecture
from pdvsim.realrun.engine.fp8 import Matrix, quantised


@dataclass(slots=True)
class LayerWeights:
    """One transformer block; matrices are (outputs, inputs), those of experts (experts, outputs, inputs)."""

    qkv: Matrix
    qkv_bias: Tensor | None
    output: Matrix
    gate_up: Matrix
    down: Matrix
    qk_norm: Tensor | None = None  # (2, head_dim) float32: of each head of q, of k
    router: Tensor | None = None  # (experts, hidden); None: no experts


@dataclass(slots=True)
class Weights:
    """All weights of one model; a tied head is a copy, because the last norm is folded into it."""

    embedding: Tensor
    layers: list[LayerWeights]
    head: Tensor
    joined: Tensor | None = None  # of an MTP head: embedding and hidden state to one
    fused: Tensor | None = None  # of an EAGLE-3 head: three hidden states of its target to one


def interleaved(gate: Tensor, up: Tensor, block: int) -> Tensor:
    """`block` rows of gate, `block` rows of up, and so on."""
    return torch.stack((gate.unflatten(0, (-1, block)), up.unflatten(0, (-1, block))), 1).flatten(0, 2)


def stored(arch: ModelArchitecture, matrix: Tensor) -> Matrix:
    """A matrix of a layer as the model keeps it: of 8 bits where it is quantised."""
    return quantised(matrix) if arch.spec.layer_bytes == 1 else matrix


class DrawnWeights:
    """Random tensors in place of a checkpoint's, drawn on the device.

    Matrices have the variance 1 / fan-in, so that activations stay finite at any depth; norms are about one.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape; its name says whether it is a norm's."""
        if name.endswith("norm.weight"):
            return 1 + 0.1 * torch.randn(shape, device=self._device, dtype=torch.float32, generator=self._generator)
        empty = torch.empty(shape, device=self._device, dtype=self._dtype)
        return empty.normal_(0.0, shape[-1] ** -0.5 if len(shape) > 1 else 1.0, generator=self._generator)


class Checkpoint:
    """The tensors of a local checkpoint folder by name, from one safetensors file or a sharded index."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        for path in _shards(folder):
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            self._files.update(dict.fromkeys(file.keys(), file))

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


def random_weights(arch: ModelArchitecture, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Random weights of a model, or of a head."""
    return _assembled(arch, DrawnWeights(device, dtype, seed), device, dtype)


def load_weights(arch: ModelArchitecture, folder: Path | str, device: torch.device, dtype: torch.dtype) -> Weights:
    """The weights of the Hugging Face checkpoint in `folder`, moved to `device` block by block."""
    with ExitStack() as stack:
        return _assembled(arch, Checkpoint(Path(folder), stack), device, dtype)


def _assembled(
    arch: ModelArchitecture, source: Checkpoint | DrawnWeights, device: torch.device, dtype: torch.dtype
) -> Weights:
    """The tensors of a source, by their names in Hugging Face's checkpoints, fused as the engine reads them."""
    spec = arch.spec
    hidden, wide = spec.hidden, arch.mlp_width

    def fused(*parts: Tensor, norm: str | None = None) -> Tensor:
        matrix = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(device)
        if norm is not None:
            weight = source.get(f"{norm}.weight", (matrix.shape[-1],)).to(device, torch.float32)
            matrix = matrix.float() * (weight + arch.norm_offset)
        return matrix.to(dtype)

    def mlp(names: tuple[str, str, str], norm: str) -> tuple[Tensor, Tensor]:
        """Gate and up fused, and down."""
        if spec.family == "phi3":  # fused in the checkpoint as well
            gate, up = source.get(f"{names[0].replace('gate', 'gate_up')}.weight", (2 * wide, hidden)).split(wide)
        else:
            gate, up = (source.get(f"{name}.weight", (wide, hidden)) for name in names[:2])
        down = source.get(f"{names[2]}.weight", (hidden, wide))
        return fused(interleaved(gate, up, arch.gate_block), norm=norm), fused(down)

    def block(i: int) -> LayerWeights:
        attention, inside = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        before, after = f"model.layers.{i}.input_layernorm", f"model.layers.{i}.post_attention_layernorm"
        widths = {"q": arch.q_width, "k": arch.kv_width, "v": arch.kv_width}
        if spec.family == "phi3":
            widths = {"qkv": arch.qkv_width}
        qkv = [source.get(f"{attention}.{p}_proj.weight", (w, spec.qkv_inputs)) for p, w in widths.items()]
        bias = head_norms = router = None
        if arch.qk_norm:
            norms = [source.get(f"{attention}.{p}_norm.weight", (spec.head_dim,)) for p in ("q", "k")]
            head_norms = torch.stack(norms).to(device, torch.float32)
        if arch.qkv_bias:
            bias = fused(*(source.get(f"{attention}.{p}_proj.bias", (w,)) for p, w in widths.items()))
        parts = "gate_proj", "up_proj", "down_proj"
        if spec.experts is None:
            gate_up, down = mlp((f"{inside}.{parts[0]}", f"{inside}.{parts[1]}", f"{inside}.{parts[2]}"), after)
        else:
            if spec.family == "mistral":
                inside, parts = f"model.layers.{i}.block_sparse_moe", ("w1", "w3", "w2")
            folders = [f"{inside}.experts.{e}." for e in range(spec.experts.count)]
            each = [mlp((f"{f}{parts[0]}", f"{f}{parts[1]}", f"{f}{parts[2]}"), after) for f in folders]
            gate_up, down = (torch.stack(matrices) for matrices in zip(*each, strict=True))
            router = fused(source.get(f"{inside}.gate.weight", (spec.experts.count, hidden)), norm=after)
        return LayerWeights(
            qkv=stored(arch, fused(*qkv, norm=before)),
            qkv_bias=bias,
            output=stored(arch, fused(source.get(f"{attention}.o_proj.weight", (hidden, arch.q_width)))),
            gate_up=stored(arch, gate_up),
            down=stored(arch, down),
            qk_norm=head_norms,
            router=router,
        )

    table = source.get("model.embed_tokens.weight", (spec.vocab, hidden))
    head = table if spec.tied_embeddings else source.get("lm_head.weight", (spec.vocab, hidden))
    weights = Weights(fused(table), [block(i) for i in range(spec.layers)], fused(head, norm="model.norm"))
    if spec.joined_inputs:
        joined = source.get("model.joined.weight", (hidden, spec.joined_inputs))
        weights.joined = fused(joined, norm="model.joined_norm")
    if spec.fused_inputs:
        weights.fused = fused(source.get("model.fused.weight", (hidden, spec.fused_inputs)))
    return weights
