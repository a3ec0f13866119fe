"""Summary of a trace: request rate, burstiness, lengths, acceptance and sessions.

Burstiness is that of `--burstiness`: the shape of Gamma-distributed gaps with the trace's coefficient of variation. It
does not show slow changes of the rate. The index of dispersion does: the variance of the request counts in windows over
their mean, 1 for a Poisson process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import Chain
from pdvsim.sim.machine.prefix import PrefixBlocks
from pdvsim.sim.workload.conversations import hashed_chain, session_chain
from pdvsim.sim.workload.datasets import Trace
from pdvsim.sim.workload.windows import TraceWindows, cut

MOST_WINDOWS = 60
LEAST_REQUESTS_PER_WINDOW = 5
SHORT_S = [m * 10.0**e for e in range(-3, 2) for m in (1, 2, 5)]
STEPS_S = (*SHORT_S[:-1], 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14400.0, 86400.0)
QUANTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


@dataclass(frozen=True)
class Account:
    """A trace and its statistics."""

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
