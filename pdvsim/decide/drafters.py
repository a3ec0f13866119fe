"""Drafters of a model: its natural draft model, an EAGLE-3 head, or n-gram search in the request's own tokens.

Each is compared in every architecture that drafts, with its recorded acceptance. A draft model has no recording, so its
acceptance is assumed. Plain decoding is compared once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pdvsim.sim.config import Acceptance, Arch, Experiment
from pdvsim.sim.core import DrafterKind
from pdvsim.sim.hardware.models import drafted_by, model_or_config, natural_draft
from pdvsim.sim.policies import policy_of
from pdvsim.sim.workload.asked import drafter_name, usual_acceptance
from pdvsim.view.setting import acceptance_source

KINDS: tuple[DrafterKind, ...] = ("model", "eagle3", "ngram")


@dataclass(frozen=True)
class Drafted:
    """An architecture with a drafter and its acceptance."""

    name: str
    arch: Arch
    pair: str
    acceptance: Acceptance

    def of(self, place: Experiment) -> Experiment:
        """The experiment with this drafter."""
        return replace(place, arch=self.arch, server=replace(place.server, pair=self.pair), acceptance=self.acceptance)

    @staticmethod
    def named(candidate: Experiment) -> str:
        """An architecture and its drafter: colocated with eagle3."""
        return drafted_name(candidate.arch, candidate.server.pair)


def drafted_name(arch: Arch, pair: str) -> str:
    """The same, from an architecture and a pair."""
    return f"{arch} with {drafter_name(pair)}" if policy_of(arch).speculates else str(arch)


def drafters(
    base: Experiment, target: str, archs: Sequence[Arch], acceptance: Acceptance | None
) -> tuple[Drafted, ...]:
    """All drafters of a model in each architecture; a given `acceptance` applies to all."""
    natural = natural_draft(model_or_config(target))
    found: dict[str, Drafted] = {}  # plain decoding is the same with any drafter
    for kind in KINDS:
        if kind != "model" or natural is not None:
            pair = drafted_by(kind, target)
            mine = acceptance or usual_acceptance(pair, base.traffic)
            for name, arch in ((drafted_name(arch, pair), arch) for arch in archs):
                way = Drafted(name, arch, pair, mine)
                with suppress(ValueError):  # the architecture does not support this drafter
                    way.of(base)
                    found.setdefault(name, way)
    return tuple(found.values())


def acceptance_text(way: Drafted) -> str:
    """Where the acceptance of a drafter comes from."""
    return f"{drafter_name(way.pair)}: {acceptance_source(way.acceptance)}"
