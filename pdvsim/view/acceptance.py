"""The acceptance of draft tokens that pdvsim knows: recorded, published or assumed, by drafter and task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdvsim.sim.models.presets import drafter_kind
from pdvsim.sim.workload.acceptance import mean_tokens, measured
from pdvsim.sim.workload.options import ACCEPTANCE_MODELS, Acceptance
from pdvsim.sim.workload.usual import GOLDEN, OTHER_MTP, PUBLISHED
from pdvsim.view.setting import RECORDED_WITH


def known(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One row per drafter, model and task: tokens per round for each draft length, as text, and their source."""

    def by_rates(acceptance: Acceptance) -> dict[int, float]:
        return {k: mean_tokens(acceptance, k) for k in lengths}

    for name in ACCEPTANCE_MODELS:
        task, _, drafter = name.rpartition("-")
        means = dict(enumerate(measured(name).tokens_per_round, start=1))
        how = "looked up in recorded tokens" if drafter == "suffix" else "recorded"
        yield row_of(
            drafter, RECORDED_WITH, task, means, lengths, f"{how} (SpecDecode-Bench): --acceptance-model {name}"
        )
    for name, (acceptance, source) in PUBLISHED.items():
        drafter = drafter_kind(f"{name}-")
        model = name.removeprefix(drafter).removeprefix("-") or "-"
        yield row_of(drafter, model, "-", by_rates(acceptance), lengths, f"published: {source}")
    for model, rates in OTHER_MTP.items():
        given = ",".join(f"{rate:g}" for rate in rates)
        means = by_rates(Acceptance(synthetic_acceptance_rates=rates))
        yield row_of("mtp", model, "-", means, lengths, f"published: {GOLDEN}: --synthetic-acceptance-rates {given}")
    assumed = Acceptance()
    for drafter in ("model", "pard", "mtp"):
        yield row_of(
            drafter, "-", "-", by_rates(assumed), lengths, f"assumed: acceptance rate {assumed.acceptance_rate:g}"
        )


def row_of(
    drafter: str, model: str, task: str, means: Mapping[int, float], lengths: Sequence[int], source: str
) -> dict[str, Any]:
    """A row of the table, as text."""
    tokens = {f"k={k}": f"{means[k]:.2f}" if k in means else "-" for k in lengths}
    return {"drafter": drafter, "model": model, "task": task, **tokens, "source": source}
