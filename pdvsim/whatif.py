"""Sliders for load, acceptance, draft length and prompt chunk in a notebook, with a table of results.

Every change runs one short simulation per architecture, with one seed. It shows trends, not significance; for a
decision use `pdvsim.advise`.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import ipywidgets as widgets
import pandas as pd

from pdvsim.cli.sweep import SweepOptions
from pdvsim.common.options import build
from pdvsim.common.outcomes import Row
from pdvsim.sim.policies import named
from pdvsim.study.sweep import run_point
from pdvsim.view.plots import sweep_png
from pdvsim.view.style import arch_colour, grew, name_of
from pdvsim.view.table import cell

START: dict[str, Any] = {
    "arch": ("colocated", "pd", "pdv"),
    "num_prompts": 60,
    "request_rate": 8.0,
    "metric_percentiles": (99.0,),
}
PLOT_DPI = 64
CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
SHOWN = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")
STEPS = {
    "acceptance_rate": "acceptance",
    "num_speculative_tokens": "draft length k",
    "max_num_batched_tokens": "prompt chunk",
}


class Explorer:
    """Sliders with a table below; a notebook shows it as the last value of a cell."""

    def __init__(self, **options: Any) -> None:
        self.options: dict[str, Any] = START | options
        self.load = "concurrency" if options.get("concurrency") else "request_rate"
        if self.load == "concurrency":
            del self.options["request_rate"]
        given = self.options[self.load]
        self.options[self.load] = first = given if isinstance(given, int | float) else next(iter(given))
        base = build(SweepOptions, self.options).sweep.base  # reports invalid options first
        common = {"continuous_update": False, "style": {"description_width": "110px"}}
        low, high = math.log2(first) - 4, math.log2(first) + 4
        self.sliders: dict[str, Any] = {
            self.load: widgets.FloatLogSlider(
                value=first, base=2, min=low, max=high, step=0.25, readout_format=".3g",
                description="requests/s" if self.load == "request_rate" else "concurrency", **common,
            ),
            "acceptance_rate": widgets.FloatSlider(
                value=base.acceptance.acceptance_rate, min=0.0, max=1.0, step=0.05,
                description=STEPS["acceptance_rate"], **common,
            ),
            "num_speculative_tokens": widgets.IntSlider(
                value=base.server.num_speculative_tokens, min=0, max=8,
                description=STEPS["num_speculative_tokens"], **common,
            ),
            "max_num_batched_tokens": widgets.SelectionSlider(
                value=base.server.max_num_batched_tokens, description=STEPS["max_num_batched_tokens"],
                options=sorted({*CHUNKS, base.server.max_num_batched_tokens}), **common,
            ),
        }  # fmt: skip
        self._shown: list[Row] = []
        self.table = widgets.HTML()
        self.widget = widgets.VBox([*self.sliders.values(), self.table])
        for slider in self.sliders.values():
            slider.observe(lambda _: self.update(), names="value")
        self.update()

    def settings(self) -> dict[str, Any]:
        """The options at the sliders' values."""
        values = {name: slider.value for name, slider in self.sliders.items()}
        if self.load == "concurrency":
            values[self.load] = max(1, round(values[self.load]))
        return self.options | values

    def rows(self) -> list[Row]:
        """A short simulation of each architecture, with the sliders' settings."""
        points = build(SweepOptions, self.settings()).sweep.points()
        return [run_point(index, point) for index, point in enumerate(points)]

    def update(self) -> None:
        """Update the table after a change; an invalid setting shows its error instead."""
        try:
            self._shown = self.rows()
            self.table.value = answer_html(self._shown, self.settings())
        except (ValueError, RuntimeError) as error:
            self.table.value = f"<p>{html.escape(str(error))}</p>"

    def _repr_mimebundle_(self, **_: Any) -> Any:
        """The sliders, and a plot of the table for notebooks without a kernel."""
        return self.widget._repr_mimebundle_() | {"image/png": base64.b64encode(self.picture()).decode()}

    def picture(self) -> bytes:
        """The table at the sliders' values, as the content of a PNG file."""
        base = build(SweepOptions, self.settings()).sweep.base
        return sweep_png(pd.DataFrame(self._shown), asdict(base), PLOT_DPI)


def answer_html(rows: list[Row], settings: Mapping[str, Any]) -> str:
    """One row per architecture; a bar in each cell compares its value with the others."""
    heads = "".join("<th>{} ({})</th>".format(*name_of(metric)[:2]) for metric in SHOWN)
    lines = []
    for row in rows:
        cells = [f"<td>{html.escape(named(row['arch']))}</td>"]
        for metric in SHOWN:
            value, most = row.get(metric), max((float(other.get(metric) or 0.0) for other in rows), default=0.0)
            share = 100 * float(value or 0.0) / most if most > 0 else 0.0
            shade = f"{arch_colour(row['arch'])}55 {share:.0f}%,transparent {share:.0f}%"
            style = f"background:linear-gradient(90deg,{shade});text-align:right;min-width:110px"
            cells.append(f'<td style="{style}">{cell(value)}</td>')
        label = html.escape(str(row["stability"]))
        cells.append(f"<td>{f'<b>{label}</b>' if grew(label) else label}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    note = f"{settings['num_prompts']} requests, one seed: it shows trends, not significance."
    foundation = html.escape(f"{rows[0]['pair']} on {rows[0]['gpu']}, {rows[0]['foundation']}")
    return f"<table><tr><th></th>{heads}<th>queue</th></tr>{''.join(lines)}</table><p>{foundation}. {note}</p>"
