"""Settings that can change while a session runs, for all architectures, and actions that change them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.relevance import applicable, refuse_idle

MOST_ARCHS = 4
BURST = 50  # requests of a burst
KNOBS = (
    "request_rate", "burstiness", "dataset_name", "input_len", "output_len", "acceptance_rate",
    "num_speculative_tokens", "controller", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip

Knobs = dict[str, Any]  # values of KNOBS; lengths of None are the data set's own


@dataclass(frozen=True)
class Setup:
    """Start of a session: architectures, and the experiment that all of them run."""

    archs: tuple[Arch, ...]
    base: Experiment

    def __post_init__(self) -> None:
        if not 1 <= len(self.archs) <= MOST_ARCHS or len(set(self.archs)) < len(self.archs):
            raise ValueError(
                f"arch takes one to {MOST_ARCHS} architectures, each once, got {', '.join(self.archs) or 'none'}"
            )
        traffic, server = self.base.traffic, self.base.server
        if math.isinf(traffic.request_rate) or traffic.use_trace_timestamps:
            raise ValueError("live needs a finite --request-rate")
        if not server.longest_draft:
            raise ValueError("start with a draft length of at least 1; it can be set to 0 on the page")
        refuse_idle([replace(self.base, arch=arch) for arch in self.archs])

    @property
    def knobs(self) -> Knobs:
        """The settings at the start."""
        return {name: self.base.setting(name) for name in KNOBS}

    def turned(self, knobs: Knobs) -> Experiment:
        """The experiment with these settings; a ValueError of one line if it cannot have them."""
        traffic = self.base.traffic
        path = traffic.dataset_path if knobs["dataset_name"] == traffic.dataset_name else None
        changed = self.base.with_settings(**knobs, dataset_path=path, random_range_ratio=0.0)
        ratio = traffic.random_range_ratio if changed.traffic.fixed_lengths else 0.0
        return changed.with_settings(random_range_ratio=ratio)

    def experiments(self, knobs: Knobs) -> list[Experiment]:
        """One experiment per architecture with these settings; those without effect in it are ignored."""
        changed = self.turned(knobs)
        return [applicable(replace(changed, arch=arch)) for arch in self.archs]


@dataclass(frozen=True)
class Action:
    """An action at a simulated time: settings changed, or a burst sent."""

    at_s: float
    knobs: Knobs | None = None  # None: a burst
