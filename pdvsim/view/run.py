"""One finished run: metrics, frames of its rows, and its table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pdvsim.bench.sweep import flatten
from pdvsim.common.version import __version__
from pdvsim.view.figure import chart_figure
from pdvsim.view.setting import acceptance_source, is_assumed, seeds_text, setting_line

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from pdvsim.sim.records import Result


class Run:
    """One finished run. Metrics and frames are computed on first use."""

    def __init__(self, result: Result, ends: Sequence[dict[str, Any]] = ()) -> None:
        self.result = result
        self.ends = ends  # metrics at both ends of the profile's error bar; none if forwards were measured

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Every metric, with the names of `vllm bench serve` if it has them.

        The main ones also have a `NAME_error`, the relative error within which 90% of comparable real runs lie, or, if
        forward times are predicted, a `NAME_low` and `NAME_high`; `error_range` explains it, or why there is none.
        """
        from pdvsim.bench.band import spanned

        return spanned(self.result, self.ends)

    @cached_property
    def _frames(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        from pdvsim.sim.metrics.summary import frames

        return frames(self.result)

    @property
    def requests(self) -> pd.DataFrame:
        """One row per request."""
        return self._frames[0]

    @property
    def launches(self) -> pd.DataFrame:
        """One row per GPU launch."""
        return self._frames[1]

    @property
    def deliveries(self) -> pd.DataFrame:
        """One row per delivery of tokens to a request."""
        return self._frames[2]

    @property
    def telemetry(self) -> pd.DataFrame:
        """One row per sample of the real GPU's counters; empty for a simulated one."""
        import pandas as pd

        return pd.DataFrame(self.result.meta.get("telemetry", []))

    @property
    def values(self) -> dict[str, Any]:
        """The metrics as one flat level, with the setting, as the tables print them."""
        from pdvsim.view.serving import levels_text

        experiment = self.result.experiment
        load = {"request_rate": experiment.traffic.request_rate, "max_concurrency": experiment.traffic.max_concurrency}
        meta = self.result.meta
        if meta.get("verdict") != "own" and (is_assumed(experiment) or experiment.acceptance.acceptance_model):
            meta = meta | {"acceptance_source": acceptance_source(experiment.acceptance)}
        levels = {"service_levels": levels_text(experiment.scoring, self.metrics)} if experiment.scoring.goodput else {}
        known = {"arch": experiment.arch, "pair": experiment.server.pair, **load, **meta}
        return known | levels | flatten(self.metrics)

    def table(self) -> str:
        """The metrics in the layout of `vllm bench serve`."""
        from pdvsim.view.serving import serving_table

        scoring = self.result.experiment.scoring
        return serving_table(self.values, scoring.metric_percentiles)

    def figure(self) -> Figure:
        """Plot of latencies, requests over time and the mean time of a request by step."""
        from pdvsim.view.charts import run_charts

        charts = run_charts(self.result, self.metrics)
        return chart_figure([charts[:2], charts[2:]], self.setting, inches=(4.5, 2.8))

    @property
    def setting(self) -> str:
        """The setting in one line."""
        experiment = self.result.experiment
        config = asdict(experiment)
        traffic = config["traffic"]
        rate, most = traffic["request_rate"], traffic["max_concurrency"]
        load = f"{rate:g} req/s" if rate < math.inf else f"concurrency {most}" if most else "all sent at time 0"
        if traffic["use_trace_timestamps"]:
            load = f"the trace at {load}" if rate < math.inf else "the trace's own load"
        drafts, acceptance = (None, None) if experiment.speculates else ("no drafts", "")
        card, seeds = self.result.meta.get("gpu"), seeds_text([traffic["seed"]])
        line = setting_line(config, load, seeds, card=card, drafts=drafts, acceptance=acceptance)
        return f"{experiment.arch}, {line}"

    def page(self) -> str:
        """The run as one HTML page: plot, table and provenance."""
        from pdvsim.bench.output import settings
        from pdvsim.view.charts import run_charts
        from pdvsim.view.report.sheet import Sheet

        result, arch = self.result, self.result.experiment.arch
        known = {k: v for k, v in result.meta.items() if isinstance(v, str | int | float)}
        facts = {"pdvsim": __version__, **known, "measured": result.meta.get("provenance") or {}}
        title = f"{arch}: {self.metrics['completed']} requests served"
        lead = f"{self.setting} {result.meta.get('foundation', '')}"
        facts["settings"] = settings(result.experiment)
        charts = run_charts(result, self.metrics)
        return Sheet(title, lead, [("", [self.table()])], facts=facts, charts=charts).html()

    def _repr_html_(self) -> str:
        from pdvsim.view.report.sheet import image
        from pdvsim.view.serving import serving_html

        scoring = self.result.experiment.scoring
        table = serving_html(self.values, scoring.metric_percentiles)
        return table if self.result.streamed is not None else table + image(self.figure(), self.setting)

    def __repr__(self) -> str:
        experiment = self.result.experiment
        return (
            f"Run({experiment.arch}, {self.metrics['completed']} requests, {self.result.meta.get('foundation', '?')})"
        )
