"""Samples as files while they are measured: one part per model and one per pair, whole at any time.

A part is a parquet file with its own header, so it can be moved, resumed and merged on its own (`samples.merge`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from pdvsim.common.files import whole
from pdvsim.profiler.grid import GridPoint
from pdvsim.realrun.engine.engine import LaunchShape
from pdvsim.sim.reading import error_text, parse_json, read_table

SCHEMA = 2
SECTIONS = ("solo", "heat", "corun", "host", "layers")
WHATS = ("gpu", "launch_idle", "launch_busy", "poll", "outcome", "turnaround", "handoff")

# name, dtype, value where it does not apply
COLUMNS: tuple[tuple[str, str, Any], ...] = (
    # solo: one launch alone, on a cool card; heat: again and again, with readings of the card; corun:
    # co-running launches; host: what the host spends; layers: a model's without attention, over `chunk_tokens`
    ("section", "U8", ""),
    ("model", "U40", ""),
    ("pair", "U80", ""),  # draft:target, of corun and host
    ("kind", "U8", ""),
    ("what", "U12", "gpu"),  # gpu: on the device; the others are host seconds
    ("rows", "i2", 0),
    ("bucket_rows", "i2", 0),  # rows after padding
    ("tokens", "i2", 0),  # new tokens per row in the first forward
    ("steps", "i2", 1),
    ("catch_up", "?", False),
    ("context", "i4", 0),  # cached tokens per row, nominal
    ("context_total", "i4", 0),  # cached tokens over all rows before the first forward
    ("chunk_tokens", "i4", 0),  # prompt tokens over all chunks
    ("bucket_chunk", "i4", 0),
    ("chunk_start", "i4", 0),
    ("chunks", "i2", 0),
    ("emits", "?", False),
    ("lengths", "U8", "even"),  # how the rows' contexts lie about their mean
    ("longest", "i4", 0),  # of the rows' contexts
    ("group", "i2", -1),  # launches measured together, numbered within a pair
    ("member", "i2", -1),
    ("members", "i2", 1),  # how many ran concurrently; 1 in a corun section is a member alone on the same lane
    ("priority", "i2", 0),  # of the stream; higher goes first
    ("repeat", "i2", 0),
    ("seconds", "f4", float("nan")),
    ("start_s", "f4", float("nan")),  # corun: since the common start; heat: since the first launch
    ("end_s", "f4", float("nan")),
    ("sm_mhz", "f4", float("nan")),
    ("power_w", "f4", float("nan")),
)
POINT = (
    "kind", "rows", "tokens", "steps", "catch_up", "context", "chunk_tokens", "chunk_start", "chunks", "emits",
    "lengths",
)  # fmt: skip
TYPES = {"i2": pa.int16(), "i4": pa.int32(), "f4": pa.float32(), "?": pa.bool_()}
ARROW = {name: TYPES.get(dtype, pa.dictionary(pa.int32(), pa.string())) for name, dtype, _ in COLUMNS}
NUMBERS = {name: dtype for name, dtype, _ in COLUMNS if dtype in TYPES}
_DEFAULTS = {name: default for name, _, default in COLUMNS}


def part_file(name: str) -> str:
    """The file of a model's or pair's part."""
    return f"{name.replace('/', '-').replace(':', '--')}.parquet"


class Part:
    """Rows measured so far and the header that says how."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path, self.header = path, header
        self.rows: list[dict[str, Any]] = []

    @classmethod
    def resume(cls, path: Path, header: dict[str, Any]) -> Part:
        """The part at `path` to continue, or a new one; a ValueError if it was made on other hardware or software."""
        part = cls(path, header)
        if not path.exists():
            return part
        frame, old = read(path)
        for key, today in ground(header).items():
            if ground(old)[key] != today:
                raise ValueError(f"{path}: {key} was {ground(old)[key]}, is now {today}; choose another folder")
        part.rows = frame.to_dict("records")  # type: ignore[assignment]
        original = {key: old[key] for key in ("date", "before", "seconds")}
        part.header = {**header, **original, "resumed": header["date"]}
        return part

    def add(self, **values: Any) -> None:
        """Append one row; columns that are not named do not apply."""
        self.rows.append({**_DEFAULTS, **values})

    def measured(self, section: str, model: str, point: GridPoint, shape: LaunchShape, **values: Any) -> None:
        """Append a launch of a point, and the shape that it was padded to."""
        padded = {"bucket_rows": shape.rows, "bucket_chunk": getattr(shape, "chunk", 0)}
        self.add(section=section, model=model, **{**point.as_dict(), **padded, **values})

    def leave_out(self, label: str, reason: str) -> None:
        """Note what was not measured, and why."""
        self.header["left_out"].append({"label": label, "reason": " ".join(reason.split())[:300]})

    def done(self) -> set[tuple[Any, ...]]:
        """The points measured, by their values in the order of `POINT`."""
        return {tuple(row[name] for name in POINT) for row in self.rows if row["section"] == "solo"}

    def save(self) -> None:
        """Replace the file in one step."""
        table = table_of(pd.DataFrame(self.rows, columns=list(ARROW)))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with whole(self.path) as file:
            pq.write_table(table.replace_schema_metadata({"header": json.dumps(self.header, allow_nan=False)}), file)


def table_of(frame: pd.DataFrame) -> pa.Table:
    """Rows as they are stored; a number that does not apply is null."""
    numbers = frame.astype(NUMBERS)
    columns = {
        name: pa.array(numbers[name], kind, from_pandas=True)
        if name in NUMBERS
        else pa.array(frame[name].astype(str), pa.string()).dictionary_encode()
        for name, kind in ARROW.items()
    }
    return pa.table(columns)


def ground(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that samples must share to belong together."""
    software = {f"software.{name}": header["software"][name] for name in ("torch", "triton", "cuda", "pdvsim")}
    return {"device.name": header["device"]["name"], **software}


def read(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Rows and header of a part; a ValueError of one line where it is none."""
    try:
        table = read_table(path).select(list(ARROW))
        header = parse_json((table.schema.metadata or {})[b"header"].decode())
        frame = table.to_pandas()
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise ValueError(f"{path}: not a part of samples: {error_text(error)}") from None
    if not isinstance(header, dict) or header.get("schema_version") != SCHEMA:
        version = header.get("schema_version") if isinstance(header, dict) else None
        raise ValueError(f"{path}: schema_version is {version!r}, this version reads {SCHEMA}")
    return frame, header
