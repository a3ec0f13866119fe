"""Read and check the files of a result: a sweep's header and summary, a run's document, and their records.

Each reader returns what it read or raises a ValueError of one line that names the file and the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from pdvsim.bench.output import SCHEMA, SWEEP_SCHEMA, WORDS
from pdvsim.common.files import SEAL, digest, unbroken
from pdvsim.sim.config import Experiment
from pdvsim.sim.reading import error_text, printable, quoted, read_json, read_table
from pdvsim.sim.records import DELIVERY_DTYPES, LATER_COLUMNS, LAUNCH_DTYPES, REQUEST_DTYPES, Columns

if TYPE_CHECKING:
    import pandas as pd

DTYPES = {"requests": REQUEST_DTYPES, "launches": LAUNCH_DTYPES, "deliveries": DELIVERY_DTYPES}


class Config(BaseModel, extra="allow"):
    """The parts of an experiment's configuration that reading results needs."""

    traffic: dict[str, Any] = Field(default_factory=dict)
    acceptance: dict[str, Any] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    scoring: dict[str, Any] = Field(default_factory=dict)

    @field_validator("traffic", "acceptance", "server", "hardware", "scoring")
    @classmethod
    def _known_settings(cls, values: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Check the types of settings that this version has; ignore others."""
        adapters = _adapters(str(info.field_name))
        for name in values.keys() & adapters.keys():
            if not _is_of(adapters[name], values[name]):
                raise ValueError(f"{name} cannot be {quoted(values[name])}")
        return values


@cache
def _adapters(group: str) -> dict[str, TypeAdapter[Any]]:
    """Type checks for the settings of a group. A choice may be from another version."""
    hints = get_type_hints(get_type_hints(Experiment)[group])
    parts = {name: get_args(hint) if type(None) in get_args(hint) else (hint,) for name, hint in hints.items()}
    free = {name: [str if get_origin(part) is Literal else part for part in some] for name, some in parts.items()}
    return {name: TypeAdapter(reduce(or_, some)) for name, some in free.items()}


def _is_of(adapter: TypeAdapter[Any], value: Any) -> bool:
    """Whether a value has a setting's type; text is not a number, except "inf"."""
    try:
        typed = adapter.validate_python(value)
    except ValidationError:
        return False
    both = zip(value, typed, strict=True) if isinstance(typed, tuple) else [(value, typed)]
    return all(given == "inf" or isinstance(given, str) == isinstance(read, str) for given, read in both)


class ResultHeader(BaseModel, extra="allow"):
    """Fields of every result."""

    reads: ClassVar[int] = SCHEMA

    pdvsim_version: str
    date: str = ""
    provenance: dict[str, Any] | None = None


class SweepSettings(BaseModel, extra="allow"):
    """The sweep that was run."""

    base: Config = Field(default_factory=Config)
    vary: dict[str, Any] | None = None


class SweepHeader(ResultHeader):
    """sweep.json."""

    reads: ClassVar[int] = SWEEP_SCHEMA

    sweep: SweepSettings
    num_points: int | None = None  # requested
    keys: str = ""  # of the points' rows, in order
    save_detailed: bool = False
    made: dict[str, str] | None = None  # digests of the files made of the rows


class RunDocument(ResultHeader):
    """The JSON file of one run; the metrics are among the keys not named here."""

    arch: str
    pair: str
    seed: int
    request_rate: float | Literal["inf"]
    max_concurrency: int | None = None
    output_throughput: float
    stability: str
    profile: str = "none"
    foundation: str = "not stated"
    gpu: str = "?"
    config: Config
    records_sha256: dict[str, str] | None = None

    @property
    def load(self) -> tuple[str, float]:
        """The load as a sweep names it."""
        rate = float(self.request_rate)
        if self.config.traffic.get("use_trace_timestamps") and math.isinf(rate):
            return "trace", math.nan
        if math.isinf(rate) and self.max_concurrency is not None:
            return "concurrency", float(self.max_concurrency)
        return "request_rate", rate


H = TypeVar("H", bound=ResultHeader)


def read_header(model: type[H], path: Path, otherwise: str) -> H:
    """The JSON document in `path`; `otherwise` describes the expected file."""
    try:
        data = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: No such file: {otherwise}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not JSON, or cut short: {error_text(error)}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object: {otherwise}")
    version = data.get("schema_version", model.reads)
    if version != model.reads:
        raise ValueError(f"{path}: schema_version is {quoted(version)}, this version reads {model.reads}")
    if SEAL in data and not unbroken(data):
        raise ValueError(f"{path}: is damaged or was changed: its content does not match its {SEAL}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        raise ValueError(printable(f"{path}: {where}: {what}: {otherwise}")) from None


def read_frame(path: Path) -> pd.DataFrame:
    """The table in a parquet file, its lists as lists."""
    try:
        table: pd.DataFrame = read_table(path).to_pandas(ignore_metadata=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: No such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error_text(error)}") from None
    for name in table:
        if table[name].dtype == object:
            table[name] = [v.tolist() if isinstance(v, np.ndarray) else v for v in table[name]]
    return table


def has_records(stem: Path | str) -> bool:
    """Whether any file of the records of `stem` exists; `read_records` names the missing ones."""
    return any(Path(f"{stem}.{name}.parquet").exists() for name in DTYPES)


class Records(NamedTuple):
    """The rows of a run; lanes, kinds and roles are numbers."""

    requests: Columns
    launches: Columns
    deliveries: Columns


def read_records(stem: str, digests: Mapping[str, Any] | None = None) -> Records:
    """The records of `stem`.

    `digests` are those of the written files, by table; without them nothing is checked.
    """
    files = {name: Path(f"{stem}.{name}.parquet") for name in DTYPES}
    for name, path in files.items():
        if digests is not None and digest(path) != digests.get(name):
            raise ValueError(f"{path}: is damaged, changed or missing")
    return Records(*(_columns(path, name) for name, path in files.items()))


def _columns(path: Path, table: str) -> Columns:
    frame = read_frame(path)
    columns: Columns = {}
    for name, dtype in DTYPES[table].items():
        if name not in frame and table == "requests" and name in LATER_COLUMNS:
            columns[name] = np.full(len(frame), LATER_COLUMNS[name], dtype)
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
