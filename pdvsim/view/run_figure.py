"""Plot of one run: latencies, requests over time, and the mean time of a request by step."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.sim.metrics.summary import STEPS, latencies_s
from pdvsim.view.figure import new_figure, styled, titled
from pdvsim.view.report.series import in_flight, waiting
from pdvsim.view.setting import seeds_text, setting_line
from pdvsim.view.style import LILAC, SLATE, STEP_COLOURS, arch_colour, number_text
from pdvsim.view.table import load_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pdvsim.sim.config import Experiment
    from pdvsim.sim.records import Result

BINS = 120
HISTOGRAM = 40
NEAR = 1.3  # service levels beyond this multiple of the longest latency are not shown
LATENCIES = ("ttft", "tpot")


def run_line(experiment: Experiment, meta: dict[str, Any]) -> str:
    """The setting of one run."""
    config = asdict(experiment)
    traffic, drafts = config["traffic"], None if experiment.speculates else "no drafts"
    rate, most = traffic["request_rate"], traffic["max_concurrency"]
    load = f"{load_text(rate)} req/s" if np.isfinite(rate) else f"concurrency {most}" if most else "all sent at time 0"
    if traffic["use_trace_timestamps"]:
        load = f"the trace at {load}" if np.isfinite(rate) else "the trace's own load"
    acceptance = None if experiment.speculates else ""
    return setting_line(
        config, load, seeds_text([traffic["seed"]]), card=meta.get("gpu"), drafts=drafts, acceptance=acceptance
    )


def run_figure(result: Result, metrics: dict[str, Any], caption: str) -> Figure:
    """Histograms of two latencies with their levels, requests over time, and the mean time of a request by step."""
    experiment = result.experiment
    latencies = latencies_s(result.requests, dict(result.deliveries), experiment.scoring.warmup_requests)
    levels = experiment.scoring.slo()
    colour = arch_colour(experiment.arch)
    with styled():
        figure = new_figure(9, 5.6, caption)
        *left, over, parts = figure.subplots(2, 2).flat
        for axes, name in zip(left, LATENCIES, strict=True):
            _histogram(axes, latencies[name] * 1e3, name, colour, levels.get(name))
        _over_time(over, result)
        _parts(parts, metrics.get("breakdown_ms", {}), experiment.speculates)
    return figure


def _histogram(axes: Axes, values_ms: Any, name: str, colour: str, level_s: float | None) -> None:
    if len(values_ms):
        spare = max(1e-6 * float(np.abs(values_ms).max()), 1e-9)  # nearly equal values would have no width for bars
        ends = (float(values_ms.min()) - spare, float(values_ms.max()) + spare)
        axes.hist(values_ms, HISTOGRAM, range=ends, color=colour, edgecolor="white", linewidth=0.4)
        middle = float(np.median(values_ms))
        axes.axvline(middle, color="0.2", linewidth=1.5)
        axes.annotate(f"median {number_text(middle)}", (middle, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
                      textcoords="offset points", va="top", fontsize=9)  # fmt: skip
        if (
            level_s is not None and level_s * 1e3 < NEAR * values_ms.max()
        ):  # otherwise all bars would be at the left edge
            axes.axvline(level_s * 1e3, color="0.2", linewidth=1.5, linestyle="--")
            axes.annotate(f"level {level_s * 1e3:g}", (level_s * 1e3, 0.85), xycoords=("data", "axes fraction"),
                          xytext=(4, 0), textcoords="offset points", va="top", fontsize=9)  # fmt: skip
    within = "" if level_s is None else f", {np.mean(values_ms <= level_s * 1e3):.0%} within {level_s * 1e3:g}"
    titled(axes, f"{name.upper()} (ms){within}", y="requests", fontsize=11)
    axes.set_xlim(left=0)


def _over_time(axes: Axes, result: Result) -> None:
    requests = result.requests
    start_s, end_s = float(requests["arrival_s"].min()), float(requests["finish_s"].max())
    edges = np.linspace(start_s, max(end_s, start_s + 1e-6), BINS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    shown = (("in the system", in_flight(requests), SLATE), ("not admitted", waiting(requests), LILAC))
    for name, steps, colour in shown:
        axes.fill_between(middles, steps.mean(edges), color=colour, alpha=0.75, linewidth=0, label=name)
    titled(axes, "Requests over time (s)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9, framealpha=0.85, edgecolor="none")


def _parts(axes: Axes, steps_ms: dict[str, float], drafts: bool) -> None:
    left = 0.0
    for step in STEPS:
        value = float(steps_ms.get(step, 0.0))
        label = f"{'decode' if step == 'verify' and not drafts else step} {number_text(value)}"
        axes.barh(0, value, left=left, color=STEP_COLOURS[step], edgecolor="white", label=label)
        left += value
    axes.set_yticks([])
    axes.set_ylim(-0.4, 2.2)
    axes.grid(False, axis="y")
    titled(axes, "Mean time of a request (ms)")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper left")
