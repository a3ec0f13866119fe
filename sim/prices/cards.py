"""GPUs as specifications: what a card can do at most, with the source of every figure (`data/cards.toml`).

A user adds one in TOML.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdvsim.sim.limits import ranges
from pdvsim.sim.models.names import card_name, unknown
from pdvsim.sim.models.specs import GpuSpec, ModelSpec
from pdvsim.sim.reading import error_text, printable, quoted, read_toml

NO_FP8 = ("a100", "a10g")  # how the names of cards begin that multiply 8-bit floats no faster than 16-bit ones
NO_NVLINK = ("l40s", "l4", "a10g", "rtx-4090")  # cards whose data sheets have none

_REQUIRED = {"name": str, "bandwidth_bytes_per_s": float, "flops_per_s": float, "memory_bytes": float, "source": str}
_OPTIONAL = {"sms": int, "measured": bool}
LONGEST_TEXT = 1000

_SHIPPED = Path(__file__).parent / "data" / "cards.toml"
GPUS = {
    card["name"]: GpuSpec(**({"measured": False} | card))
    for card in tomllib.loads(_SHIPPED.read_text(encoding="utf-8"))["cards"]
}


def flops_of(spec: ModelSpec, card: GpuSpec) -> float:
    """Flops per second of a model's layers: twice as many of 8-bit weights, on a card that has such units."""
    return card.flops_per_s * (2 if spec.multiplies_8_bits and not card.name.startswith(NO_FP8) else 1)


def gpu(name: str) -> GpuSpec:
    """The card that `name` means, or the one in a TOML file; a ValueError naming the known ones otherwise."""
    if name.endswith(".toml"):
        return card_file(name)
    taken = card_name(name, GPUS)
    if taken not in GPUS:
        raise unknown("gpu", name, GPUS, "a card.toml of your own")
    return GPUS[taken]


def card_file(path: str | Path) -> GpuSpec:
    """The card in a TOML file; a ValueError of one line naming the file and field if it is not one."""
    try:
        data = read_toml(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"card {path}: {error_text(error)}") from None
    known: Mapping[str, type] = {**_REQUIRED, **_OPTIONAL}
    for key in data:
        if key not in known:
            raise ValueError(f"card {path}: {printable(key)}: unknown key; known: {', '.join(known)}")
    for key in _REQUIRED:
        if key not in data:
            raise ValueError(f"card {path}: {key}: is missing; a card needs {', '.join(_REQUIRED)}")
    for key, value in data.items():
        _check(path, key, value, known[key])
    if data["name"] in GPUS:
        raise ValueError(f"card {path}: name: {data['name']} is a built-in card; choose another name")
    numbers = {key: float(data[key]) for key, kind in _REQUIRED.items() if kind is float}
    return GpuSpec(
        name=data["name"], source=data["source"], measured=data.get("measured", False), sms=data.get("sms"), **numbers
    )


def _check(path: str | Path, key: str, value: Any, kind: type) -> None:
    if kind is str:
        good = isinstance(value, str) and bool(value.strip()) and value.isprintable() and len(value) <= LONGEST_TEXT
    elif kind is bool:
        good = isinstance(value, bool)
    else:
        good = not isinstance(value, bool) and isinstance(value, int if kind is int else (int, float))
    words = {
        str: f"a text of one line, at most {LONGEST_TEXT} characters",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
    }
    if not good:
        raise ValueError(f"card {path}: {key}: must be {words[kind]}, got {quoted(value)}")
    if (span := ranges(GpuSpec).get(key)) and not span.holds(value):
        raise ValueError(f"card {path}: {key}: must be {span}, got {quoted(value)}")
