"""The flags that the commands which decide have in common: traffic and scoring without what they set themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypeVar

import tyro

from pdvsim.sim.config import Scoring, Traffic

T = TypeVar("T")


@dataclass(frozen=True)
class OpenTraffic(Traffic):
    """Who asks what; when is for the command to choose."""

    request_rate: tyro.conf.Suppress[float] = math.inf
    max_concurrency: tyro.conf.Suppress[int | None] = None
    use_trace_timestamps: tyro.conf.Suppress[bool] = False


@dataclass(frozen=True)
class TrimmedScoring(Scoring):
    """How a run is summarised; the warm-up is a share of the requests."""

    warmup_requests: tyro.conf.Suppress[int] = 0


def plain(cls: type[T], given: T) -> T:
    """A subclass made for the command line as the dataclass it extends, equal to one made by hand."""
    return cls(**{f.name: getattr(given, f.name) for f in fields(cls)})  # type: ignore[arg-type]
