"""Acceptance as a command is asked for it: given, read from a file of the user's own server, recorded, or assumed.

Where nothing is given, it is what was recorded of the kind of drafter, or `Acceptance()`, which every output calls
assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pdvsim.sim.workload.options import ACCEPTANCE_MODELS, Acceptance, Traffic

USUAL_DATA = "sharegpt"  # whose recorded acceptance is taken where the traffic is of another data set


@dataclass(frozen=True)
class AskedAcceptance(Acceptance):
    """Acceptance of draft tokens by the target."""

    acceptance_rate: float | None = None  # type: ignore[assignment]
    """Chance that a draft token is accepted; default: recorded for the drafter, else 0.6 (assumed)."""
    acceptance_from: str | None = None
    """Acceptance from a file: vLLM's /metrics, its bench result, or rounds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.acceptance_from is not None and self._given:
            raise ValueError("--acceptance-from and the other acceptance options are mutually exclusive")

    @property
    def _given(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(Acceptance)}
        return {name: value for name, value in values.items() if value not in (None, ())}

    @property
    def is_open(self) -> bool:
        """Whether nothing is given."""
        return not self._given and self.acceptance_from is None

    def asked(self, pair: str, traffic: Traffic) -> Acceptance:
        """What is given or read, or else what is usual for the drafter of a pair."""
        if self.is_open:
            return usual_acceptance(pair, traffic)
        if self.acceptance_from is None:
            return Acceptance(**self._given)
        from pdvsim.sim.workload.counters import read_acceptance

        found = read_acceptance(self.acceptance_from)
        if pair.startswith("ngram:") and found.acceptance_trace is None:
            raise ValueError(
                f"{self.acceptance_from} cannot give the acceptance of n-gram drafts: vLLM counts no rounds without "
                "a match; give recorded rounds or --acceptance-model"
            )
        return found


def usual_acceptance(pair: str, traffic: Traffic) -> Acceptance:
    """What was recorded of the pair's kind of drafter, on that data set if it was; else what is assumed.

    A file of requests that has a column of acceptance rates says it better.
    """
    kind, data = drafter_name(pair), traffic.dataset_name
    names = [name for name in (f"{data}-{kind}", f"{USUAL_DATA}-{kind}") if name in ACCEPTANCE_MODELS]
    return Acceptance(acceptance_model=names[0]) if names and not has_rates(traffic) else Acceptance()


def drafter_name(pair: str) -> str:
    """Who drafts in a pair, in a word."""
    draft, _, target = pair.partition(":")
    return draft.removesuffix(f"-{target}")


def has_rates(traffic: Traffic) -> bool:
    """Whether the requests come from a file that has the acceptance rate of each."""
    if traffic.dataset_name != "custom":
        return False
    from pdvsim.sim.workload.own import read_requests

    return read_requests(traffic.dataset_name, traffic.dataset_path or "", traffic.tokenizer).acceptance is not None
