"""Who may draft for a model: its natural draft model, an EAGLE-3 head, or a search in the request's own tokens.

Each competes in every architecture that drafts, with its own acceptance: what was recorded of it, or, of a draft model,
of which nothing was, what is assumed of any. Plain decoding competes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdvsim.sim.config import ACCEPTANCE_MODELS, Acceptance, Arch, Experiment
from pdvsim.sim.core import DrafterKind
from pdvsim.sim.hardware.models import drafted_by, model_or_config, natural_draft
from pdvsim.sim.policies import policy_of

KINDS: tuple[DrafterKind, ...] = ("model", "eagle3", "ngram")
USUAL_DATA = "sharegpt"  # whose recorded acceptance is taken where the traffic is of another data set


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
        """An architecture and who drafts: colocated with eagle3."""
        return drafted_name(candidate.arch, candidate.server.pair)


def drafted_name(arch: Arch, pair: str) -> str:
    """The same, of an architecture and a pair."""
    return f"{arch} with {drafter_name(pair)}" if policy_of(arch).speculates else str(arch)


def drafter_name(pair: str) -> str:
    """Who drafts in a pair, in a word."""
    draft, _, target = pair.partition(":")
    return draft.removesuffix(f"-{target}")


def drafters(
    base: Experiment, target: str, archs: Sequence[Arch], acceptance: Acceptance | None
) -> tuple[Drafted, ...]:
    """Everyone who may draft for a model, in each architecture; `acceptance` is everyone's, where it is given."""
    natural = natural_draft(model_or_config(target))
    found: dict[str, Drafted] = {}  # plain decoding is the same with any drafter
    for kind in KINDS:
        if kind != "model" or natural is not None:
            pair = drafted_by(kind, target)
            mine = acceptance or recorded(pair, base.traffic.dataset_name)
            for name, arch in ((drafted_name(arch, pair), arch) for arch in archs):
                found.setdefault(name, Drafted(name, arch, pair, mine))
    return tuple(found.values())


def recorded(pair: str, data: str) -> Acceptance:
    """The acceptance that was recorded of a kind of drafter, on that data set if it was; else what is assumed."""
    kind = drafter_name(pair)
    names = [name for name in (f"{data}-{kind}", f"{USUAL_DATA}-{kind}") if name in ACCEPTANCE_MODELS]
    return Acceptance(acceptance_model=names[0]) if names else Acceptance()


def acceptance_text(way: Drafted) -> str:
    """Where the acceptance of a drafter comes from."""
    acceptance, who = way.acceptance, drafter_name(way.pair)
    if acceptance.acceptance_model is not None:
        return f"{who}: recorded, {acceptance.acceptance_model}"
    if acceptance == Acceptance():
        return f"{who}: {acceptance.acceptance_rate:g}, assumed"
    return f"{who}: as given"
