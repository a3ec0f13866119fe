"""Acceptance where none is given: recorded or published for the kind of drafter, else `Acceptance()`, which outputs
report as assumed."""

from __future__ import annotations

from typing import NamedTuple

from pdvsim.sim.models.presets import unquantised
from pdvsim.sim.workload.options import ACCEPTANCE_MODELS, USUAL_DATA, Acceptance, Traffic

GOLDEN = "SPEED-Bench coding with thinking, InferenceX golden_al_distribution"


class PublishedAcceptance(NamedTuple):
    """A measured acceptance, and where it is printed."""

    acceptance: Acceptance
    source: str


def _published(source: str, *rates: float) -> PublishedAcceptance:
    """Rates by position; tokens after the last are not accepted."""
    every = (*rates, *[0.0] * (POSITIONS - len(rates)))
    return PublishedAcceptance(Acceptance(synthetic_acceptance_rates=every), source)


POSITIONS = 8  # of published rates
GLM = f"first token as of GLM-5.2 ({GOLDEN}); later ones are hardly accepted (zai-org/GLM-4.5 issue 109)"
# By kind of drafter, or by the drafter of one model. P-EAGLE's is with 7 draft tokens, DFlash's is the rate that gives
# its tokens per block. DeepSeek-V3's MTP has two sources: the rate of the first token, and the tokens per round at
# k=7, from which a constant decay (0.645) gives the positions between.
PUBLISHED: dict[str, PublishedAcceptance] = {
    "p-eagle": _published("HumanEval, vLLM pull request 32628", 0.63, 0.38, 0.23, 0.15, 0.09, 0.05, 0.03, 0.02),
    "dflash": PublishedAcceptance(
        Acceptance(acceptance_rate=0.856),
        "6.36 tokens per block of 16: Qwen3-8B on GSM8K, SGLang pull request 16818; other tasks accept fewer",
    ),
    "mtp-deepseek-v3": _published(
        "82% of first tokens (DeepSeek-R1, vLLM pull request 12755), 3.2 tokens per round at k=7 (MT-Bench, "
        "HumanEval, GSM8K: model card of nebius/MTP-DeepSeek-V3-0324)",
        *(0.82, 0.53, 0.34, 0.22, 0.14, 0.09, 0.06, 0.04),
    ),
    "mtp-mimo-7b": _published("MT-Bench at k=2, vLLM pull request 25136", 0.88, 0.18),
    "mtp-glm-4.5-air": _published(GLM, 0.84),
    "mtp-glm-4.6": _published(GLM, 0.84),
}
# MTP of models that are not simulated, from the tokens per round at k = 1 to 8: for `--synthetic-acceptance-rates`
OTHER_MTP: dict[str, tuple[float, ...]] = {
    "DeepSeek-V4-Pro": (0.79, 0.48, 0.22, 0.05, 0.01, 0.0, 0.0, 0.0),
    "GLM-5.2": (0.84, 0.66, 0.49, 0.34, 0.28, 0.17, 0.14, 0.14),
    "Qwen3.5-397B-A17B": (0.93, 0.80, 0.66, 0.58, 0.44, 0.39, 0.24, 0.17),
}


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
    """Return whether the requests are from a file with acceptance rates."""
    return traffic.dataset_name == "custom" and traffic.trace().acceptance is not None
