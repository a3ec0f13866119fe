"""How far a predicted lead of one architecture over another is to be trusted, beyond what seeds tell.

Measured: the ratio of two servers' figures, predicted over real, for every two on the same requests in a closed loop
(`pdvsim validate` prints it, and how often the order was right; `--write` keeps it beside the profile). A lead must
exceed the 95th percentile, rounded up to a tenth of a percent. A profile that was not validated takes the H200's.

Where forward times are predicted, a lead inside their error bar does not count either: one bar for a pair and card.
"""

from __future__ import annotations

from pdvsim.sim.config import Experiment, Hardware
from pdvsim.sim.hardware.models import pair as named_pair
from pdvsim.sim.hardware.profile import covering
from pdvsim.sim.hardware.trust import errors_of
from pdvsim.sim.run import profile_of

OBJECTIVES = {"throughput": "output_throughput", "goodput": "mean_e2el_ms", "headroom": "mean_e2el_ms"}


def lead_error(experiment: Experiment, objective: str) -> float:
    """What a lead in an objective must exceed on the experiment's card, as a share."""
    return metric_error(experiment, OBJECTIVES.get(objective, f"mean_{objective}_ms"))


def metric_error(experiment: Experiment, metric: str) -> float:
    """The same of a metric."""
    told = errors_of(experiment.hardware)
    if told is None or metric not in told.leads:
        told = errors_of(Hardware())
    assert told is not None, "the H200's errors are shipped"
    pair = named_pair(experiment.server.pair)
    bars = covering(profile_of(experiment), pair).uncertainty  # of both models: if it drafts none, its rivals do
    return max(told.leads[metric], *(bars.get(model.name, 0.0) for model in (pair.draft, pair.target)))
