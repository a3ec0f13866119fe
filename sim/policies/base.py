"""The base of every serving policy: admission, prompts and rounds, each in its own module.

A policy is a set of SimPy processes over a `Device`. It never learns which device or clock it has.
"""

from __future__ import annotations

from pdvsim.sim.policies.admission import Context, Process
from pdvsim.sim.policies.prompts import Prefills

__all__ = ["Context", "Policy", "Process"]


class Policy(Prefills):
    """Requests enter by `submit` and leave through `on_finish`; subclasses are the processes in between."""
