"""How far a predicted lead of one architecture over another is to be trusted, beyond what seeds tell.

Measured: the ratio of two architectures' figures, predicted over real, for every two of seven architectures in the same
closed loop on the H200 (`pdvsim validate` prints it, and how often the order was right). A lead must exceed the 95th
percentile, rounded up to a tenth of a percent.

Where forward times are predicted, a lead inside their error bar does not count either: one bar for a pair and card.
"""

from __future__ import annotations

from pdvsim.sim.config import Experiment
from pdvsim.sim.hardware.models import pair as named_pair
from pdvsim.sim.hardware.profile import covering
from pdvsim.sim.run import profile_of

LEADS: dict[str, float] = {
    "output_throughput": 0.035,
    "mean_tpot_ms": 0.035,
    "mean_e2el_ms": 0.035,
    "mean_ttft_ms": 0.18,
    "p99_tpot_ms": 0.036,
    "p99_ttft_ms": 0.245,
    "p99_itl_ms": 0.223,
}
OBJECTIVES = {"throughput": "output_throughput", "goodput": "mean_e2el_ms", "headroom": "mean_e2el_ms"}


def lead_error(experiment: Experiment, objective: str) -> float:
    """What a lead in an objective must exceed on the experiment's card, as a share."""
    return metric_error(experiment, OBJECTIVES.get(objective, f"mean_{objective}_ms"))


def metric_error(experiment: Experiment, metric: str) -> float:
    """The same of a metric."""
    pair = named_pair(experiment.server.pair)
    bars = covering(profile_of(experiment), pair).uncertainty  # of both models: if it drafts none, its rivals do
    return max(LEADS[metric], *(bars.get(model.name, 0.0) for model in (pair.draft, pair.target)))
