"""The error range of a run's metrics, and what it comes from.

With a validated profile it is the error of its predictions for comparable real runs, by metric.

If forward times are predicted, the run is repeated at both ends of their error bar. All forwards are scaled together,
by the bar that holds 95% of the errors of single forwards. Errors that differ between forwards would cancel out, so the
range is rather too wide. Host costs and contention are not scaled; their errors are those of comparable real runs on
the H200, added as independent errors. So both sides of a range have a width even if slow and fast forwards change a
metric in the same direction.

Architectures share a profile, so the error of their difference is smaller than that of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pdvsim.sim.assembly import ServerParts
from pdvsim.sim.config import Experiment, Hardware
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.policies import ARCHITECTURES
from pdvsim.sim.prices.pace import read_pace
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate
from pdvsim.sim.trust import THROUGHPUTS, Errors, Known, errors_of, groups, traits, unvalidated

Metrics = dict[str, Any]

LATENCIES = ("_ttft_ms", "_tpot_ms", "_itl_ms", "_e2el_ms")


def wanted(experiment: Experiment) -> bool:
    """Whether to run an experiment's error bar: requested, a model of its pair predicted, and a validated policy."""
    ours = experiment.arch in ARCHITECTURES
    return experiment.hardware.band and ours and ServerParts(experiment).bar > 0


def ends(experiment: Experiment, progress: Callable[[int], None] | None = None) -> list[Metrics]:
    """The metrics with slow and with fast forwards, from two more runs; empty if not requested.

    `progress` continues to count after the requests of the run itself.
    """
    if not wanted(experiment):
        return []
    count = experiment.traffic.num_prompts
    metrics = []
    for number, sign in enumerate((1, -1), 1):

        def further(done: int, before: int = number * count) -> None:
            if progress is not None:
                progress(before + done)

        metrics.append(summarise(simulate(experiment, further, end=sign)))
    return metrics


def spanned(result: Result, ends: Sequence[Metrics] = ()) -> Metrics:
    """The metrics of a run and their error range; `error_range` explains it, or why there is none.

    The main metrics have a `NAME_error`, the relative error within which 90% of comparable real runs lie. If forward
    times are predicted, they have `NAME_low` and `NAME_high`.
    """
    metrics, experiment = summarise(result), result.experiment
    if result.meta.get("clock") != "simulated" or not experiment.hardware.band:
        return metrics
    main = [
        name for name in metrics if name in THROUGHPUTS or (name.endswith(LATENCIES) and not name.startswith("std_"))
    ]
    if ends:
        return metrics | _predicted(metrics, experiment, main, ends)
    errors = errors_of(experiment.hardware)
    reason = unvalidated(experiment, metrics, errors)
    if reason is None and "forward_error_bar" in result.meta:
        reason = "forward times are predicted"
    machine = experiment.hardware.machine
    if reason is None and machine is not None and read_pace(machine).step_s is not None:  # fitted to an engine
        reason = "no real runs of the engine that --machine corrects for"
    known: Known = "any machine" if machine is None else "this machine"
    bars = {} if reason is not None or errors is None else _bars(errors, known, experiment, metrics, main)
    if not bars:
        return metrics | {"error_range": f"none: {reason or 'too few real runs were comparable'}"}
    text = "holds 90% of comparable real runs"
    return metrics | {f"{name}_error": bar for name, bar in bars.items()} | {"error_range": text}


def _bars(
    errors: Errors, known: Known, experiment: Experiment, metrics: Metrics, main: Sequence[str]
) -> dict[str, float]:
    like = groups(experiment, *traits(metrics))
    bars = {name: errors.bar(known, like, name) for name in main}
    return {name: bar for name, bar in bars.items() if bar is not None}


def _predicted(metrics: Metrics, experiment: Experiment, main: Sequence[str], ends: Sequence[Metrics]) -> Metrics:
    """The range over a run and its ends, widened by the errors of real runs on the H200."""
    text, off = "forward times at both ends of their error bar", {}
    hardware = experiment.hardware
    # a roofline is a bound; an engine's bar is that of whole servers
    alone = hardware.profile == "roofline" or hardware.predicted_engine != "pdvsim"
    errors = None if alone else errors_of(Hardware())
    if errors is not None:
        off = _bars(errors, "any machine", experiment, metrics, main)
        text += ", and the errors of comparable real runs on the H200"
    ranges: Metrics = {"error_range": text}
    for name in main:
        value = float(metrics[name])
        values = [value, *(float(end[name]) for end in ends)]
        wide = math.log1p(off.get(name, 0.0))
        down, up = (
            math.hypot(math.log(most / least), wide) if least > 0 else wide
            for most, least in ((value, min(values)), (max(values), value))
        )
        ranges |= {f"{name}_low": value * math.exp(-down), f"{name}_high": value * math.exp(up)}
    return ranges
