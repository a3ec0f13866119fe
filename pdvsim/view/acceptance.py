"""The acceptance of draft tokens that pdvsim knows: recorded, published or assumed, by drafter and task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pdvsim.sim.workload.acceptance import expected_tokens, measured
from pdvsim.sim.workload.asked import PUBLISHED
from pdvsim.sim.workload.options import ACCEPTANCE_MODELS, Acceptance
from pdvsim.view.setting import RECORDED_WITH


def known(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One row per drafter and task: tokens per round for each draft length, as text, and where they come from."""
    for name in ACCEPTANCE_MODELS:
        task, _, drafter = name.rpartition("-")
        tokens = measured(name).tokens_per_round
        means = {k: tokens[k - 1] for k in lengths if k <= len(tokens)}
        source = f"recorded with {RECORDED_WITH} (SpecDecode-Bench): --acceptance-model {name}"
        yield _row(drafter, task, means, lengths, source)
    for drafter, (acceptance, source) in PUBLISHED.items():
        yield _row(drafter, "-", {k: _expected(acceptance, k) for k in lengths}, lengths, f"published: {source}")
    assumed = Acceptance()
    for drafter in ("model", "pard", "mtp"):
        source = f"assumed: acceptance rate {assumed.acceptance_rate:g}"
        yield _row(drafter, "-", {k: _expected(assumed, k) for k in lengths}, lengths, source)


def _expected(acceptance: Acceptance, k: int) -> float:
    rates = acceptance.synthetic_acceptance_rates
    return 1.0 + sum(rates[:k]) if rates else expected_tokens(acceptance.acceptance_rate, k)


def _row(drafter: str, task: str, means: dict[int, float], lengths: Sequence[int], source: str) -> dict[str, Any]:
    tokens = {f"k={k}": f"{means[k]:.2f}" if k in means else "-" for k in lengths}
    return {"drafter": drafter, "task": task, **tokens, "source": source}
