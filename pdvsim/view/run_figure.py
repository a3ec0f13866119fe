"""Plot of one run: latencies, requests over time, and the mean time of a request by step."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.bench.stats import Interval
from pdvsim.sim.metrics.summary import latencies_s
from pdvsim.view.charts import Chart, Curve, breakdown, histogram
from pdvsim.view.figure import chart_figure
from pdvsim.view.report.series import in_flight, waiting
from pdvsim.view.setting import seeds_text, setting_line
from pdvsim.view.style import LILAC, SLATE, arch_colour, number_text
from pdvsim.view.table import load_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pdvsim.sim.config import Experiment
    from pdvsim.sim.records import Result

BINS = 120
HISTOGRAM = 40
NEAR = 1.3  # service levels beyond this multiple of the longest latency are not shown


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


def run_charts(result: Result, metrics: dict[str, Any]) -> list[Chart]:
    """Histograms of two latencies with their levels, requests over time, and the mean time of a request by step."""
    arch, scoring, requests = result.experiment.arch, result.experiment.scoring, result.requests
    latencies, levels = latencies_s(requests, dict(result.deliveries), scoring.warmup_requests), scoring.slo()
    charts = [_histogram(name, latencies[name] * 1e3, arch, levels.get(name)) for name in ("ttft", "tpot")]
    start_s, end_s = float(requests["arrival_s"].min()), float(requests["finish_s"].max())
    edges = np.linspace(start_s, max(end_s, start_s + 1e-6), BINS + 1)
    shown = (("in the system", in_flight(requests), SLATE), ("not admitted", waiting(requests), LILAC))
    traces = [Curve(name, colour, edges[1:], steps.mean(edges), fill=True) for name, steps, colour in shown]
    steps_ms = {f"breakdown_ms_{k}": Interval(v, 0.0, 1) for k, v in metrics.get("breakdown_ms", {}).items()}
    entry = steps_ms | {"arch": arch, "spec_decode_acceptance_length": metrics.get("spec_decode_acceptance_length")}
    return [*charts, Chart("Requests over time", "", "seconds", traces), breakdown([entry])]


def run_figure(charts: list[Chart], caption: str) -> Figure:
    """The charts of a run in a file."""
    return chart_figure([charts[:2], charts[2:]], caption, inches=(4.5, 2.8))


def _histogram(name: str, values_ms: Any, arch: str, level_s: float | None) -> Chart:
    within = "" if level_s is None else f", {np.mean(values_ms <= level_s * 1e3):.0%} within {level_s * 1e3:g}"
    if not len(values_ms):
        return Chart(f"{name.upper()} (ms){within}")
    spare = max(1e-6 * float(np.abs(values_ms).max()), 1e-9)  # nearly equal values would have no width for bars
    edges = np.linspace(values_ms.min() - spare, values_ms.max() + spare, HISTOGRAM + 1)
    found = {"": (arch_colour(arch), values_ms)}
    near = [level_s * 1e3] if level_s is not None and level_s * 1e3 < NEAR * values_ms.max() else []
    middle = f"{name.upper()}, median {number_text(float(np.median(values_ms)))} ms{within}"
    return replace(histogram(name, edges, found, levels=near), title=middle)
