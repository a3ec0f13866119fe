"""How much slower or faster one card is than another of its kind, by their probes, and what that does to a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pdvsim.profiler.probe import RATES
from pdvsim.sim.assembly import profile_of
from pdvsim.sim.config import Experiment, Hardware
from pdvsim.sim.records import Result


class Slower(NamedTuple):
    """How many times as long a card takes as another, by what bounds the work."""

    reading: float
    multiplying: float
    starting: float


def probed_reference(profile: str | None, gpu: str = Hardware.gpu) -> Mapping[str, Any] | None:
    """The probe of the card that a profile was measured on; None where none was taken."""
    found = profile_of(Experiment(hardware=Hardware(gpu=gpu, profile=profile))).provenance.get("probe")
    return found if isinstance(found, Mapping) else None


def slower(this: Mapping[str, Any] | None, reference: Mapping[str, Any] | None) -> Slower | None:
    """How many times as long this card takes as the reference; None where either was not probed."""
    if this is None or reference is None:
        return None
    try:
        ratios = [float(reference[name]) / float(this[name]) for name in RATES]
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise ValueError("not a probe: it lacks " + ", ".join(RATES)) from None
    return Slower(*ratios)


def slowdown(result: Result, than: Slower) -> float:
    """How many times as long a run's forwards take on a card, by what bounds each of them alone.

    A forward takes as long as its bytes or its arithmetic at the card's ceilings, whichever is longer; the rest of its
    time goes to starting its kernels.
    """
    launches, meta = result.launches, result.meta
    solo = np.asarray(launches["solo_s"], np.float64)
    reading = np.asarray(launches["bytes"], np.float64) / float(meta["bandwidth_bytes_per_s"])
    multiplying = np.asarray(launches["flops"], np.float64) / float(meta["flops_per_s"])
    bound = np.minimum(np.maximum(reading, multiplying), solo)
    by_bytes = reading >= multiplying
    share = bound[by_bytes].sum(), bound[~by_bytes].sum(), (solo - bound).sum()
    return float(np.dot(share, than) / solo.sum())
