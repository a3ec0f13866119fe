"""How far a predicted lead of one architecture over another is to be trusted, beyond what seeds tell.

Measured: the ratio of two architectures' figures, predicted over real, for every two of seven architectures in the same
closed loop on the H200 (168 ratios of 132 runs; `pdvsim validate` prints them). The 95th percentile is what a lead must
exceed. In those runs the predicted order was right in all 109 pairs whose throughput was over 3% apart, and in 120 of
124 for mean TTFT.

Where forward times are predicted, a lead inside their error bar does not count either: one bar for a pair and card.
"""

from __future__ import annotations

from pdvsim.sim.config import Experiment
from pdvsim.sim.run import bar_of, covering_profile

LEADS: dict[str, float] = {
    "output_throughput": 0.035,
    "mean_tpot_ms": 0.035,
    "mean_e2el_ms": 0.036,
    "mean_ttft_ms": 0.18,
    "p99_tpot_ms": 0.036,
    "p99_ttft_ms": 0.225,
    "p99_itl_ms": 0.274,
}
OBJECTIVES = {"throughput": "output_throughput", "goodput": "mean_e2el_ms", "headroom": "mean_e2el_ms"}


def lead_error(experiment: Experiment, objective: str) -> float:
    """What a lead in an objective must exceed on the experiment's card, as a share."""
    metric = OBJECTIVES.get(objective, f"mean_{objective}_ms")
    return max(LEADS[metric], bar_of(experiment, covering_profile(experiment)))
