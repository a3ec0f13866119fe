"""Check a sweep's folder: which points are complete, damaged or of another sweep, and which files are unknown."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdvsim.common.files import digest, fingerprint, read_sealed, unbroken
from pdvsim.common.outcomes import Row
from pdvsim.common.version import __version__
from pdvsim.sim.reading import error_text, quoted, read_json
from pdvsim.study.output import DETAILS, SCHEMA

SHOWN_NAMES = 5
REPAIR = "--resume with the sweep's flags repairs it"


def part_file(folder: Path, index: int) -> Path:
    """File of a point's row."""
    return folder / "parts" / f"{index:05}.json"


def failure_file(folder: Path, index: int) -> Path:
    """File with the reason why a point failed."""
    return folder / "failed" / f"{index:05}.json"


def detail_file(folder: Path, index: int, name: str) -> Path:
    """File of a point's requests, launches or deliveries."""
    return folder / "details" / f"{index:05}.{name}.parquet"


@dataclass
class Survey:
    """Content of the folder of a sweep."""

    asked: int
    rows: dict[int, Row] = field(default_factory=dict)  # of complete points
    damaged: list[str] = field(default_factory=list)  # files that changed after they were written
    other: list[str] = field(default_factory=list)  # parts of another configuration, input or version
    strangers: list[str] = field(default_factory=list)  # files that no sweep writes
    failed: int = 0

    def notices(self) -> list[str]:
        """One line per kind of problem."""
        kinds = {
            "damaged": self.damaged,
            "from another configuration, input or version": self.other,
            "unknown files, ignored": self.strangers,
        }
        return [f"{what}: {some(names)}" for what, names in kinds.items() if names]


def some(names: Collection[str]) -> str:
    """The first few names, printable, and how many more there are."""
    shown = ", ".join("".join(c if c.isprintable() else "?" for c in name) for name in list(names)[:SHOWN_NAMES])
    return shown + (f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else "")


def survey(folder: Path, identity: str, asked: int, details: Collection[str]) -> Survey:
    """Read every part and record of the sweep `identity` with `asked` points; writes nothing."""
    state = Survey(asked)
    for name, index in _entries(folder / "parts", asked, (".json",), state.strangers).items():
        part = read_sealed(part_file(folder, index))
        if part is None or part.get("point") != index or not isinstance(part.get("row"), dict):
            state.damaged.append(f"parts/{name}")
        elif part.get("identity") != identity:
            state.other.append(f"parts/{name}")
        else:
            records = {kind: detail_file(folder, index, kind) for kind in details}
            bad = [path for kind, path in records.items() if digest(path) != part["details"].get(kind)]
            state.damaged += [f"details/{path.name}" for path in bad]
            state.rows |= {} if bad else {index: part["row"]}
    _entries(folder / "details", asked, tuple(f".{kind}.parquet" for kind in details), state.strangers)
    for index in _entries(folder / "failed", asked, (".json",), state.strangers).values():
        failure = read_sealed(failure_file(folder, index))
        state.failed += failure is not None and failure.get("identity") == identity
    return state


def _entries(folder: Path, asked: int, endings: tuple[str, ...], strangers: list[str]) -> dict[str, int]:
    """The files of points in a folder, in order, with their point numbers; other names go to `strangers`."""
    entries = {}
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        stem, dot, ending = name.partition(".")
        ours = stem.isascii() and stem.isdecimal() and int(stem) < asked and f"{int(stem):05}" == stem
        if ours and dot + ending in endings:
            entries[name] = int(stem)
        else:
            strangers.append(f"{folder.name}/{name}")
    return entries


class DamagedConfig(ValueError):
    """A sweep.json whose content was changed; the parts of its sweep may be whole."""


def read_config(path: Path) -> dict[str, Any]:
    """The sweep.json of a folder; a ValueError of one line if this version did not write it, or it is damaged."""
    file = path / "sweep.json"
    try:
        document = read_json(file)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error_text(error)})") from None
    except ValueError as error:
        raise DamagedConfig(f"{file}: {error_text(error)}; {REPAIR}") from None
    if not isinstance(document, dict):
        raise DamagedConfig(f"{file}: expected a JSON object; {REPAIR}")
    schema, version = document.get("schema_version"), document.get("pdvsim_version")
    if schema != SCHEMA:
        raise ValueError(
            f"{file}: schema_version is {quoted(schema)}, this version reads {SCHEMA}; name another folder"
        )
    if version != __version__:
        raise ValueError(f"{file}: written by pdvsim {quoted(version)}, this is {__version__}; name another folder")
    for name, kind in (("sweep", dict), ("num_points", int), ("inputs", dict), ("identity", str)):
        if not isinstance(document.get(name), kind):
            raise DamagedConfig(f"{file}: {name} is missing or damaged; {REPAIR}")
    return document


@dataclass(frozen=True)
class ResultCheck:
    """Whether a result is complete, and its problems."""

    whole: bool
    lines: list[str]


def check_sweep(folder: Path) -> ResultCheck:
    """The state of a sweep's folder; a ValueError if it is not one."""
    try:
        config = read_config(folder)
    except DamagedConfig:
        config = {}
    if not unbroken(config):
        return ResultCheck(False, [f"damaged: sweep.json; {REPAIR}"])
    state = survey(folder, config["identity"], config["num_points"], DETAILS if config["save_detailed"] else ())
    origin = config.get("made", {"of": None, "files": {}})
    damaged = [name for name, is_now in origin["files"].items() if digest(folder / name) != is_now]
    rows = [state.rows[index] for index in sorted(state.rows)]
    stale = rows and not state.damaged and origin["of"] != fingerprint({"rows": rows})
    state.damaged += damaged
    count, failed = len(state.rows), f", {state.failed} failed" if state.failed else ""
    lines = [f"{count} of {state.asked} points are complete{failed}", *state.notices()]
    missing = [f"{index:05}" for index in range(state.asked) if index not in state.rows]
    lines += [f"missing or unusable: {some(missing)}"] if missing else []
    lines += ["summary.parquet is not of these points; --resume writes it again"] if stale else []
    return ResultCheck(count == state.asked and not damaged and not stale, lines)


def check_run(path: Path) -> ResultCheck:
    """The state of a run's document and its records; a ValueError if it is not one."""
    try:
        document = read_json(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: neither a sweep's folder nor a run's JSON file") from None
    except ValueError:
        return ResultCheck(False, ["damaged: not JSON, or truncated"])
    if not isinstance(document, dict) or "pdvsim_version" not in document:
        raise ValueError(f"{path}: neither a sweep's folder nor a run's JSON file")
    if not unbroken(document) or "records_sha256" not in document:
        return ResultCheck(False, ["damaged: the document was changed"])
    records = document["records_sha256"]
    bad = [name for name, was in records.items() if digest(path.with_name(name)) != was]
    lines = [f"the document is complete, and {len(records) - len(bad)} of {len(records)} record files"]
    return ResultCheck(not bad, lines + ([f"damaged or missing: {some(bad)}"] if bad else []))
