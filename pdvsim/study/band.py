"""How far a run's metrics may be off where forward times were predicted: the run again at both ends of the error bar.

All forwards are scaled together, by the bar that holds 95% of the errors of single forwards: errors that differ from
forward to forward cancel out, so the band is wide rather than narrow. Host costs and the sharing of the GPU are left as
they are. Architectures share the same forward times, so their difference is surer than the level of either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pdvsim.sim.config import Experiment
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import bar_of, covering_profile, simulate

Metrics = dict[str, Any]

THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
LATENCIES = ("_ttft_ms", "_tpot_ms", "_itl_ms", "_e2el_ms")


def wanted(experiment: Experiment) -> bool:
    """Whether an experiment has a band: asked for, and a model of its pair predicted."""
    return experiment.hardware.band and bar_of(experiment, covering_profile(experiment)) > 0


def ends(experiment: Experiment, progress: Callable[[int], None] | None = None) -> list[Metrics]:
    """The metrics with slow and with fast forwards, from two more runs; nothing where there is no band.

    `progress` goes on counting behind the requests of the run itself.
    """
    if not wanted(experiment):
        return []
    profile, count = covering_profile(experiment), experiment.traffic.num_prompts
    found = []
    for number, sign in enumerate((1, -1), 1):

        def further(done: int, before: int = number * count) -> None:
            if progress is not None:
                progress(before + done)

        found.append(summarise(simulate(experiment, further, profile=profile.at_bar(sign))))
    return found


def spanned(metrics: Metrics, ends: Sequence[Metrics]) -> Metrics:
    """Metrics of a run with `NAME_low` and `NAME_high` of the main ones, over the run and its ends."""
    if not ends:
        return metrics
    band: Metrics = {}
    for name, value in metrics.items():
        if name in THROUGHPUTS or (name.endswith(LATENCIES) and not name.startswith("std_")):
            values = [float(value), *(float(end[name]) for end in ends)]
            band |= {f"{name}_low": min(values), f"{name}_high": max(values)}
    return metrics | band
