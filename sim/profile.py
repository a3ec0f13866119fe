"""A GPU's profile: everything the simulator knows of the hardware, with where it came from.

A profile is data (JSON), checked on load; an unknown key, a negative or missing figure is refused with one line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdvsim.sim.core import GpuSpec, ModelSpec
from pdvsim.sim.latency import ForwardFit
from pdvsim.sim.models import MODELS, gpu

SCHEMA = 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HostCost(_Strict):
    """Host seconds of one launch, one completion read back, one hand-over between lanes."""

    launch_s: float = Field(ge=0, allow_inf_nan=False)
    completion_s: float = Field(ge=0, allow_inf_nan=False)
    handoff_s: float = Field(ge=0, allow_inf_nan=False)


class ContentionFit(_Strict):
    """How works that run side by side slow each other beyond sharing bandwidth and compute."""

    stream_weight: float = Field(default=4.0, ge=1, allow_inf_nan=False)
    """Share of a stream against one a priority level below it."""
    efficiency: dict[str, float] = Field(default_factory=dict)
    """Capacity left to a pair of kinds that run together, by "draft+verify" in alphabetical order; 1 where absent."""
    partition_bandwidth_reach: float = Field(default=2.0, ge=1, allow_inf_nan=False)
    """A share s of the SMs can draw at most this times s of the bandwidth."""


class Profile(_Strict):
    """One GPU, the models known on it, and how well-founded the figures are."""

    schema_version: int
    name: str
    foundation: str
    gpu: GpuSpec
    models: dict[str, ForwardFit]
    host: HostCost
    contention: ContentionFit = ContentionFit()
    provenance: dict[str, Any] = Field(default_factory=dict)

    def fit(self, spec: ModelSpec) -> ForwardFit:
        """Latency coefficients of a model; a ValueError naming the known ones otherwise."""
        if spec.name not in self.models:
            raise ValueError(f"profile {self.name} does not cover {spec.name}; it has {', '.join(self.models)}")
        return self.models[spec.name]


def roofline(spec: GpuSpec) -> Profile:
    """The best the card's ceilings allow; the host's costs are assumed, of the size seen for one graph launch."""
    return Profile(
        schema_version=SCHEMA,
        name=f"{spec.name}-roofline",
        foundation="roofline, not measured",
        gpu=spec,
        models={name: ForwardFit.roofline(m, spec) for name, m in MODELS.items()},
        host=HostCost(launch_s=30e-6, completion_s=20e-6, handoff_s=5e-6),
        provenance={"ceilings": spec.source, "host": "assumed", "contention": "ideal sharing, assumed"},
    )


def load(path: str | Path) -> Profile:
    """The profile in a JSON file; a ValueError of one line naming the file and field if it is not one."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"profile {path}: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ValueError(f"profile {path}: expected a JSON object")
    version = data.get("schema_version")
    if version != SCHEMA:
        raise ValueError(f"profile {path}: schema_version is {version!r}, this version reads {SCHEMA}")
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"profile {path}: {field}: {first['msg']}") from None
    for name, fit in profile.models.items():
        for field in ForwardFit.__slots__:
            value = getattr(fit, field)
            if isinstance(value, float) and not value >= 0:
                raise ValueError(f"profile {path}: models.{name}.{field}: must be at least 0, got {value}")
    return profile


def builtin(gpu_name: str) -> Profile:
    """The best-founded profile shipped for a card."""
    return roofline(gpu(gpu_name))
