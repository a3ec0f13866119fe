"""One real run launch by launch: measured against predicted, by kind and size, and the gaps between launches.

`python studies/launches.py RUNS.jsonl NUMBER`, or with a result of `realrun --save-detailed` and no number; with
`--plot FILE.png` also as a picture. A launch's own prediction is the time that the present profile gives for its rows
alone; of one that carries prompts, whose shapes are not kept, what the profile of its day gave.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.calibration.validate.compare import dataset
from pdvsim.calibration.validate.launches import KEPT, launches_of
from pdvsim.calibration.validate.served import read_runs
from pdvsim.common.commandline import experiment_from
from pdvsim.common.files import SEAL, digest, unbroken
from pdvsim.realrun.machine import as_served
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Experiment
from pdvsim.sim.core import ModelSpec, Role
from pdvsim.sim.hardware.latency import Latency
from pdvsim.sim.hardware.models import pair as named_pair
from pdvsim.sim.hardware.profile import Profile
from pdvsim.sim.metrics.summary import frames
from pdvsim.sim.metrics.works import busy_share
from pdvsim.sim.reading import read_json, read_table, said
from pdvsim.sim.records import LANES
from pdvsim.sim.relevance import suited
from pdvsim.sim.run import simulate
from pdvsim.study.output import picture, save
from pdvsim.view.figure import new_figure, styled
from pdvsim.view.style import KIND_COLOURS
from pdvsim.view.table import cell, grid

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

BINS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, math.inf)  # last sizes of a bin; rows, or prompt tokens
LEAST_SHARE = 0.0005  # least share of the time that gets its own line


def saved_run(path: Path) -> tuple[Experiment, pd.DataFrame]:
    """Experiment and launches of a result that `realrun --save-detailed` wrote."""
    try:
        document = read_json(path)
        beside = path.with_name(f"{path.stem}.launches.parquet")
        if SEAL in document and not (unbroken(document) and digest(beside) in document["records_sha256"].values()):
            raise ValueError("it is damaged or was changed; see `pdvsim sweep --check`")
        experiment = as_served(experiment_from(document["config"]))
        frame = read_table(beside).to_pandas()
        columns = [*KEPT, "start_s", "end_s", "solo_s"]
        return experiment, frame[columns].sort_values("start_s", ignore_index=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a result of realrun --save-detailed with its launches: {said(error)}") from None


def priced(frame: pd.DataFrame, experiment: Experiment, profile: Profile) -> pd.DataFrame:
    """Launches with `solo_s` as the present profile has it, where their shape tells it."""
    pair = named_pair(experiment.server.pair)
    specs: dict[Role, ModelSpec] = {"draft": pair.draft, "target": pair.target}
    models = {role: Latency(spec, profile.fit(spec)) for role, spec in specs.items() if spec.name in profile.models}
    solo = frame["solo_s"].to_numpy(np.float64).copy()
    sizes = frame[["role", "rows", "width", "steps", "context", "tokens"]].itertuples(index=False)
    for at, (role, rows, width, steps, context, tokens) in enumerate(sizes):
        behind = role == "draft" and role in models and width > models[role].widest
        if rows and role in models and not behind and tokens == rows * (width + steps - 1):
            shape = models[role].shape(rows, width, steps)
            solo[at] = shape.solo_0 + shape.solo_1 * context
    return frame.assign(solo_s=solo)


def compared(measured: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, Any]:
    """Both sides by kind and size, the gaps on each lane, and the time that no lane ran."""
    sides = {"measured": _sized(measured), "predicted": _sized(predicted)}
    total = float((measured["end_s"] - measured["start_s"]).sum())
    groups = {side: frame.groupby(["what", "low", "high"], observed=True) for side, frame in sides.items()}
    sums = {side: group[["span_s", "solo_s"]].sum().assign(n=group.size()) for side, group in groups.items()}
    rows = []
    for key in sorted(set(sums["measured"].index) | set(sums["predicted"].index)):
        real, told = (sums[side].loc[key] if key in sums[side].index else None for side in sides)
        spent = [0.0 if side is None else float(side["span_s"]) for side in (real, told)]
        alone = [0.0 if side is None else float(side["solo_s"]) for side in (real, told)]
        rows.append(
            {
                "what": key[0],
                "sizes": _range(key[1], key[2]),
                "measured": 0 if real is None else int(real["n"]),
                "predicted": 0 if told is None else int(told["n"]),
                "measured_ms": None if real is None else 1e3 * spent[0] / float(real["n"]),
                "predicted_ms": None if told is None else 1e3 * spent[1] / float(told["n"]),
                # over the very same launches alone, by the profile
                "measured_stretch": spent[0] / alone[0] if alone[0] > 0 else None,
                "predicted_stretch": spent[1] / alone[1] if alone[1] > 0 else None,
                "share": (spent[1] - spent[0]) / total if total else math.nan,
            }
        )
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


def _percent(value: float, sign: str = "") -> str:
    return "-" if math.isnan(value) else f"{cell(value, 1, 100, sign)}%"


def launch_tables(found: Mapping[str, Any]) -> Iterator[str]:
    """Contributions to the error by kind and size, largest first; then the gaps."""
    yield f"{found['run']}\nprofile {found['foundation']}"
    shown = [row for row in found["rows"] if abs(row["share"]) >= LEAST_SHARE]
    rows = [
        [
            row["what"],
            row["sizes"],
            str(row["measured"]),
            str(row["predicted"]),
            cell(row["measured_ms"], 3),
            cell(row["predicted_ms"], 3),
            cell(row["measured_stretch"], 3),
            cell(row["predicted_stretch"], 3),
            _percent(row["share"], "+"),
        ]
        for row in sorted(shown, key=lambda row: -abs(row["share"]))
    ]
    rows.append(["all", *[""] * 7, _percent(found["error"], "+")])
    header = ["launches", "rows or tokens", "real", "sim", "real ms", "sim ms", "real / alone", "sim / alone",
              "share of GPU time"]  # fmt: skip
    yield grid(header, rows)
    rows = []
    for lane, sides in found["gaps"].items():
        real, sim = (sides[side] for side in ("measured", "predicted"))
        figures = [f"{cell(real[key], 1)} / {cell(sim[key], 1)}" for key in ("median_us", "p95_us")]
        rows.append([lane, *figures, f"{_percent(real['share'])} / {_percent(sim['share'])}"])
    idle = " / ".join(_percent(found["idle"][side]) for side in ("measured", "predicted"))
    rows.append(["GPU idle", "-", "-", idle])
    yield grid(["gaps, real / sim", "median us", "95% us", "share of time"], rows)


def launches_figure(measured: pd.DataFrame, predicted: pd.DataFrame, run: Mapping[str, Any]) -> Figure:
    """One run's launches: measured over the time of each alone, over time; and by rows, with the simulated ones."""
    note = (
        f"{run['arch']}, {run['pair']}, {run['dataset']}; profile {run['foundation']}. Left: a launch as "
        "measured over the profile's time for it alone. Right: by decoding rows, measured (dots) and simulated (rings)."
    )
    with styled():
        figure = new_figure(13, 5.2, note)
        over_time, by_rows = figure.subplots(1, 2)
        for kind, colour in KIND_COLOURS.items():
            real, told = (frame[frame["kind"] == kind] for frame in (measured, predicted))
            known = real[real["solo_s"] > 0]
            span = known["end_s"] - known["start_s"]
            over_time.scatter(known["start_s"], span / known["solo_s"], s=7, color=colour, alpha=0.5, linewidth=0)
            for frame, ring in ((real, False), (told, True)):
                rows = frame[frame["rows"] > 0]
                by_rows.scatter(
                    rows["rows"], 1e3 * (rows["end_s"] - rows["start_s"]), s=26 if ring else 7,
                    facecolor="none" if ring else colour, edgecolor=colour if ring else "none", linewidth=0.6,
                    alpha=0.5, label=None if ring or real.empty else kind,
                )  # fmt: skip
        over_time.axhline(1.0, color="0.5", linewidth=1)
        over_time.set_yscale("log")
        over_time.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        over_time.set_xlabel("Time of the run (s)")
        over_time.set_ylabel("Measured over alone")
        by_rows.set_xlabel("Rows")
        by_rows.set_ylabel("Duration (ms)")
        handles, labels = by_rows.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, markerscale=2)
    return figure


def main(source: Path, number: int | None, plot: Path | None) -> int:
    """Compare one run with its simulation."""
    if number is None:
        (experiment, measured), name = saved_run(source), str(source)
    else:
        run = read_runs(source)[number - 1]
        experiment, measured, name = run.experiment, launches_of(run), f"run {number}: {run.command}"
    experiment = suited(replace(experiment, hardware=replace(experiment.hardware, band=False)))
    profile = covering_profile(experiment)
    measured, predicted = priced(measured, experiment, profile), simulated(experiment, profile)
    found = compared(measured, predicted) | {"run": name, "foundation": profile.foundation}
    print("\n\n".join(launch_tables(found)))
    if plot is None:
        return 0
    found |= {"dataset": dataset(experiment), "arch": experiment.arch, "pair": experiment.server.pair}
    return save({plot: picture(launches_figure(measured, predicted, found), plot)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare one real run with its simulation, launch by launch.")
    parser.add_argument("source", type=Path)
    parser.add_argument("number", type=int, nargs="?")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    sys.exit(main(args.source, args.number, args.plot))
