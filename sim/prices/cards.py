"""GPUs as specifications: what a card can do at most, with the source of every figure (`data/cards.toml`).

A user adds one in TOML.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pdvsim.sim.limits import hints_of, ranges
from pdvsim.sim.models.names import card_name, unknown
from pdvsim.sim.models.specs import GpuSpec, ModelSpec
from pdvsim.sim.reading import error_text, printable, quoted, read_toml

NO_FP8 = ("a100", "a10g")  # how the names of cards begin that multiply 8-bit floats no faster than 16-bit ones
NO_NVLINK = ("l40s", "l4", "a10g", "rtx-4090")  # cards whose data sheets have none

LONGEST_TEXT = 1000
T = TypeVar("T")

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
    where = f"card {path}: "
    try:
        data = read_toml(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}{error_text(error)}") from None
    check_figures(where, data, GpuSpec)
    card = typed(where, json.dumps({"measured": False} | data, default=str), GpuSpec)
    for key, text in (("name", card.name), ("source", card.source)):
        if not (text.strip() and text.isprintable() and len(text) <= LONGEST_TEXT):
            raise ValueError(f"{where}{key}: must be a text of one line, at most {LONGEST_TEXT} characters")
    if card.name in GPUS:
        raise ValueError(f"{where}name: {card.name} is a built-in card; choose another name")
    return card


def typed(where: str, text: str, kind: type[T]) -> T:
    """The dataclass in a JSON text; a ValueError of one line names a field that is missing or of another type."""
    from pydantic import TypeAdapter, ValidationError  # a quarter of the start-up time, and only files need it

    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{where}{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def check_figures(where: str, given: Mapping[str, Any], kind: type) -> None:
    """Refuse keys of a file that a dataclass has no fields for, and figures outside the ranges of its fields."""
    known = hints_of(kind)
    for key in given:
        if key not in known:
            raise ValueError(f"{where}{printable(key)}: unknown key; known: {', '.join(sorted(known))}")
    for name, value in sorted(given.items()):
        many = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        many = value if name.endswith("_ratios") else many  # pairs, the first of which is a number of tokens
        figures = {f"{name}.{key}": item for key, item in many} or {name: value}
        for place, figure in figures.items():
            if (span := ranges(kind).get(name)) and isinstance(figure, (int, float)) and not span.holds(figure):
                raise ValueError(f"{where}{place}: must be {span}, got {quoted(figure)}")
