"""Measured samples as files: `samples.parquet`, one row per sample, and `header.json`, their provenance.

`load` checks both and refuses, in one line naming file and field, what no GPU can have produced. Columns are described
in `parts.COLUMNS`. `merge` makes them of the parts of one or more runs, `split` makes parts of them again.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from pdvsim.common.files import write_all
from pdvsim.profiler.grid import KINDS, Unevenness
from pdvsim.profiler.header import HEADER, SamplesHeader, load_header, refusal
from pdvsim.profiler.parts import (
    ARROW,
    NUMBERS,
    POINT,
    SCHEMA,
    SECTIONS,
    WHATS,
    Part,
    ground,
    part_file,
    read,
    table_of,
)
from pdvsim.sim.reading import error_text, read_table

__all__ = ["HEADER", "SAMPLES", "Samples", "SamplesHeader", "check", "load", "load_header", "merge", "split"]

SAMPLES = "samples.parquet"
LONGEST_LAUNCH_S = 60.0
FASTEST, SLOWEST = 0.4, 200.0  # a median launch, against the least the card's ceilings allow
HOST_SLOWEST_S = 0.02
WHOLE = tuple(name for name, dtype in NUMBERS.items() if dtype[0] == "i")
_FLOATS = [name for name, dtype in NUMBERS.items() if dtype[0] == "f"]
_SOMETIMES = ("start_s", "end_s", "sm_mhz", "power_w")  # empty where they do not apply


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
    for name in ARROW:
        if name not in table.column_names:
            raise refusal(path, name, "column is missing")
    for name in table.column_names:
        if name not in ARROW:
            raise refusal(path, name, "unknown column")
    for name, kind in ARROW.items():
        if table.schema.field(name).type != kind:
            raise refusal(path, name, f"is {table.schema.field(name).type}, must be {kind}")
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


def merge(parts: Iterable[Path], folder: Path) -> Samples:
    """Write the parts as one set of samples into `folder`, and load it back."""
    contents = [(path, *read(path)) for path in sorted(parts, key=lambda p: p.name)]
    if not contents:
        raise ValueError(f"{folder}: no parts to merge")
    first = contents[0][2]
    headers = []
    for path, frame, header in contents:
        for key, value in ground(header).items():
            if value != ground(first)[key]:
                raise refusal(path, key, f"is {value}, but {ground(first)[key]} in {contents[0][0].name}")
        points = len(frame[["section", "what", "group", *POINT]].drop_duplicates())
        headers.append({**header, "samples": len(frame), "points": points})
    table = table_of(pd.concat([frame for _, frame, _ in contents]))
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    pq.write_table(
        table, buffer, compression="zstd", compression_level=19, use_byte_stream_split=_FLOATS,
        use_dictionary=[name for name in ARROW if name not in _FLOATS],
    )  # fmt: skip
    document = {
        "schema_version": SCHEMA,
        "device": first["device"],
        "software": first["software"],
        "samples": table.num_rows,
        "parts": headers,
    }
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_all({folder / SAMPLES: buffer.getvalue(), folder / HEADER: text.encode()})
    return load(folder)


def split(samples: Samples, folder: Path) -> None:
    """Write samples as parts into `folder`, so that measuring continues where they end."""
    frame = samples.frame
    for header in samples.header.parts:
        pair = header.name if ":" in header.name else ""
        here = frame["pair"] == pair
        part = Part(folder / part_file(header.name), header.model_dump())
        part.rows = frame[here if pair else here & (frame["model"] == header.name)].to_dict("records")  # type: ignore[assignment]
        part.save()
