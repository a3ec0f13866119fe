"""`pdvsim check`: whether results on disk are whole, and what is damaged, missing or does not belong there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdvsim.common.options import Placed, parse


@dataclass(frozen=True)
class CheckCommand:
    """Check that results are what was written; exit code 0 only if all are there and whole, 1 otherwise."""

    results: Placed[tuple[str, ...]]
    """Sweep folders, or JSON files of single runs."""
    json: bool = False
    """Print one JSON document instead of lines."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(CheckCommand, argv, "pdvsim check")

    from pdvsim.study.output import dumps
    from pdvsim.study.sweepcheck import check_run, check_sweep

    if not args.results:
        raise ValueError("name at least one result: a sweep's folder or a run's JSON file")
    verdicts = {name: (check_sweep if Path(name).is_dir() else check_run)(Path(name)) for name in args.results}
    if args.json:
        print(dumps({name: {"whole": verdict.whole, "lines": verdict.lines} for name, verdict in verdicts.items()}))
    else:
        for name, verdict in verdicts.items():
            for line in verdict.lines:
                print(f"{name}: {line}")
    return 0 if all(verdict.whole for verdict in verdicts.values()) else 1
