"""`pdvsim sweep --check`: whether results on disk are whole, and what is damaged, missing or does not belong there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdvsim.study.output import dumps
from pdvsim.study.sweepcheck import check_run, check_sweep


def check(results: Sequence[str], json: bool) -> int:
    """Say what is in sweep folders and JSON files of runs; returns 0 only if all are there and whole, 1 otherwise."""
    verdicts = {name: (check_sweep if Path(name).is_dir() else check_run)(Path(name)) for name in results}
    if json:
        print(dumps({name: {"whole": verdict.whole, "lines": verdict.lines} for name, verdict in verdicts.items()}))
    else:
        for name, verdict in verdicts.items():
            for line in verdict.lines:
                print(f"{name}: {line}")
    return 0 if all(verdict.whole for verdict in verdicts.values()) else 1
