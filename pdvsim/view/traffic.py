"""Summary of a trace as text and plot: request rate, burstiness, lengths, acceptance and sessions.

Burstiness is that of `--burstiness`: the shape of Gamma-distributed gaps with the trace's coefficient of variation. It
does not show slow changes of the rate. The index of dispersion does: the variance of the request counts in windows over
their mean, 1 for a Poisson process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import Chain
from pdvsim.sim.machine.prefix import PrefixBlocks
from pdvsim.sim.workload.conversations import hashed_chain, session_chain
from pdvsim.sim.workload.datasets import Trace
from pdvsim.sim.workload.windows import TraceWindows, cut, time_text, time_unit
from pdvsim.view.charts import Chart, Curve
from pdvsim.view.figure import chart_figure
from pdvsim.view.table import TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_WINDOWS = 60
LEAST_REQUESTS_PER_WINDOW = 5
SHORT_S = [m * 10.0**e for e in range(-3, 2) for m in (1, 2, 5)]
STEPS_S = (*SHORT_S[:-1], 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14400.0, 86400.0)
QUANTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
COLOUR = "#7f9ae5"
BINS = 40
DIGITS = {"prompt_tokens": 0, "output_tokens": 0, "acceptance": 2}


@dataclass(frozen=True, repr=False)
class TraceAccount:
    """A trace and its statistics, which print as text."""

    name: str
    trace: Trace
    window_s: float  # of the counts; 0 without arrival times
    counts: NDArray[np.int64]  # of requests in each window

    @classmethod
    def of(cls, name: str, trace: Trace) -> Self:
        duration_s = float(np.ptp(trace.arrival_s))
        if not trace.timed or not duration_s:
            return cls(name, trace, 0.0, np.zeros(0, dtype=np.int64))
        windows = max(1, min(MOST_WINDOWS, len(trace.lengths) // LEAST_REQUESTS_PER_WINDOW))
        window_s = min((step for step in STEPS_S if step * windows >= duration_s), default=duration_s / windows)
        at = ((trace.arrival_s - trace.arrival_s.min()) / window_s).astype(np.int64)
        whole_windows = max(1, int(duration_s / window_s))  # without the last, which is incomplete
        return cls(name, trace, window_s, np.bincount(at, minlength=whole_windows)[:whole_windows])

    @property
    def gaps_s(self) -> NDArray[np.float64]:
        return np.diff(np.sort(self.trace.arrival_s))

    @property
    def duration_s(self) -> float:
        return float(np.ptp(self.trace.arrival_s))

    @cached_property
    def windows(self) -> TraceWindows | None:
        """The windows that decisions replay; None without arrival times."""
        return cut(self.trace, np.arange(len(self.trace.lengths))) if self.window_s else None

    def summary(self) -> dict[str, Any]:
        """The statistics by name; those of arrivals only with arrival times."""
        summary: dict[str, Any] = {"requests": len(self.trace.lengths)}
        if self.windows is not None:
            parts = [{"start_s": w.start_s, "span_s": w.span_s, "requests": len(w)} for w in self.windows.parts]
            summary |= self._arrivals() | {"windows": parts}
        for name, tokens in zip(("prompt_tokens", "output_tokens"), self.trace.lengths.T, strict=True):
            summary[name] = _spread(tokens)
        if self.trace.lengths.std(axis=0).all():
            prompt, output = self.trace.lengths.T
            summary["length_correlation"] = float(np.corrcoef(prompt, output).item(1))
        if self.trace.acceptance is not None:
            summary["acceptance"] = _spread(self.trace.acceptance)
        if self.trace.sessions is not None:
            _, sizes = np.unique(self.trace.sessions, return_counts=True)
            summary["sessions"] = {"count": len(sizes), "mean_requests": float(sizes.mean()), "max": int(sizes.max())}
        if self.trace.shares:
            summary["repeated_prompt_tokens"] = repeated_share(self.trace)
        return summary

    def _arrivals(self) -> dict[str, Any]:
        gaps, mean = self.gaps_s, self.counts.mean()
        variation = float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else math.nan
        return {
            "duration_s": self.duration_s,
            "request_rate": len(gaps) / self.duration_s,
            "window_s": self.window_s,
            "peak_rate": float(self.counts.max() / self.window_s),
            "quiet_windows": float((self.counts == 0).mean()),
            "gap_variation": variation,
            "burstiness": 1 / variation**2 if variation > 0 else math.inf,
        } | ({"index_of_dispersion": float(self.counts.var(ddof=1) / mean)} if len(self.counts) > 1 else {})

    def __repr__(self) -> str:
        summary = self.summary()
        lines = [f"{self.name}: {summary['requests']:,} requests"]
        if self.window_s:
            lines += _arrival_lines(summary)
        else:
            lines.append("no arrival times: its lengths can be used, but it cannot be replayed")
        rows = [
            {"": name.replace("_", " ")} | {key: f"{value:,.{most}f}" for key, value in summary[name].items()}
            for name, most in DIGITS.items() if name in summary
        ]  # fmt: skip
        lines.append(str(TextTable(rows)))
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


def repeated_share(trace: Trace) -> float:
    """Share of the prompt tokens, in whole blocks, that an endless prefix cache would have at their arrival."""
    chains: list[Chain] = []
    if trace.hashes is not None:
        rows = zip(trace.hashes, trace.lengths[:, 0].tolist(), strict=True)
        chains = [hashed_chain(hashes, 0, prompt, number) for number, (hashes, prompt) in enumerate(rows)]
    elif (talk := trace.talk()) is not None:
        chains = [session_chain(talk.origins[row], session) for row, session in enumerate(talk.conversation.tolist())]
    seen, repeated, lengths = PrefixBlocks(), 0, trace.lengths.tolist()
    order = (
        np.argsort(trace.arrival_s, kind="stable") if trace.turns is None else np.argsort(trace.turns, kind="stable")
    )
    for row in order.tolist():
        prompt, output = lengths[row]
        repeated += seen.sent(chains[row], prompt, prompt + output - 1)
    return repeated / int(trace.lengths[:, 0].sum())


def _spread(values: NDArray[Any]) -> dict[str, float]:
    return {"mean": float(values.mean())} | {k: float(np.percentile(values, q)) for k, q in QUANTILES.items()}


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


def _rates(account: TraceAccount) -> Chart:
    scale, unit = time_unit(account.duration_s)
    starts = np.arange(len(account.counts) + 1) * account.window_s / scale
    mean = (len(account.trace.arrival_s) - 1) / account.duration_s
    rates = Curve("", COLOUR, starts, np.append(account.counts / account.window_s, 0.0), step=True, fill=True)
    title, by = f"Requests, mean {mean:.3g} req/s (dashed)", f"req/s, by {time_text(account.window_s)}"
    return Chart(title, by, unit, [rates], levels=[mean])


def _gaps(account: TraceAccount) -> Chart:
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
