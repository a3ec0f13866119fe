"""How samples came about: the card, the versions, and per model or pair when, by which command, what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pdvsim.sim.models.specs import ModelSpec
from pdvsim.sim.reading import error_text, printable, quoted, read_json

HEADER = "header.json"
SCHEMA = 2


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class Card(_Strict):
    """The device; ceilings are measured, and missing where there are none."""

    name: str
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    bandwidth_bytes_per_s: float | None = Field(None, gt=1e9, lt=1e15)
    flops_per_s: float | None = Field(None, gt=1e9, lt=1e18)


class Reading(_Strict):
    """The card while it worked."""

    sm_mhz: int
    memory_mhz: int
    power_w: float
    temperature_c: int
    throttled: list[str]


class PartHeader(_Strict):
    """One model or pair: when, by which command, and what is missing."""

    schema_version: int = SCHEMA
    name: str
    date: str
    resumed: str | None = None
    command: str
    seed: int
    budget_s: float
    quick: bool
    device: Card
    software: dict[str, str | None]
    models: dict[str, dict[str, Any]]
    dtype: Literal["bfloat16", "float32"]
    left_out: list[dict[Literal["label", "reason"], str]] = []  # points that were not measured, and why
    before: Reading | None = None
    after: Reading | None = None
    seconds: float = Field(0.0, ge=0)
    samples: int = Field(0, ge=0)
    points: int = Field(0, ge=0)


class SamplesHeader(_Strict):
    """All parts, on one card with one set of versions."""

    schema_version: int = SCHEMA
    device: Card
    software: dict[str, str | None]
    samples: int
    parts: list[PartHeader]

    def specs(self) -> dict[str, ModelSpec]:
        """The shapes of the models measured."""
        model = TypeAdapter(ModelSpec)
        given = [item for part in self.parts for item in part.models.items()]
        return {name: model.validate_json(json.dumps(spec), strict=True) for name, spec in given}


def load_header(folder: str | Path) -> SamplesHeader:
    """The header of the samples in a folder, checked."""
    path = Path(folder) / HEADER
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise refusal(path, "header", error_text(error)) from None
    return header_of(data, path)


def header_of(data: Any, path: Path) -> SamplesHeader:
    """The header in a JSON document, checked; refusals name the file."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA:
        raise refusal(path, "schema_version", f"is {quoted(version)}, this version reads {SCHEMA}")
    try:
        header = SamplesHeader.model_validate(data)
        header.specs()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise refusal(path, where or "models", first["msg"]) from None
    if not header.parts:
        raise refusal(path, "parts", "there are none")
    return header


def refusal(path: Path, field: str, reason: str) -> ValueError:
    """Return one line that names the wrong field and its file."""
    return ValueError(printable(f"samples {path}: {field}: {reason}"))
