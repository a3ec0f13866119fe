"""One run launch by launch: measured against predicted, by kind and size, and the gaps between launches.

The launches of a served run are kept in whole tenths of a microsecond: one part per run while runs are made, later all
of them in `launches.parquet` next to the runs. A launch's own prediction is the time that the present profile gives for
its rows alone; of one that carries prompts, whose shapes are not kept, what the profile of its day gave.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pdvsim.calibration.validate.served import ServedRun
from pdvsim.common.commandline import experiment_from
from pdvsim.common.files import SEAL, digest, unbroken, whole, write_whole
from pdvsim.realrun.machine import as_served
from pdvsim.sim.config import Experiment
from pdvsim.sim.core import KINDS, Role
from pdvsim.sim.metrics.launches import busy_share
from pdvsim.sim.metrics.summary import frames
from pdvsim.sim.models.presets import pair as named_pair
from pdvsim.sim.models.specs import ModelSpec
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.profile import Profile
from pdvsim.sim.reading import error_text, read_json, read_table
from pdvsim.sim.records import LANES, ROLES, Table
from pdvsim.sim.run import simulate

if TYPE_CHECKING:
    import pandas as pd

LAUNCHES = "launches.parquet"
PARTS_FOLDER = "launches"
WARM_UP_PREFIX = "warm-"  # followed by the id of the first run that a warm-up was for
TICK_S = 1e-7
SAVED_DTYPES: dict[str, str] = {
    "lane": "u1", "kind": "u1", "role": "u1", "rows": "u2", "tokens": "u2", "steps": "u1", "width": "u2",
    "context": "u4", "prompt_start": "u4",
}  # fmt: skip
TICKS = ("start", "span", "solo")
BINS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, math.inf)  # last sizes of a bin; rows, or prompt tokens


# kept ----------------------------------------------------------------------------------------------------------------


def save_part(folder: Path, id: str, launches: Table) -> None:
    """Keep a run's launches, as one part; needs numpy alone."""
    columns = {
        name: np.clip(np.asarray(launches[name], np.int64), 0, np.iinfo(dtype).max).astype(dtype)
        for name, dtype in SAVED_DTYPES.items()
    }
    start = np.asarray(launches["start_s"], np.float64)
    times = (start, launches["end_s"] - start, np.nan_to_num(launches["solo_s"]))  # not known on the CPU
    order = np.argsort(start, kind="stable")
    columns |= {name: np.rint(time_s / TICK_S).astype("u4") for name, time_s in zip(TICKS, times, strict=True)}
    (folder / PARTS_FOLDER).mkdir(parents=True, exist_ok=True)
    with whole(folder / PARTS_FOLDER / f"{id}.npz") as file:
        np.savez_compressed(file, **{name: column[order] for name, column in columns.items()})  # type: ignore[arg-type]


def gather(folder: Path) -> int:
    """Put the parts of a folder into its one table, in place of older ones of the same runs; returns how many."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = sorted((folder / PARTS_FOLDER).glob("*.npz"))
    if not parts:
        return 0
    tables = []
    for path in parts:
        try:
            with np.load(path, allow_pickle=False) as file:
                columns = {name: file[name] for name in (*SAVED_DTYPES, *TICKS)}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path}: holds no launches: {error_text(error)}") from None
        tables.append(pd.DataFrame({"run": path.stem, **columns}))
    if (folder / LAUNCHES).exists():
        older = read_table(folder / LAUNCHES).to_pandas()
        tables.insert(0, older[~older["run"].isin({path.stem for path in parts})])
    table = pa.Table.from_pandas(pd.concat(tables), preserve_index=False)
    buffer = io.BytesIO()
    encoding = dict.fromkeys((*SAVED_DTYPES, *TICKS), "BYTE_STREAM_SPLIT") | {"start": "DELTA_BINARY_PACKED"}
    pq.write_table(
        table, buffer, compression="zstd", compression_level=19, column_encoding=encoding, use_dictionary=False
    )
    write_whole(folder / LAUNCHES, buffer.getvalue())
    for path in parts:
        path.unlink()
    (folder / PARTS_FOLDER).rmdir()
    return len(parts)


def launches_of(run: ServedRun) -> pd.DataFrame:
    """The launches of a run, as records have them; a ValueError if none were kept."""
    import pandas as pd

    path = run.folder / LAUNCHES
    table = read_table(path).to_pandas() if path.exists() else pd.DataFrame({"run": []})
    rows = table[table["run"] == run.id]
    if rows.empty:
        raise ValueError(f"no launches were saved for {run.command!r}, repeat {run.repeat}")
    frame = rows[list(SAVED_DTYPES)].astype(np.int64)
    for name, words in (("lane", LANES), ("kind", KINDS), ("role", ROLES)):
        frame[name] = pd.Categorical.from_codes(frame[name], pd.Index(words))
    start, span, solo = (rows[name].astype(np.float64) * TICK_S for name in TICKS)
    return frame.assign(start_s=start, end_s=start + span, solo_s=solo).reset_index(drop=True)


def saved_run(path: Path, own_policies: bool = False) -> tuple[Experiment, pd.DataFrame, dict[str, Any]]:
    """Experiment, launches and metrics of a result that `realrun --save-detailed` wrote."""
    try:
        document = read_json(path)
        records = path.with_name(f"{path.stem}.launches.parquet")
        if SEAL in document and not (unbroken(document) and digest(records) in document["records_sha256"].values()):
            raise ValueError("it is damaged or was changed; see `pdvsim sweep --check`")
        experiment = as_served(experiment_from(document["config"], own_policies))
        frame = read_table(records).to_pandas()
        columns = [*SAVED_DTYPES, "start_s", "end_s", "solo_s"]
        return experiment, frame[columns].sort_values("start_s", ignore_index=True), document
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a result of realrun --save-detailed with its launches: {error_text(error)}"
        ) from None


# compared ------------------------------------------------------------------------------------------------------------


def priced(frame: pd.DataFrame, experiment: Experiment, profile: Profile) -> pd.DataFrame:
    """Launches with `solo_s` as the present profile has it, where their shape determines it."""
    pair = named_pair(experiment.server.pair)
    specs: dict[Role, ModelSpec] = {"draft": pair.draft, "target": pair.target}
    models = {role: CostModel(spec, profile.fit(spec)) for role, spec in specs.items() if spec.name in profile.models}
    solo = frame["solo_s"].to_numpy(np.float64).copy()
    sizes = frame[["role", "rows", "width", "steps", "context", "tokens"]].itertuples(index=False)
    for at, (role, rows, width, steps, context, tokens) in enumerate(sizes):
        catches_up = role == "draft" and role in models and width > models[role].widest
        if rows and role in models and not catches_up and tokens == rows * (width + steps - 1):
            solo[at] = models[role].price(rows, width, steps, context).seconds(context)
    return frame.assign(solo_s=solo)


def compared(measured: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, Any]:
    """Both sides by kind and size, the gaps on each lane, and the time that no lane ran."""
    import pandas as pd

    sides = {"measured": _sized(measured), "predicted": _sized(predicted)}
    total = float((measured["end_s"] - measured["start_s"]).sum())
    groups = {side: frame.groupby(["what", "low", "high"], observed=True) for side, frame in sides.items()}
    sums = {side: group[["span_s", "solo_s"]].sum().assign(n=group.size()) for side, group in groups.items()}
    both = pd.concat(sums, axis=1).fillna(0.0).sort_index()
    rows = []
    for key, one in both.iterrows():
        what, low, high = cast(tuple[str, float, float], key)
        spent, alone, count = ([float(one[side, name]) for side in sides] for name in ("span_s", "solo_s", "n"))
        row: dict[str, Any] = {"what": what, "sizes": _range(low, high)}
        for at, side in enumerate(sides):
            row[side] = int(count[at])
            row[f"{side}_ms"] = 1e3 * spent[at] / count[at] if count[at] else None
            # over the very same launches alone, by the profile
            row[f"{side}_stretch"] = spent[at] / alone[at] if alone[at] > 0 else None
        rows.append(row | {"share": (spent[1] - spent[0]) / total if total else math.nan})
    lanes = [lane for lane in LANES if (measured["lane"] == lane).any() or (predicted["lane"] == lane).any()]
    return {
        "rows": rows,
        "error": sum(row["share"] for row in rows),
        "gaps": {lane: {side: _gaps(frame[frame["lane"] == lane]) for side, frame in sides.items()} for lane in lanes},
        "idle": {
            side: 1 - busy_share({name: frame[name].to_numpy() for name in ("start_s", "end_s")})
            for side, frame in sides.items()
        },
    }


def _sized(frame: pd.DataFrame) -> pd.DataFrame:
    """Launches with what they are, their span, and the bin of their size: rows, or the tokens of prompts alone."""
    rows, tokens = frame["rows"].to_numpy(), frame["tokens"].to_numpy()
    prompts = tokens - rows * (frame["width"].to_numpy() + frame["steps"].to_numpy() - 1)
    kind: pd.Series[str] = frame["kind"].astype(str) + np.where(frame["role"] == "draft", " (draft model)", "")
    kind = kind.where(frame["kind"] != "draft", "draft")
    what: pd.Series[str] = kind + np.where((rows > 0) & (prompts > 0), " with prompts", "")
    size = np.where(rows > 0, rows, tokens)
    at = np.searchsorted(BINS, size)
    low, high = np.array([-1.0, *BINS])[at] + 1, np.array(BINS)[at]
    return frame.assign(what=what, low=low, high=high, span_s=frame["end_s"] - frame["start_s"])


def _range(low: float, high: float) -> str:
    if math.isinf(high):
        return f"{low:.0f} and more"
    return f"{high:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def _gaps(frame: pd.DataFrame) -> dict[str, float]:
    """Between launches of one lane: how many, median, 95th percentile, and their share of its time."""
    frame = frame.sort_values("start_s")
    gaps = np.maximum(frame["start_s"].to_numpy()[1:] - frame["end_s"].to_numpy()[:-1], 0.0)
    if not len(gaps):
        return {"gaps": 0, "median_us": math.nan, "p95_us": math.nan, "share": math.nan}
    lasted = float(frame["end_s"].max() - frame["start_s"].min())
    median, p95 = (float(1e6 * x) for x in np.percentile(gaps, (50, 95)))
    return {"gaps": len(gaps), "median_us": median, "p95_us": p95, "share": float(gaps.sum()) / lasted}


def simulated(experiment: Experiment, profile: Profile) -> pd.DataFrame:
    """The launches of the same experiment simulated, in the order of their start."""
    return frames(simulate(experiment, profile=profile))[1].sort_values("start_s", ignore_index=True)
