"""Acceptance where none is given: recorded or published for the kind of drafter, else `Acceptance()`, which outputs
report as assumed."""

from __future__ import annotations

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
