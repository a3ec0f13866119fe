"""Summary of a trace as text and plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.bench.traffic import Account
from pdvsim.sim.workload.windows import time_text, time_unit
from pdvsim.view.charts import Chart, Curve
from pdvsim.view.figure import chart_figure
from pdvsim.view.table import rows_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOUR = "#7f9ae5"
BINS = 40


class TraceAccount(Account):
    """A trace and its statistics, which print as text."""

    def __repr__(self) -> str:
        summary = self.summary()
        lines = [f"{self.name}: {summary['requests']:,} requests"]
        if self.window_s:
            lines += _arrival_lines(summary)
        else:
            lines.append("no arrival times: its lengths can be used, but it cannot be replayed")
        rows = [
            {"": name.replace("_", " "), **{key: f"{value:,.0f}" for key, value in summary[name].items()}}
            for name in ("prompt_tokens", "output_tokens")
        ]
        if "acceptance" in summary:
            rows.append({"": "acceptance", **{key: f"{value:.2f}" for key, value in summary["acceptance"].items()}})
        lines.append(rows_table(rows))
        if "length_correlation" in summary:
            lines.append(f"correlation of prompt and output: {summary['length_correlation']:+.2f}")
        if (windows := self.windows) is not None and len(windows.parts) > 1:
            lines.append(f"decisions replay it by window (--window): {windows.described(1)}")
        if "sessions" in summary:
            s = summary["sessions"]
            mean = f"{s['mean_requests']:.1f} requests on average"
            lines.append(f"{s['count']:,} sessions of {mean}, at most {s['max']:,}")
        if "repeated_prompt_tokens" in summary:
            share = summary["repeated_prompt_tokens"]
            lines.append(f"{share:.0%} of the prompt tokens repeat a prefix that was sent before")
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Rates over time and gaps, if there are arrival times; lengths."""
        summary, timed = self.summary(), bool(self.window_s)
        rate = f", {summary['request_rate']:.3g} req/s, burstiness {summary['burstiness']:.2g}" if timed else ""
        caption = f"{self.name}: {summary['requests']:,} requests{rate}. Prompt and output in tokens."
        lengths = [
            _lengths(self.trace.lengths[:, at], name) for at, name in enumerate(("prompt tokens", "output tokens"))
        ]
        rows = [[_rates(self), _gaps(self)], lengths] if timed else [lengths]
        return chart_figure(rows, caption, "Trace", inches=(5.25, 2.8))


def _arrival_lines(summary: dict[str, Any]) -> list[str]:
    window = time_text(summary["window_s"])
    shape = summary["burstiness"]
    kind = "burstier than" if shape < 0.9 else "more regular than" if shape > 1.1 else "close to"
    peak = summary["peak_rate"] / summary["request_rate"]
    lines = [
        f"over {time_text(summary['duration_s'])}: {summary['request_rate']:.3g} req/s on average, "
        f"{summary['peak_rate']:.3g} in the busiest {window} ({peak:.1f} times the mean), "
        f"{summary['quiet_windows']:.0%} of windows are empty",
        f"variation of the gaps {summary['gap_variation']:.2f}: burstiness {shape:.2g}, {kind} Poisson (1)",
    ]
    if "index_of_dispersion" in summary:
        dispersion = summary["index_of_dispersion"]
        lines.append(f"counts in {window}: variance {dispersion:.1f} times the mean (Poisson: 1)")
    return lines


def _rates(account: Account) -> Chart:
    scale, unit = time_unit(account.duration_s)
    starts = np.arange(len(account.counts) + 1) * account.window_s / scale
    mean = (len(account.trace.arrival_s) - 1) / account.duration_s
    rates = Curve("", COLOUR, starts, np.append(account.counts / account.window_s, 0.0), step=True, fill=True)
    title, by = f"Requests, mean {mean:.3g} req/s (dashed)", f"req/s, by {time_text(account.window_s)}"
    return Chart(title, by, unit, [rates], levels=[mean])


def _gaps(account: Account) -> Chart:
    """The share of longer gaps, with that of a Poisson process of the same rate."""
    gaps = np.sort(account.gaps_s)
    times = np.linspace(0, gaps[-1], 200)
    longer, expected = 1 - np.arange(len(gaps)) / len(gaps), np.exp(-times / gaps.mean())
    seen = expected > 0.5 / len(gaps)
    traces = [Curve("gaps of the trace", COLOUR, gaps, longer, step=True),
              Curve("Poisson", "#262626", times[seen], expected[seen], dash="--")]  # fmt: skip
    return Chart("Gaps", "share longer", "gap between arrivals (s)", traces, log_y=True)


def _lengths(tokens: np.ndarray[Any, Any], name: str) -> Chart:
    low, high = max(1, tokens.min()), tokens.max()
    wide = bool(high > 20 * low)
    edges = np.geomspace(low, high + 1, BINS) if wide else np.linspace(low, high + 1, BINS)
    counts = np.append(np.histogram(tokens, edges)[0], 0.0)
    title, mean = f"{name.capitalize()}, mean {tokens.mean():,.0f} (dashed)", float(tokens.mean())
    traces = [Curve("", COLOUR, edges, counts, step=True, fill=True)]
    return Chart(title, "requests", name, traces, log_x=wide, levels=[mean], upright=True)
