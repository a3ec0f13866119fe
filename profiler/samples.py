"""Measured samples as files: `samples.parquet`, one row per sample, and `header.json`, their provenance.

`Recorder` writes them while they are measured, whole at any time, and continues those that a folder has. `load` checks
them and refuses, in one line naming file and field, what no GPU can have produced.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pdvsim.common.files import write_all
from pdvsim.profiler.grid import KINDS, GridPoint, Unevenness
from pdvsim.profiler.header import HEADER, PartHeader, SamplesHeader, header_of, load_header, refusal
from pdvsim.realrun.engine.engine import LaunchShape
from pdvsim.sim.reading import error_text, parse_json, read_table

__all__ = ["HEADER", "SAMPLES", "Samples", "SamplesHeader", "load", "load_header"]

SAMPLES = "samples.parquet"
SAVE_EVERY_S = 8.0
SECTIONS = ("solo", "heat", "corun", "host", "layers")
WHATS = ("gpu", "launch_idle", "launch_busy", "poll", "outcome", "turnaround", "handoff")
LONGEST_LAUNCH_S = 60.0
FASTEST, SLOWEST = 0.4, 200.0  # a median launch, against the least the card's ceilings allow
HOST_SLOWEST_S = 0.02
TEXT, SMALL, LARGE, REAL = pa.dictionary(pa.int32(), pa.string()), pa.int16(), pa.int32(), pa.float32()
# name, type, value where it does not apply
COLUMNS: tuple[tuple[str, pa.DataType, Any], ...] = (
    # solo: one launch alone, on a cool card; heat: again and again, with readings of the card; corun:
    # co-running launches; host: what the host spends; layers: a model's without attention, over `chunk_tokens`
    ("section", TEXT, ""),
    ("model", TEXT, ""),
    ("pair", TEXT, ""),  # draft:target, of corun and host
    ("kind", TEXT, ""),
    ("what", TEXT, "gpu"),  # gpu: on the device; the others are host seconds
    ("rows", SMALL, 0),
    ("bucket_rows", SMALL, 0),  # rows after padding
    ("tokens", SMALL, 0),  # new tokens per row in the first forward
    ("steps", SMALL, 1),
    ("catch_up", pa.bool_(), False),
    ("context", LARGE, 0),  # cached tokens per row, nominal
    ("context_total", LARGE, 0),  # cached tokens over all rows before the first forward
    ("chunk_tokens", LARGE, 0),  # prompt tokens over all chunks
    ("bucket_chunk", LARGE, 0),
    ("chunk_start", LARGE, 0),
    ("chunks", SMALL, 0),
    ("emits", pa.bool_(), False),
    ("lengths", TEXT, "even"),  # how the rows' contexts lie about their mean
    ("longest", LARGE, 0),  # of the rows' contexts
    ("group", SMALL, -1),  # launches measured together, numbered within a pair
    ("member", SMALL, -1),
    ("members", SMALL, 1),  # how many ran concurrently; 1 in a corun section is a member alone on the same lane
    ("priority", SMALL, 0),  # of the stream; higher goes first
    ("repeat", SMALL, 0),
    ("seconds", REAL, None),
    ("start_s", REAL, None),  # corun: since the common start; heat: since the first launch
    ("end_s", REAL, None),
    ("sm_mhz", REAL, None),
    ("power_w", REAL, None),
)
POINT = tuple(field.name for field in fields(GridPoint))
ARROW = {name: kind for name, kind, _ in COLUMNS}
_DEFAULTS = {name: default for name, _, default in COLUMNS}
WHOLE = [name for name, kind in ARROW.items() if pa.types.is_integer(kind)]
_FLOATS = [name for name, kind in ARROW.items() if kind == REAL]
_SOMETIMES = ("start_s", "end_s", "sm_mhz", "power_w")  # empty where they do not apply


class Part:
    """The samples of one model or pair so far, and the header that says how they are measured."""

    def __init__(self, header: PartHeader, table: pa.Table | None = None) -> None:
        self.header = header
        self.now = header  # of this run; replaces that of an earlier one as soon as there is something new
        self._table = table_of([]) if table is None else table
        self._rows: list[dict[str, Any]] = []  # those that are not in the table yet

    def add(self, **values: Any) -> None:
        """Append one row; columns that are not named do not apply."""
        self._resume()
        self._rows.append({**_DEFAULTS, **values})

    def measured(self, section: str, model: str, point: GridPoint, shape: LaunchShape, **values: Any) -> None:
        """Append a launch of a point, and the shape that it was padded to."""
        pair = self.header.name if ":" in self.header.name else ""
        padded = {"bucket_rows": shape.rows, "bucket_chunk": getattr(shape, "chunk", 0)}
        self.add(section=section, model=model, pair=pair, **{**point.as_dict(), **padded, **values})

    def leave_out(self, label: str, reason: str) -> None:
        """Note what was not measured, and why."""
        self._resume()
        self.header.left_out.append({"label": label, "reason": " ".join(reason.split())[:300]})

    def _resume(self) -> None:
        if self.header is not self.now:
            original = {key: getattr(self.header, key) for key in ("date", "before", "seconds")}
            self.header = self.now = self.now.model_copy(update={**original, "resumed": self.now.date})

    def done(self, section: str, *columns: str) -> set[tuple[Any, ...]]:
        """The values that these columns have in a section."""
        rows = self.table().filter(pc.equal(self._table["section"].cast(pa.string()), section))
        return set(zip(*(rows[name].to_pylist() for name in columns), strict=True))

    def table(self) -> pa.Table:
        """All rows, as they are stored."""
        self._table, self._rows = pa.concat_tables([self._table, table_of(self._rows)]), []
        return self._table


class Recorder:
    """The samples of a folder while parts are measured; those that it had are kept, and continued."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.parts, self._saved_s = folder, dict[str, Part](), monotonic()
        if not (folder / SAMPLES).exists():
            return
        table = read_table(folder / SAMPLES)
        written = (table.schema.metadata or {}).get(b"header")  # of this very table, even if a kill left an older file
        header = load(folder).header if written is None else header_of(parse_json(written.decode()), folder / SAMPLES)
        names = {name: table[name].cast(pa.string()) for name in ("model", "pair")}
        for part in header.parts:
            alone = ":" not in part.name
            mask = pc.equal(names["pair"], "" if alone else part.name)
            mask = pc.and_(mask, pc.equal(names["model"], part.name)) if alone else mask
            own = table.filter(mask).select(list(ARROW)).replace_schema_metadata(None)
            self.parts[part.name] = Part(part, own)

    def part(self, header: PartHeader) -> Part:
        """A part to measure or to continue; a ValueError if the folder's are of other hardware or software."""
        for part in self.parts.values():
            for key, today in ground(header).items():
                if (then := ground(part.header)[key]) != today:
                    raise ValueError(f"{self.folder}: {key} was {then}, is now {today}; choose another folder")
        part = self.parts.setdefault(header.name, Part(header))
        part.now = header
        return part

    def keep(self) -> None:
        """Save, if the last time is long ago."""
        if monotonic() - self._saved_s > SAVE_EVERY_S:
            self.save()
            self._saved_s = monotonic()

    def save(self) -> None:
        """Replace the files by all rows so far."""
        tables = {name: part.table() for name, part in sorted(self.parts.items())}
        headers = [
            self.parts[name].header.model_copy(update={"samples": table.num_rows, "points": _points(table)})
            for name, table in tables.items()
        ]
        first, samples = headers[0], sum(header.samples for header in headers)
        whole = SamplesHeader(device=first.device, software=first.software, samples=samples, parts=headers)
        text = whole.model_dump_json(indent=1) + "\n"
        table = pa.concat_tables(tables.values()).replace_schema_metadata({"header": text})
        write = partial(
            pq.write_table, table, compression="zstd", compression_level=9, use_byte_stream_split=_FLOATS,
            use_dictionary=[name for name in ARROW if name not in _FLOATS],
        )  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        write_all({self.folder / SAMPLES: write, self.folder / HEADER: text.encode()})


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as they are stored; a number that does not apply is null."""
    return pa.Table.from_pylist(rows, pa.schema(ARROW.items()))


def _points(table: pa.Table) -> int:
    return len(table.select(["section", "what", "group", *POINT]).to_pandas().drop_duplicates())


def ground(header: PartHeader) -> dict[str, str | None]:
    """Return the fields that samples must share to belong together."""
    software = {f"software.{name}": header.software[name] for name in ("torch", "triton", "cuda", "pdvsim")}
    return {"device.name": header.device.name, **software}


@dataclass(frozen=True)
class Samples:
    """Measured samples: header, and one row per sample."""

    header: SamplesHeader
    frame: pd.DataFrame


def load(folder: str | Path) -> Samples:
    """The samples in a folder, checked; a ValueError of one line naming file and field otherwise."""
    header = load_header(folder)
    path = Path(folder) / SAMPLES
    try:
        table = read_table(path)
    except (OSError, ValueError) as error:
        raise refusal(path, "file", error_text(error)) from None
    types = dict(zip(table.schema.names, table.schema.types, strict=True))
    for name in ARROW | types:
        if types.get(name) != ARROW.get(name):
            wrong = f"is {types[name]}, must be {ARROW[name]}" if name in ARROW and name in types else ""
            raise refusal(path, name, wrong or ("column is missing" if name in ARROW else "unknown column"))
    frame: pd.DataFrame = table.to_pandas()
    check(path, frame, header)
    # small integers are for the file alone: products of them overflow
    return Samples(header, frame.astype(dict.fromkeys(WHOLE, np.int64)))


def check(path: Path, frame: pd.DataFrame, header: SamplesHeader) -> None:
    """Refuse rows that cannot be measurements of these models on this card."""
    if len(frame) != header.samples:
        raise refusal(path, "samples", f"has {len(frame)} rows, its header says {header.samples}")
    for name in ARROW:
        if name not in _SOMETIMES and frame[name].isna().any():
            raise refusal(path, name, f"is empty in row {int(frame[name].isna().to_numpy().argmax())}")
    allowed = {
        "section": SECTIONS, "kind": KINDS, "what": WHATS, "lengths": get_args(Unevenness),
        "model": tuple(header.specs()),
    }  # fmt: skip
    for name, known in allowed.items():
        unknown = set(frame[name]) - set(known)
        if unknown:
            raise refusal(path, name, f"unknown value {min(map(str, unknown))!r}; known: {', '.join(known)}")
    for name, low in (dict.fromkeys(WHOLE, 0) | {"steps": 1, "members": 1, "group": -1, "member": -1}).items():
        if len(frame) and frame[name].min() < low:
            raise refusal(path, name, f"is {frame[name].min()}, must be at least {low}")
    for padded, asked in (("bucket_rows", "rows"), ("bucket_chunk", "chunk_tokens")):
        if (frame[padded] < frame[asked]).any():
            raise refusal(path, padded, f"is smaller than {asked}")
    seconds = frame["seconds"].to_numpy(np.float64)
    if not np.all((seconds > 0) & (seconds <= LONGEST_LAUNCH_S)):
        wrong = seconds[~((seconds > 0) & (seconds <= LONGEST_LAUNCH_S))][0]
        raise refusal(path, "seconds", f"{wrong:g} is no duration of a launch in seconds")
    together = frame[(frame["section"] == "corun") & (frame["members"] > 1)]
    length = (together["end_s"] - together["start_s"]).to_numpy(np.float64)
    if not np.allclose(length, together["seconds"], rtol=1e-3, atol=2e-6):
        raise refusal(path, "end_s", "is not start_s + seconds")
    _check_against_card(path, frame, header)


def _check_against_card(path: Path, frame: pd.DataFrame, header: SamplesHeader) -> None:
    """Medians between what the card's ceilings allow and a large multiple: other units lie far outside."""
    bandwidth, flops = header.device.bandwidth_bytes_per_s, header.device.flops_per_s
    if bandwidth is None or flops is None:
        return
    specs = header.specs()
    on_device = frame[frame["what"] == "gpu"]
    for key, rows in on_device.groupby(["section", "members", "model", "kind"], sort=False, observed=True):
        spec = specs[str(key[2])]
        wide = rows[["rows", "tokens", "steps", "chunk_tokens"]].astype(np.float64)
        tokens = wide["rows"] * (wide["tokens"] + wide["steps"] - 1) + wide["chunk_tokens"]
        least = spec.common_bytes + (spec.experts.per_token * spec.expert_bytes if spec.experts else 0)
        streamed = wide["steps"] * least / bandwidth
        multiplied = (spec.layer_bytes or spec.dtype_bytes) * spec.active_params * tokens / flops
        ratio = float((rows["seconds"] / np.maximum(streamed, multiplied)).median())
        if not FASTEST <= ratio <= SLOWEST:
            what = f"{key[3]} of {key[2]} takes {ratio:.3g} times the minimum of this GPU; is it in seconds?"
            raise refusal(path, "seconds", what)
    for what, rows in frame[frame["what"] != "gpu"].groupby("what", sort=False, observed=True):
        median = float(rows["seconds"].median())
        if median > HOST_SLOWEST_S:
            raise refusal(path, "seconds", f"{what} takes the host {median:.3g} s; is it in seconds?")
