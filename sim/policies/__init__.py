"""The serving architectures by name."""

from __future__ import annotations

from pdvsim.sim.config import Arch
from pdvsim.sim.policies.base import Policy
from pdvsim.sim.policies.baseline import Baseline
from pdvsim.sim.policies.colocated import Autoregressive, Colocated
from pdvsim.sim.policies.hybrid import Adaptive, Hybrid
from pdvsim.sim.policies.pd import PD
from pdvsim.sim.policies.pdv import PDV
from pdvsim.sim.policies.unified import Unified

POLICIES: dict[Arch, type[Policy]] = {
    "autoregressive": Autoregressive,
    "baseline": Baseline,
    "colocated": Colocated,
    "pd": PD,
    "pdv": PDV,
    "pdv-unified": Unified,
    "pdv-hybrid": Hybrid,
    "adaptive": Adaptive,
}
