"""How far a run's metrics may be off.

On a profile that was validated: by as much as its predictions of real runs were off, by metric and kind of load.

Where forward times were predicted: the run again at both ends of their error bar. All forwards are scaled together, by
the bar that holds 95% of the errors of single forwards: errors that differ from forward to forward cancel out, so the
band is wide rather than narrow. Host costs and the sharing of the GPU are left as they are.

Architectures share the same profile, so their difference is surer than the level of either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pdvsim.sim.config import Experiment, Host
from pdvsim.sim.hardware.trust import THROUGHPUTS, errors_of, load_kind
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.records import Result
from pdvsim.sim.run import bar_of, covering_profile, simulate

Metrics = dict[str, Any]

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
    count = experiment.traffic.num_prompts
    found = []
    for number, sign in enumerate((1, -1), 1):

        def further(done: int, before: int = number * count) -> None:
            if progress is not None:
                progress(before + done)

        found.append(summarise(simulate(experiment, further, end=sign)))
    return found


def spanned(result: Result, ends: Sequence[Metrics] = ()) -> Metrics:
    """The metrics of a run, the main ones with `NAME_low` and `NAME_high` over the run and its ends.

    Without ends they have a `NAME_error`, where the profile was validated on such a load.
    """
    metrics, experiment = summarise(result), result.experiment
    main = [
        name for name in metrics if name in THROUGHPUTS or (name.endswith(LATENCIES) and not name.startswith("std_"))
    ]
    band: Metrics = {}
    if ends:
        for name in main:
            values = [float(metrics[name]), *(float(end[name]) for end in ends)]
            band |= {f"{name}_low": min(values), f"{name}_high": max(values)}
    elif result.meta.get("clock") == "simulated" and _like_served(result):
        errors, load = errors_of(experiment.hardware), load_kind(experiment.traffic)
        bars = {name: errors.bar(load, name) for name in main} if errors else {}
        band = {f"{name}_error": bar for name, bar in bars.items() if bar is not None}
    return metrics | band


def _like_served(result: Result) -> bool:
    """Whether real runs tell how far it may be off: one card, its own host, drafts by a model, all that realrun can do.

    Heads and n-gram drafts were in none of them so far.
    """
    experiment = result.experiment
    hardware, server = experiment.hardware, experiment.server
    one_card = hardware.replicas == 1 and experiment.gpus == 1
    as_measured = hardware.contention == "fluid" and hardware.padding == "profile"
    plain = experiment.host == Host() and server.priority in ("none", "stream")
    measured = "forward_error_bar" not in result.meta
    return hardware.band and one_card and as_measured and plain and measured and server.drafted_by in ("model", "none")
