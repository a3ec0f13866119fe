"""Launches of served runs, in whole tenths of a microsecond.

They are one part per run while runs are made, later all of them in `launches.parquet` next to the runs.
`studies/launches.py` compares them with simulated ones.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pdvsim.calibration.validate.served import ServedRun
from pdvsim.common.files import whole, write_whole
from pdvsim.sim.core import KINDS
from pdvsim.sim.reading import read_table, said
from pdvsim.sim.records import LANES, ROLES, Table

if TYPE_CHECKING:
    import pandas as pd

LAUNCHES = "launches.parquet"
PARTS = "launches"  # folder of the parts
WARM_UP = "warm-"  # before the id of the first run that a warm-up was for
TICK_S = 1e-7
KEPT: dict[str, str] = {  # columns of a launch and how they are kept
    "lane": "u1", "kind": "u1", "role": "u1", "rows": "u2", "tokens": "u2", "steps": "u1", "width": "u2",
    "context": "u4", "prompt_start": "u4",
}  # fmt: skip
TICKS = ("start", "span", "solo")


def save_part(folder: Path, id: str, launches: Table) -> None:
    """Keep a run's launches, as one part; needs numpy alone."""
    kept = {
        name: np.clip(np.asarray(launches[name], np.int64), 0, np.iinfo(dtype).max).astype(dtype)
        for name, dtype in KEPT.items()
    }
    start = np.asarray(launches["start_s"], np.float64)
    times = (start, launches["end_s"] - start, np.nan_to_num(launches["solo_s"]))  # not told on the CPU
    order = np.argsort(start, kind="stable")
    kept |= {name: np.rint(time_s / TICK_S).astype("u4") for name, time_s in zip(TICKS, times, strict=True)}
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    with whole(folder / PARTS / f"{id}.npz") as file:
        np.savez_compressed(file, **{name: column[order] for name, column in kept.items()})  # type: ignore[arg-type]


def gather(folder: Path) -> int:
    """Put the parts of a folder into its one table, in place of older ones of the same runs; returns how many."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = sorted((folder / PARTS).glob("*.npz"))
    if not parts:
        return 0
    tables = []
    for path in parts:
        try:
            with np.load(path, allow_pickle=False) as file:
                columns = {name: file[name] for name in (*KEPT, *TICKS)}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path}: holds no launches: {said(error)}") from None
        tables.append(pd.DataFrame({"run": path.stem, **columns}))
    if (folder / LAUNCHES).exists():
        older = read_table(folder / LAUNCHES).to_pandas()
        tables.insert(0, older[~older["run"].isin({path.stem for path in parts})])
    table = pa.Table.from_pandas(pd.concat(tables), preserve_index=False)
    buffer = io.BytesIO()
    encoding = {"start": "DELTA_BINARY_PACKED"}
    pq.write_table(
        table, buffer, compression="zstd", compression_level=19, column_encoding=encoding, use_dictionary=False
    )
    write_whole(folder / LAUNCHES, buffer.getvalue())
    for path in parts:
        path.unlink()
    (folder / PARTS).rmdir()
    return len(parts)


def launches_of(run: ServedRun) -> pd.DataFrame:
    """The launches of a run, as records have them; a ValueError if none were kept."""
    import pandas as pd

    path = run.folder / LAUNCHES
    table = read_table(path).to_pandas() if path.exists() else pd.DataFrame({"run": []})
    rows = table[table["run"] == run.id]
    if rows.empty:
        raise ValueError(f"no launches were saved for {run.command!r}, repeat {run.repeat}")
    frame = rows[list(KEPT)].astype(np.int64)
    for name, words in (("lane", LANES), ("kind", KINDS), ("role", ROLES)):
        frame[name] = pd.Categorical.from_codes(frame[name], pd.Index(words))
    start, span, solo = (rows[name].astype(np.float64) * TICK_S for name in TICKS)
    return frame.assign(start_s=start, end_s=start + span, solo_s=solo).reset_index(drop=True)
