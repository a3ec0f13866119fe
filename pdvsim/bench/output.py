"""Result documents and files: their names and content, and a check before a run that they can be written."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from pdvsim.bench.stats import Interval
from pdvsim.common.console import say
from pdvsim.common.files import TEMPORARY, Content, check_writable, digest, in_place, write_all
from pdvsim.common.version import __version__
from pdvsim.sim.config import Experiment
from pdvsim.sim.core import KINDS
from pdvsim.sim.records import LANES, ROLES, Array, Result, Table, parts

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DETAILS = ("requests", "launches", "deliveries")
OLD_S = 3600.0  # of a temporary file that no process can still be writing
WORDS = {"lane": LANES, "kind": KINDS, "role": ROLES}


def now() -> str:
    """The date in vLLM's format for results and file names."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def plain(value: Any, infinite: str | None = None) -> Any:
    """`value` as JSON: nan becomes null, and inf what stands for it; intervals and tuples are expanded."""
    if isinstance(value, float):
        return value if math.isfinite(value) else infinite if value == math.inf else None
    if isinstance(value, Interval):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): plain(item, infinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, infinite) for item in value]
    return plain(value.item(), infinite) if hasattr(value, "item") else value  # numpy's scalars


def dumps(document: Any) -> str:
    """One JSON document, strict and readable."""
    return json.dumps(plain(document), indent=2, allow_nan=False)


def settings(config: Any) -> dict[str, Any]:
    """A configuration as nested plain values; an infinite rate is "inf", as vLLM writes it."""
    return {key: plain(value, "inf") for key, value in asdict(config).items()}


def run_document(result: Result, metrics: dict[str, Any], date: str, label: str) -> dict[str, Any]:
    """The result of one run: vLLM's keys first, then provenance and the whole configuration."""
    experiment: Experiment = result.experiment
    traffic = experiment.traffic
    return {
        "date": date,
        "endpoint_type": "pdvsim",
        "backend": "pdvsim",
        "label": label,
        "model_id": experiment.server.pair.partition(":")[2],
        "tokenizer_id": traffic.tokenizer,
        "num_prompts": len(result.requests["id"]) if result.streamed is None else traffic.num_prompts,
        "request_rate": plain(traffic.request_rate, "inf"),
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
        "arch": experiment.arch,
        "pair": experiment.server.pair,
        "seed": traffic.seed,
        **{key: value for key, value in result.meta.items() if isinstance(value, str | int | float | None)},
        **metrics,
        "provenance": result.meta.get("provenance"),
        "bandwidths_bytes_per_s": result.meta.get("bandwidths_bytes_per_s"),
        "pdvsim_version": __version__,
        "config": settings(experiment),
    }


def parquet(frame: pd.DataFrame) -> bytes:
    """A table as a parquet file's content."""
    return bytes(frame.to_parquet(index=False))


def record_files(stem: Path | str, names: Sequence[str] = DETAILS) -> dict[str, Path]:
    """The files of the records of a run: its requests, launches and deliveries."""
    return {name: Path(f"{stem}.{name}.parquet") for name in names}


def write_records(
    files: Mapping[str, Path], result: Result, replace: bool = False, telemetry: bytes = b""
) -> dict[str, str | None]:
    """Write tables of a run as parquet, a part at a time, and what it has as content; returns the digests by name."""
    if files and result.streamed is not None:
        raise ValueError("the records of this run were not kept (--no-detailed)")
    tables: dict[str, Content] = {name: partial(_write_table, getattr(result, name)) for name in DETAILS}
    tables["telemetry"] = telemetry
    write_all({path: tables[name] for name, path in files.items()}, replace)
    return {name: digest(path) for name, path in files.items()}


def damaged_records(stem: Path | str, digests: Mapping[str, Any]) -> list[str]:
    """The names of a run's records that are missing or changed."""
    return [path.name for name, path in record_files(stem).items() if digest(path) != digests.get(name)]


def _write_table(table: Table, file: BinaryIO) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(name: str, values: Array) -> Any:
        if name not in WORDS:
            return pa.array(values)
        return pa.DictionaryArray.from_arrays(values.astype(np.int8), list(WORDS[name]))

    writer = None
    for part in parts(table):
        rows = pa.table({name: column(name, values) for name, values in part.items()})
        writer = writer or pq.ParquetWriter(file, rows.schema)
        writer.write_table(rows)
    if writer is not None:  # there is always one part
        writer.close()


def tidy(frame: pd.DataFrame) -> pd.DataFrame:
    """A table with one value per cell: a list becomes one column per position; missing values are nan."""
    frame = frame.astype({name: float for name in frame if frame[name].isna().all()})
    columns: dict[str, Any] = {}
    for name, column in frame.items():
        if column.map(lambda value: isinstance(value, list)).any():
            lists = [value if isinstance(value, list) else [] for value in column]
            for at in range(max(map(len, lists))):
                columns[f"{name}_{at}"] = [value[at] if at < len(value) else math.nan for value in lists]
        else:
            columns[str(name)] = column
    return type(frame)(columns)


def csv(frame: pd.DataFrame) -> bytes:
    """A table as a CSV file's content."""
    return tidy(frame).to_csv(index=False).encode()


def picture(figure: Figure, path: Path | str, dpi: int = 150) -> bytes:
    """A figure as the content of an image file, in the format of `path`'s suffix."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=Path(path).suffix.removeprefix(".") or "png", dpi=dpi)
    return buffer.getvalue()


def save(files: Mapping[Path, bytes | None], stopped: str = "") -> int:
    """Write the files of a result together, remove those that are None, and report it; returns the exit code.

    `stopped` describes an interrupted result. It does not replace an earlier one.
    """
    if stopped and any(path.exists() for path in files):
        files = {path.with_stem(f"{path.stem}-interrupted"): data for path, data in files.items()}
    written = [path for path, data in files.items() if data is not None]
    if stopped and not written:
        say("pdvsim", f"interrupted: {stopped}; nothing was saved")
        return 130
    write_all(files)
    if written:
        say("pdvsim", f"saved {', '.join(map(str, written))}")
    if stopped:
        say("pdvsim", f"interrupted: {stopped} saved in {written[0].parent}")
    return 130 if stopped else 0


def check_file(path: Path, overwrite: bool = True) -> Path:
    """`path` if it can be written; an OSError otherwise, a ValueError if it exists and must not be replaced.

    It may be in a new folder. Leaves no file and no folder, so that a command that fails leaves none.
    """
    missing = list(takewhile(lambda folder: not folder.exists(), path.parents))
    try:
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
        remove_temporary(Path(os.path.realpath(path)).parent, OLD_S)
        check_writable(path)
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # another process uses it
                folder.rmdir()
    if path.exists() and not overwrite and not in_place(path):
        raise ValueError(f"{path} exists already; use --overwrite to replace it")
    return path


def optional_file(name: str | None, overwrite: bool = True) -> Path | None:
    """The file of an option, checked in the same way; None if it is not given."""
    return check_file(Path(name), overwrite) if name else None


def check_folder(path: Path) -> Path:
    """`path` if it is or can become a writable folder; an OSError otherwise.

    A ValueError if it is named as one of the files that a folder gets.
    """
    if path.suffix in (".csv", ".html", ".json", ".parquet", ".png") and not (path.is_dir() or path.parent.is_file()):
        raise ValueError(f"{path} would be a folder with several files: leave out {path.suffix}")
    if path.exists() and not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    check_file(path / ".pdvsim")
    return path


def remove_temporary(folder: Path, age_s: float = 0.0) -> None:
    """Remove what killed processes left in a folder, as far as it is of that age."""
    for path in folder.glob(TEMPORARY):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime >= age_s:
                path.unlink()
