"""Names that people type, as the presets they mean: cards as drivers and shops call them, models by Hugging Face id.

A table (`data/names.toml`), and nothing is fetched.
"""

from __future__ import annotations

import difflib
import tomllib
import warnings
from collections.abc import Iterable
from pathlib import Path

_NAMES = tomllib.loads((Path(__file__).parent / "data" / "names.toml").read_text(encoding="utf-8"))
CARDS: dict[str, list[str]] = _NAMES["cards"]
MODELS: dict[str, list[str]] = _NAMES["models"]
UNSUPPORTED: dict[str, str] = _NAMES["unsupported"]
CHECKPOINTS: dict[str, str] = {name: ids[0] for name, ids in MODELS.items()} | _NAMES["heads"]  # what engines load
WITH_MTP: tuple[str, ...] = tuple(_NAMES["mtp"]["targets"])
NEAREST = 3  # names that are proposed for one that is not known, where there are too many to list
LISTED = 20  # names that an error lists at most


class Note(UserWarning):
    """What was taken for what a user gave; no reason to doubt it."""


class Doubt(Note):
    """An experiment that looks wrong."""


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


_CARD_OF = {other: card for card, others in CARDS.items() for other in others}
_MODEL_OF = {_plain(n): model for model, ids in MODELS.items() for id in ids for n in (id, id.rpartition("/")[2])}


def card_name(name: str, known: Iterable[str]) -> str:
    """Return the card of `known` that a name means, with a note; the name itself where it means none."""
    plain = _plain(name).removeprefix("nvidia-").removeprefix("geforce-")
    return _noted(name, plain if plain in known else _CARD_OF.get(plain, name))


def model_name(name: str, known: Iterable[str]) -> str:
    """Return the model of `known` that a name means, without an unknown owner: copies keep the name."""
    plain = _plain(name)
    base = plain.rpartition("/")[2]
    return _noted(name, next((n for n in (plain, base) if n in known), _MODEL_OF.get(plain, _MODEL_OF.get(base, name))))


def _noted(given: str, taken: str) -> str:
    """Return `taken`, with a note unless only the spelling differs."""
    if taken not in (given, _plain(given)):
        warnings.warn(f"{given} is read as {taken}", Note, stacklevel=2)
    return taken


def unknown(what: str, name: str, known: Iterable[str], others: str) -> ValueError:
    """Return the error about an unknown name, with the most similar names."""
    called = {known_name: known_name for known_name in known}
    others_of, base_name = _CARD_OF if what == "gpu" else _MODEL_OF, _plain(name).rpartition("/")[2]
    if what == "model" and (reason := next((why for n, why in UNSUPPORTED.items() if base_name.startswith(n)), "")):
        return ValueError(f"model {name} is not supported: {reason}")
    close = difflib.get_close_matches(base_name, [*called, *others_of], n=2 * NEAREST)
    few = len(called) <= LISTED
    near = list(dict.fromkeys((called | others_of)[other] for other in close))[: 1 if few else NEAREST]
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    listed = ", ".join(called) if few else "those of pdvsim profile --list"
    return ValueError(f"unknown {what} {name!r}{hint}; known: {listed}, or {others}")
