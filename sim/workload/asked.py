"""Acceptance options of the commands: given, read from a file of a server, recorded, or assumed.

If nothing is given, it is the recorded or published acceptance of the kind of drafter, else `Acceptance()`, which
outputs report as assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pdvsim.sim.workload.options import ACCEPTANCE_MODELS, Acceptance, Traffic

USUAL_DATA = "sharegpt"  # default recording for other data sets
PUBLISHED = {  # of parallel heads; P-EAGLE's with 7 draft tokens, DFlash's as the rate that gives its tokens per block
    "p-eagle": (
        Acceptance(synthetic_acceptance_rates=(0.63, 0.38, 0.23, 0.15, 0.09, 0.05, 0.03, 0.02)),
        "HumanEval, vLLM pull request 32628",
    ),
    "dflash": (
        Acceptance(acceptance_rate=0.856),
        "6.36 tokens per block of 16: Qwen3-8B on GSM8K, SGLang pull request 16818; other tasks accept fewer",
    ),
}


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
        """The given or read acceptance, else the default of the pair's drafter."""
        if self.is_open:
            return usual_acceptance(pair, traffic)
        if self.acceptance_from is None:
            return Acceptance(**self._given)
        from pdvsim.sim.workload.counters import read_acceptance

        acceptance = read_acceptance(self.acceptance_from)
        if pair.startswith("ngram:") and acceptance.acceptance_trace is None:
            raise ValueError(
                f"{self.acceptance_from} cannot give the acceptance of n-gram drafts: vLLM counts no rounds without "
                "a match; give recorded rounds or --acceptance-model"
            )
        return acceptance


def usual_acceptance(pair: str, traffic: Traffic) -> Acceptance:
    """The recorded acceptance of the pair's kind of drafter, on that data set if available; else the assumed one.

    A column of acceptance rates in the requests file takes precedence.
    """
    kind, data = drafter_name(pair), traffic.dataset_name
    if kind in PUBLISHED and not has_rates(traffic):
        return PUBLISHED[kind][0]
    names = [name for name in (f"{data}-{kind}", f"{USUAL_DATA}-{kind}") if name in ACCEPTANCE_MODELS]
    return Acceptance(acceptance_model=names[0]) if names and not has_rates(traffic) else Acceptance()


def drafter_name(pair: str) -> str:
    """Short name of a pair's drafter."""
    draft, _, target = pair.partition(":")
    return draft.removesuffix(f"-{target}")


def has_rates(traffic: Traffic) -> bool:
    """Whether the requests are from a file with acceptance rates."""
    return traffic.dataset_name == "custom" and traffic.trace().acceptance is not None
