"""`pdvsim sweep --check`: whether results on disk are complete, and what is damaged, missing or unknown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdvsim.study.output import dumps
from pdvsim.study.sweepcheck import check_run, check_sweep


def check(results: Sequence[str], json: bool) -> int:
    """Check sweep folders and JSON files of runs; returns 0 if all are complete and unchanged, else 1."""
    verdicts = {name: (check_sweep if Path(name).is_dir() else check_run)(Path(name)) for name in results}
    if json:
        print(dumps({name: {"whole": verdict.whole, "lines": verdict.lines} for name, verdict in verdicts.items()}))
    else:
        for name, verdict in verdicts.items():
            for line in verdict.lines:
                print(f"{name}: {line}")
    return 0 if all(verdict.whole for verdict in verdicts.values()) else 1
