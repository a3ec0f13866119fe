"""The files of a result, checked: a sweep's header and summary, a run's document, and the records beside them.

Each reader returns what it read or raises a ValueError of one line that names the file and the field.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from pdvsim.sim.core import KINDS
from pdvsim.sim.reading import printable, quoted, read_json, read_table, said
from pdvsim.sim.records import DELIVERY_DTYPES, LANES, LAUNCH_DTYPES, REQUEST_DTYPES, Columns

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1  # of sweep.json and of a run's document; files from before it was written count as 1
WORDS = {"lane": LANES, "kind": KINDS, "role": ("draft", "target")}
# columns that files of earlier versions lack; whoever reads files does without them
LATER = (
    "drafts", "refused", "bare", "ahead_tokens", "ahead_used", "preemptions", "resumptions", "recomputed_tokens",
    "width", "context", "prompt_start",
)  # fmt: skip
DTYPES = {"requests": REQUEST_DTYPES, "launches": LAUNCH_DTYPES, "deliveries": DELIVERY_DTYPES}


class Config(BaseModel, extra="allow"):
    """An experiment's configuration, as far as reading results needs it."""

    traffic: dict[str, Any] = Field(default_factory=dict)
    acceptance: dict[str, Any] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    scoring: dict[str, Any] = Field(default_factory=dict)


class ResultHeader(BaseModel, extra="allow"):
    """What every result says of itself."""

    schema_version: int = SCHEMA
    pdvsim_version: str
    date: str = ""
    provenance: dict[str, Any] | None = None


class SweepSettings(BaseModel, extra="allow"):
    """The sweep that was run."""

    base: Config = Field(default_factory=Config)
    vary: dict[str, Any] | None = None


class Derived(BaseModel, extra="allow"):
    """What was made of a sweep's points, with its digests."""

    files: dict[str, str]


class SweepHeader(ResultHeader):
    """sweep.json."""

    sweep: SweepSettings
    num_points: int | None = None  # that were asked for
    made: Derived | None = None


class RunDocument(ResultHeader):
    """The JSON file of one run; the metrics are among the keys not named here."""

    arch: str
    pair: str
    seed: int
    request_rate: float | Literal["inf"]
    max_concurrency: int | None = None
    output_throughput: float
    stability: str
    config: Config

    @property
    def load(self) -> tuple[str, float]:
        """What a sweep would call the load."""
        if self.config.traffic.get("use_trace_timestamps"):
            return "trace", math.nan
        rate = float(self.request_rate)
        if math.isinf(rate) and self.max_concurrency is not None:
            return "concurrency", float(self.max_concurrency)
        return "request_rate", rate


H = TypeVar("H", bound=ResultHeader)


def read_header(model: type[H], path: Path, otherwise: str) -> H:
    """The JSON document in `path`; `otherwise` says what the file should have been."""
    try:
        data = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: No such file: {otherwise}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not JSON, or cut short: {said(error)}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object: {otherwise}")
    version = data.get("schema_version", SCHEMA)
    if version != SCHEMA:
        raise ValueError(f"{path}: schema_version is {quoted(version)}, this version reads {SCHEMA}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(printable(f"{path}: {where}: {first['msg']}: {otherwise}")) from None


def read_frame(path: Path) -> pd.DataFrame:
    """The table in a parquet file, its lists as lists."""
    try:
        table: pd.DataFrame = read_table(path).to_pandas(ignore_metadata=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: No such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {said(error)}") from None
    for name in table:
        if table[name].dtype == object:
            table[name] = [v.tolist() if isinstance(v, np.ndarray) else v for v in table[name]]
    return table


def read_records(stem: str) -> dict[str, Columns]:
    """Requests, launches and deliveries beside `stem`, with lanes, kinds and roles as numbers."""
    return {name: _columns(Path(f"{stem}.{name}.parquet"), name) for name in DTYPES}


def _columns(path: Path, table: str) -> Columns:
    frame = read_frame(path)
    columns: Columns = {}
    for name, dtype in DTYPES[table].items():
        if name not in frame and name in LATER:
            continue
        if name not in frame:
            raise ValueError(f"{path}: column {name} is missing")
        values = frame[name]
        if name in WORDS:
            codes = {word: code for code, word in enumerate(WORDS[name])}
            unknown = set(values) - set(codes)
            if unknown:
                raise ValueError(f"{path}: column {name}: unknown {unknown.pop()!r}; known: {', '.join(codes)}")
            values = values.astype(str).map(codes)
        try:
            columns[name] = np.asarray(values, dtype)
        except (TypeError, ValueError):
            raise ValueError(f"{path}: column {name} must hold numbers") from None
    return columns
