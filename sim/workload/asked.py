"""Acceptance options of the commands: given, read from a file of a server, recorded, or assumed.

If nothing is given, it is the recorded or published acceptance of the kind of drafter, else `Acceptance()`, which
outputs report as assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from pdvsim.sim.core import LOOKED_UP
from pdvsim.sim.hardware.models import unquantised
from pdvsim.sim.workload.options import ACCEPTANCE_MODELS, USUAL_DATA, Acceptance, Traffic

GOLDEN = "SPEED-Bench coding with thinking, InferenceX golden_al_distribution"


class PublishedAcceptance(NamedTuple):
    """Acceptance that somebody measured, and where it is printed."""

    acceptance: Acceptance
    source: str


def _published(*rates: float, source: str) -> PublishedAcceptance:
    """Rates by position; tokens after the last are not accepted."""
    return PublishedAcceptance(
        Acceptance(synthetic_acceptance_rates=(*rates, *[0.0] * (POSITIONS - len(rates)))), source
    )


POSITIONS = 8  # of published rates
# By kind of drafter, or by the drafter of one model. P-EAGLE's is with 7 draft tokens, DFlash's is the rate that gives
# its tokens per block. DeepSeek-V3's MTP has two sources: the rate of the first token, and the tokens per round at
# k=7, from which a constant decay (0.645) gives the positions between.
PUBLISHED: dict[str, PublishedAcceptance] = {
    "p-eagle": _published(
        *(0.63, 0.38, 0.23, 0.15, 0.09, 0.05, 0.03, 0.02), source="HumanEval, vLLM pull request 32628"
    ),
    "dflash": PublishedAcceptance(
        Acceptance(acceptance_rate=0.856),
        "6.36 tokens per block of 16: Qwen3-8B on GSM8K, SGLang pull request 16818; other tasks accept fewer",
    ),
    "mtp-deepseek-v3": _published(
        *(0.82, 0.53, 0.34, 0.22, 0.14, 0.09, 0.06, 0.04),
        source="82% of first tokens (DeepSeek-R1, vLLM pull request 12755), 3.2 tokens per round at k=7 (MT-Bench, "
        "HumanEval, GSM8K: model card of nebius/MTP-DeepSeek-V3-0324)",
    ),
    "mtp-mimo-7b": _published(0.88, 0.18, source="MT-Bench at k=2, vLLM pull request 25136"),
} | {
    f"mtp-{name}": _published(
        0.84,
        source=f"first token as of GLM-5.2 ({GOLDEN}); later ones are hardly accepted (zai-org/GLM-4.5 issue 109)",
    )
    for name in ("glm-4.5-air", "glm-4.6")
}
# MTP of models that are not simulated, from the tokens per round at k = 1 to 8: for `--synthetic-acceptance-rates`
OTHER_MTP: dict[str, tuple[float, ...]] = {
    "DeepSeek-V4-Pro": (0.79, 0.48, 0.22, 0.05, 0.01, 0.0, 0.0, 0.0),
    "GLM-5.2": (0.84, 0.66, 0.49, 0.34, 0.28, 0.17, 0.14, 0.14),
    "Qwen3.5-397B-A17B": (0.93, 0.80, 0.66, 0.58, 0.44, 0.39, 0.24, 0.17),
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
        drafter = drafter_name(pair)
        if drafter in LOOKED_UP and acceptance.acceptance_trace is None:
            raise ValueError(
                f"{self.acceptance_from} cannot give the acceptance of {drafter} drafts: vLLM counts no rounds without "
                "a match; give recorded rounds or --acceptance-model"
            )
        return acceptance


def usual_acceptance(pair: str, traffic: Traffic) -> Acceptance:
    """The recorded acceptance of the pair's kind of drafter, on that data set if available; else the assumed one.

    A column of acceptance rates in the requests file takes precedence.
    """
    kind, data = drafter_name(pair), traffic.dataset_name
    if has_rates(traffic):
        return Acceptance()
    if (published := published_for(pair)) is not None:
        return published.acceptance
    names = [name for name in (f"{data}-{kind}", f"{USUAL_DATA}-{kind}") if name in ACCEPTANCE_MODELS]
    return Acceptance(acceptance_model=names[0]) if names else Acceptance()


def published_for(pair: str) -> PublishedAcceptance | None:
    """The published acceptance of a pair's drafter: of that model's, else of its kind; None if there is none."""
    draft, _, _ = pair.partition(":")
    return PUBLISHED.get(unquantised(draft)) or PUBLISHED.get(drafter_name(pair))


def drafter_name(pair: str) -> str:
    """Short name of a pair's drafter."""
    draft, _, target = pair.partition(":")
    return draft.removesuffix(f"-{target}")


def has_rates(traffic: Traffic) -> bool:
    """Whether the requests are from a file with acceptance rates."""
    return traffic.dataset_name == "custom" and traffic.trace().acceptance is not None
