# mypy: disable-error-code="no-untyped-call"
# (torch leaves unflatten untyped.)
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


def folded(matrix: Tensor, norm: Tensor) -> Tensor:
    """matrix @ diag(norm), in the matrix's dtype and place."""
    return matrix.copy_(matrix.float() * norm)


def interleaved(gate: Tensor, up: Tensor, block: int) -> Tensor:
    """`block` rows of gate, `block` rows of up, and so on."""
    return torch.stack((gate.unflatten(0, (-1, block)), up.unflatten(0, (-1, block))), 1).flatten(0, 2)


def stored(arch: ModelArchitecture, matrix: Tensor) -> Matrix:
    """A matrix of a layer as the model keeps it: of 8 bits where it is quantised."""
    return quantised(matrix) if arch.spec.layer_bytes == 1 else matrix


def random_weights(arch: ModelArchitecture, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Normal weights of variance 1 / fan-in, drawn on `device`: activations stay finite at any depth."""
    generator = torch.Generator(device=device).manual_seed(seed)
    spec = arch.spec

    def matrix(*shape: int) -> Tensor:
        empty = torch.empty(*shape, device=device, dtype=dtype)
        return empty.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    def norm(width: int = spec.hidden) -> Tensor:
        spread = torch.randn(width, device=device, dtype=torch.float32, generator=generator)
        return 1.0 + 0.1 * spread

    def bias() -> Tensor | None:
        if not arch.qkv_bias:
            return None
        return torch.randn(arch.qkv_width, device=device, dtype=torch.float32, generator=generator).to(dtype)

    def head_norms() -> Tensor | None:
        if not arch.qk_norm:
            return None
        return 1.0 + 0.1 * torch.randn(2, spec.head_dim, device=device, dtype=torch.float32, generator=generator)

    embedding = matrix(spec.vocab, spec.hidden)
    each = (spec.experts.count,) if spec.experts else ()

    def layer() -> LayerWeights:
        layer_weights = LayerWeights(
            qkv=stored(arch, folded(matrix(arch.qkv_width, spec.qkv_inputs), norm(spec.qkv_inputs))),
            qkv_bias=bias(),
            output=stored(arch, matrix(spec.hidden, arch.q_width)),
            gate_up=stored(arch, folded(matrix(*each, 2 * arch.mlp_width, spec.hidden), norm())),
            down=stored(arch, matrix(*each, spec.hidden, arch.mlp_width)),
            qk_norm=head_norms(),
        )
        if spec.experts:
            layer_weights.router = folded(matrix(spec.experts.count, spec.hidden), norm())
        return layer_weights

    layers = [layer() for _ in range(spec.layers)]
    head = embedding.clone() if spec.tied_embeddings else matrix(spec.vocab, spec.hidden)
    weights = Weights(embedding, layers, folded(head, norm()))
    if spec.joined_inputs:
        weights.joined = folded(matrix(spec.hidden, spec.joined_inputs), norm(spec.joined_inputs))
    if spec.fused_inputs:
        weights.fused = matrix(spec.hidden, spec.fused_inputs)
    return weights


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


def load_weights(arch: ModelArchitecture, folder: Path | str, device: torch.device, dtype: torch.dtype) -> Weights:
    """The weights of the Hugging Face checkpoint in `folder`, fused and moved to `device` block by block."""
    spec = arch.spec
    hidden, wide = spec.hidden, spec.intermediate
    with ExitStack() as stack:
        checkpoint = Checkpoint(Path(folder), stack)

        def norm(name: str) -> Tensor:
            return checkpoint.get(name, (hidden,)).to(device, torch.float32) + arch.norm_offset

        def fused(*parts: Tensor, norm_name: str | None = None) -> Tensor:
            matrix = torch.cat(parts).to(device)
            if norm_name is not None:
                matrix = matrix.float() * norm(norm_name)
            return matrix.to(dtype)

        def gate_up(gate: Tensor, up: Tensor, norm_name: str) -> Tensor:
            return fused(interleaved(gate, up, arch.gate_block), norm_name=norm_name)

        def mlp(i: int, norm_name: str) -> dict[str, Any]:
            """An MLP or the experts of a block, these by the names of Mixtral's or of Qwen3's checkpoints."""
            inside, into, out = f"model.layers.{i}.mlp", (arch.mlp_width, hidden), (hidden, arch.mlp_width)
            if spec.experts is None:
                if spec.family == "phi3":  # fused in the checkpoint as well
                    gate, up = checkpoint.get(f"{inside}.gate_up_proj.weight", (2 * wide, hidden)).split(wide)
                else:
                    gate, up = (checkpoint.get(f"{inside}.{p}_proj.weight", into) for p in ("gate", "up"))
                down = fused(checkpoint.get(f"{inside}.down_proj.weight", out))
                return {"gate_up": stored(arch, gate_up(gate, up, norm_name)), "down": stored(arch, down)}
            names = ("gate_proj", "up_proj", "down_proj")
            if spec.family == "mistral":
                inside, names = f"model.layers.{i}.block_sparse_moe", ("w1", "w3", "w2")
            both, downs = [], []
            for e in range(spec.experts.count):
                gate, up, down = (
                    checkpoint.get(f"{inside}.experts.{e}.{name}.weight", shape)
                    for name, shape in zip(names, (into, into, out), strict=True)
                )
                both.append(gate_up(gate, up, norm_name))
                downs.append(fused(down))
            router = checkpoint.get(f"{inside}.gate.weight", (spec.experts.count, hidden))
            experts = {"gate_up": stored(arch, torch.stack(both)), "down": stored(arch, torch.stack(downs))}
            return {**experts, "router": fused(router, norm_name=norm_name)}

        def block(i: int) -> LayerWeights:
            attention = f"model.layers.{i}.self_attn"
            widths = {"q": arch.q_width, "k": arch.kv_width, "v": arch.kv_width}
            if spec.family == "phi3":
                qkv = [checkpoint.get(f"{attention}.qkv_proj.weight", (arch.qkv_width, hidden))]
            else:
                qkv = [checkpoint.get(f"{attention}.{p}_proj.weight", (w, hidden)) for p, w in widths.items()]
            bias = head_norms = None
            if arch.qk_norm:
                norms = [checkpoint.get(f"{attention}.{p}_norm.weight", (spec.head_dim,)) for p in ("q", "k")]
                head_norms = torch.stack(norms).to(device, torch.float32)
            if arch.qkv_bias:
                bias = fused(*(checkpoint.get(f"{attention}.{p}_proj.bias", (w,)) for p, w in widths.items()))
            return LayerWeights(
                qkv=stored(arch, fused(*qkv, norm_name=f"model.layers.{i}.input_layernorm.weight")),
                qkv_bias=bias,
                output=stored(arch, fused(checkpoint.get(f"{attention}.o_proj.weight", (hidden, arch.q_width)))),
                qk_norm=head_norms,
                **mlp(i, f"model.layers.{i}.post_attention_layernorm.weight"),
            )

        table = checkpoint.get("model.embed_tokens.weight", (spec.vocab, hidden))
        head = table if spec.tied_embeddings else checkpoint.get("lm_head.weight", (spec.vocab, hidden))
        layers = [block(i) for i in range(spec.layers)]
        return Weights(fused(table), layers, fused(head, norm_name="model.norm.weight"))
