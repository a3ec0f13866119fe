"""`pdvsim acceptance`: what is known of how many draft tokens are accepted."""

from __future__ import annotations

from dataclasses import dataclass

from pdvsim.common.arguments import parse
from pdvsim.sim.core import DrafterKind

LENGTHS = (1, 2, 3, 4, 5, 7)
ADVICE = (
    "tokens per round, one of them the target's own, by draft length k. Acceptance depends on model, drafter and task: "
    "give yours with --acceptance-from FILE (vLLM's /metrics, its bench result, or recorded rounds)"
)


@dataclass(frozen=True)
class AcceptanceCommand:
    """List the acceptance that is recorded, published or assumed, by drafter and task, with its source."""

    drafter: DrafterKind | None = None
    """Only this drafter; default: all."""
    json: bool = False
    """Print one JSON document instead of a table."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(AcceptanceCommand, argv, "pdvsim acceptance")

    from pdvsim.study.output import dumps
    from pdvsim.view.acceptance import known
    from pdvsim.view.table import TextTable

    rows = [row for row in known(LENGTHS) if args.drafter in (None, row["drafter"])]
    if not rows:
        raise ValueError(f"--drafter {args.drafter}: no acceptance is known; give yours with --acceptance-from")
    if args.json:
        print(dumps({"tokens_per_round": rows}))
        return 0
    print(TextTable(rows, notes=(ADVICE,)))
    return 0
