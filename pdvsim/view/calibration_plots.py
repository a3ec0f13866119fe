"""Plots of predicted against measured: forwards alone, co-running slowdowns, whole serving runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.calibration.validate.served import FAMILIES
from pdvsim.view.charts import Chart, Curve
from pdvsim.view.comparison import LATENCIES
from pdvsim.view.figure import chart_figure, in_rows
from pdvsim.view.setting import values_text
from pdvsim.view.style import KIND_COLOURS, arch_colour, arch_rank, name_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from pdvsim.calibration.fit.corun import Corun
    from pdvsim.calibration.fit.forward import Solo

BAND = 0.1
MARKS = {"mean": "o", "median": "s", "p90": "v", "p95": "^", "p99": "D"}


def solo_figure(solos: Mapping[str, Solo], foundation: str) -> Figure:
    """Held-out error of every point over its predicted time: one panel per model, one colour per kind of launch."""
    note = f"Forward latency alone, points held out of the fit (5-fold); {foundation}. Grey: within 6%."
    charts = []
    for model, solo in solos.items():
        kinds, ms = solo.frame["kind"], solo.frame["held_out"].to_numpy(float) * 1e3
        marks = [_marks(kind, KIND_COLOURS[kind], ms[kinds == kind], solo.errors[kinds == kind] * 100)
                 for kind in dict.fromkeys(kinds)]  # fmt: skip
        ends = [ms.min(), ms.max()]
        grey = Curve("", GREY, ends, [0, 0], half=[6, 6])
        charts.append(Chart(model, "Error (%)", "Predicted time (ms)", [grey, *marks], log_x=True, free=True))
    return chart_figure(in_rows(charts, 3), note, inches=(5.2, 3.2))


def corun_figure(corun: Corun, foundation: str) -> Figure:
    """Predicted over measured slowdown of co-running launches, pairs and triples, held out by shape."""
    note = f"Co-running time over time alone, shapes held out of the fit (5-fold); {foundation}. Grey: within 10%."
    charts = []
    for title, works in (("Pairs", 2), ("Triples", 3)):
        mine = corun.frame[corun.frame["works"] == works]
        marks = []
        for (kind, ordered), rows in mine.groupby(["kind", "ordered"], sort=False):
            name = f"{kind}, {'by priority' if ordered else 'equal streams'}"
            mark = "^" if ordered else "o"
            marks.append(_marks(name, KIND_COLOURS[str(kind)], rows["measured"], rows["by_shape"], marker=mark))
        charts.append(_diagonal(title, marks, "Measured slowdown", "Predicted slowdown"))
    return chart_figure([charts], note, inches=(5.2, 5.5))


def validation_figure(document: Mapping[str, Any]) -> Figure:
    """Predicted against measured metrics of all runs: one panel per family, one colour per architecture."""
    runs = document["runs"]
    errors, pairs = document["by"]["all"]["all"], values_text([run["pair"] for run in runs], "pairs")
    note = (
        f"{pairs}: {len(runs)} real runs, simulated with the profile {document['foundation']}: median error "
        f"{errors['median']:.1%}, 95th percentile {errors['p95']:.1%}. Grey: within 10%. "
        f"Of the requests: {', '.join(f'{name} {SHAPES[mark]}' for name, mark in MARKS.items())}."
    )
    charts = []
    for family in ("output_throughput", *FAMILIES):
        short, unit, _ = name_of(family if family == "output_throughput" else f"mean_{family}_ms")
        title = LATENCIES[family][1].partition(" (")[0] if family in LATENCIES else short
        marks = []
        for which, mark in ({"": "o"} if family == "output_throughput" else MARKS).items():
            metric = f"{which}_{family}_ms" if which else family
            for arch in sorted({run["arch"] for run in runs}, key=arch_rank):
                at = [(r["measured"][metric], r["predicted"][metric]) for r in runs
                      if r["arch"] == arch and metric in r["errors"]]  # fmt: skip
                x, y = [a for a, _ in at], [b for _, b in at]
                marks += [_marks(arch, arch_colour(arch), x, y, marker=mark)] if at else []
        charts.append(_diagonal(title, marks, f"Measured ({unit})", f"Predicted ({unit})"))
    return chart_figure(in_rows(charts, 3), note, inches=(5.2, 4.6))


def launches_figure(measured: pd.DataFrame, predicted: pd.DataFrame, run: Mapping[str, Any]) -> Figure:
    """One run's launches: measured over the time of each alone, over time; and by rows, with the simulated ones."""
    note = (
        f"{run['arch']}, {run['pair']}, {run['dataset']}; profile {run['foundation']}. Left: a launch as "
        "measured over the profile's time for it alone. Right: by decoding rows, measured (dots) and simulated (rings)."
    )
    over_time, by_rows = [], []
    for kind, colour in KIND_COLOURS.items():
        real, simulated = (frame[frame["kind"] == kind] for frame in (measured, predicted))
        known = real[real["solo_s"] > 0]
        ratio = (known["end_s"] - known["start_s"]) / known["solo_s"]
        over_time += [_marks(kind, colour, known["start_s"], ratio, size=3)] if len(known) else []
        for frame, hollow in ((real, False), (simulated, True)):
            rows = frame[frame["rows"] > 0]
            ms = 1e3 * (rows["end_s"] - rows["start_s"])
            by_rows += [_marks(kind, colour, rows["rows"], ms, hollow, size=6 if hollow else 3)] if len(rows) else []
    charts = [
        Chart("", "Measured over alone", "Time of the run (s)", over_time, log_y=True, levels=[1.0]),
        Chart("", "Duration (ms)", "Rows", by_rows),
    ]
    return chart_figure([charts], note, inches=(5.2, 4.6))


GREY = "#777777"
SHAPES = {"o": "●", "s": "■", "v": "▼", "^": "▲", "D": "◆"}


def _marks(name: str, colour: str, x: Any, y: Any, hollow: bool = False, size: float = 5, marker: str = "o") -> Curve:
    """Points without a line."""
    return Curve(name, colour, np.asarray(x, float), np.asarray(y, float), hollow=[hollow] * len(x), marker=marker,
                 dash="none", size=size)  # fmt: skip


def _diagonal(title: str, marks: Sequence[Curve], x: str, y: str) -> Chart:
    """Equal log axes with the line of no error and a band around it."""
    values = np.concatenate([np.concatenate([trace.x, trace.y]) for trace in marks] or [np.ones(1)])
    values = values[values > 0]
    ends = np.array([values.min() / 1.15, values.max() * 1.15])
    line = Curve("", GREY, ends, ends, half=ends * BAND)
    return Chart(title, y, x, [line, *marks], log_x=True, log_y=True, range=(ends[0], ends[1]))
