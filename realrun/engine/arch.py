"""What a model computes beyond its shape: rope, norms, biases and activation, read from its Hugging Face configuration.

Covers the Llama, Mistral, Mixtral, Qwen2, Qwen3 (with experts or without), Phi-3 and Gemma families as they are. Not
covered, and refused: sliding windows, attention or MLP biases outside Qwen2's, rope over a part of a head, rope
scalings other than llama3's, shared experts, layers with and without experts in one model, quantised checkpoints,
other families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from pdvsim.sim.models.presets import from_config as spec_from_config
from pdvsim.sim.models.presets import model_or_shard, read_config
from pdvsim.sim.models.specs import ModelSpec

Activation = Literal["silu", "gelu_tanh"]

GATE_BLOCK = 32  # a tile of 64 outputs then holds 32 gates and the 32 values they act on
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma")
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's stretching of the slow rope frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """A ModelSpec and everything else that decides what its forward pass computes."""

    spec: ModelSpec
    rope_theta: float
    norm_eps: float
    activation: Activation = "silu"
    qkv_bias: bool = False
    rope_scaling: Llama3Rope | None = None
    norm_offset: float = 0.0  # gemma stores its norm weights minus one
    scale_embedding: bool = False  # gemma multiplies embeddings by sqrt(hidden)
    qk_norm: bool = False  # qwen3 norms each head of q and k before the rope

    @property
    def q_width(self) -> int:
        return self.spec.heads * self.spec.head_dim

    @property
    def kv_width(self) -> int:
        return self.spec.kv_heads * self.spec.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width

    @property
    def mlp_width(self) -> int:
        """Intermediate size of a layer's MLP, or of each of its experts."""
        return self.spec.experts.intermediate if self.spec.experts else self.spec.intermediate

    @property
    def gate_block(self) -> int:
        """Rows of gate, then as many of up, that alternate in the fused gate/up matrix."""
        return math.gcd(self.mlp_width, GATE_BLOCK)

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """The factor on embeddings, rounded to `dtype` as the reference implementation rounds it."""
        return float(torch.tensor(self.spec.hidden**0.5, dtype=dtype)) if self.scale_embedding else 1.0

    def rope_frequencies(self) -> torch.Tensor:
        """Angle per position of each rotated pair: float32, head_dim / 2 of them."""
        exponents = torch.arange(0, self.spec.head_dim, 2, dtype=torch.float32) / self.spec.head_dim
        frequencies = 1.0 / self.rope_theta**exponents
        scaling = self.rope_scaling
        if scaling is None:
            return frequencies
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_context / wavelengths
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = smooth.clamp(0.0, 1.0)
        return frequencies * smooth + frequencies / scaling.factor * (1 - smooth)


def from_config(config: Mapping[str, Any] | Path | str, name: str | None = None) -> ModelArchitecture:
    """The architecture a Hugging Face config describes: its dictionary, its config.json or the folder holding it."""
    if isinstance(config, str | Path):
        path = Path(config)
        name = name or (path if path.is_dir() else path.parent).name
        config = read_config(path)
    spec = spec_from_config(config, name or str(config.get("_name_or_path") or config.get("model_type")))
    _refuse_unsupported(config, spec)
    return _computed(spec, config)


def preset(name: str) -> ModelArchitecture:
    """The architecture of a preset, of its shard or of a head of one.

    Its weights are random, so its rope is the default one: no angle changes how long a forward takes.
    """
    spec = model_or_shard(name)
    refuse(spec)
    arch = _computed(spec, {})
    return headed(arch, spec) if spec.is_head else arch


def _computed(spec: ModelSpec, config: Mapping[str, Any]) -> ModelArchitecture:
    """What a model of this shape computes, by its family and by what its configuration says."""
    gemma, rope = spec.family == "gemma", dict(config.get("rope_parameters") or {})
    act = str(config.get("hidden_activation") or config.get("hidden_act") or ("gelu" if gemma else "silu"))
    if act not in ACTIVATIONS or (act == "gelu" and not gemma):
        raise ValueError(f"activation {act!r} is not supported; supported: silu, gelu_pytorch_tanh")
    return ModelArchitecture(
        spec=spec,
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=ACTIVATIONS[act],
        qkv_bias=spec.family == "qwen2",
        qk_norm=spec.family == "qwen3",
        rope_scaling=_rope_scaling(config),
        norm_offset=1.0 if gemma else 0.0,
        scale_embedding=gemma,
    )


def _rope_scaling(config: Mapping[str, Any]) -> Llama3Rope | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope scaling {kind!r} is not supported; supported: default, llama3")
    return Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context=int(rope["original_max_position_embeddings"]),
    )


def refuse(spec: ModelSpec) -> None:
    """A ValueError if the engine cannot run a model of this shape."""
    experts = spec.experts
    if spec.family not in FAMILIES or spec.latent is not None:
        raise ValueError(f"the engine does not run {spec.name} of family {spec.family}; it runs {', '.join(FAMILIES)}")
    if spec.state or spec.sparse or spec.window:
        raise ValueError(f"the engine does not run {spec.name}: its layers have states, sliding or sparse attention")
    if experts is not None and (experts.shared or experts.dense_layers):
        raise ValueError(f"the engine does not run {spec.name}: all its layers must have experts, and none shared")
    if experts is not None and spec.is_head:
        raise ValueError(f"the engine does not run {spec.name}: a head with experts")
    if experts is not None and experts.count % experts.per_token:
        raise ValueError(f"{spec.name}: {experts.count} experts are no multiple of {experts.per_token} per token")


def _refuse_unsupported(config: Mapping[str, Any], spec: ModelSpec) -> None:
    refuse(spec)
    if spec.layer_bytes is not None or config.get("quantization_config"):
        raise ValueError("quantised checkpoints are not loaded; --quantization fp8 quantises 16-bit weights")
    if spec.experts is not None and not config.get("norm_topk_prob", spec.family == "mistral"):
        raise ValueError("norm_topk_prob=False is not supported: experts' shares are made to add up to one")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError("sliding-window attention is not supported")
    rope = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={part!r} is not supported: rope turns whole heads here")
    for key in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if config.get(key):
            raise ValueError(f"{key}={config[key]!r} is not supported")


def headed(target: ModelArchitecture, spec: ModelSpec) -> ModelArchitecture:
    """A head on a target: its layer turns and norms as the target's; EAGLE-3's are Llama's, without biases."""
    if spec.kind == "eagle3":
        return replace(target, spec=spec, qkv_bias=False, qk_norm=False)
    return replace(target, spec=spec)
