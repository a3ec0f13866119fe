"""Points and sweeps that end with their process. A module of its own: each process imports it, and little else."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

from pdvsim.cli import main


def deadly(index: int, victim: int) -> dict[str, int]:
    """Point `victim` kills the process it runs in."""
    if index == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"index": index}


def deadly_once(index: int, marker: str) -> dict[str, int]:
    """Point 3 kills the process it first runs in."""
    if index == 3 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"index": index}


def doomed(argv: list[str], step: int, after_s: float) -> None:
    """A sweep that is ended, as by kill -9, at its `step`-th call to the disk, or so long after its start."""
    calls = itertools.count()

    def watched(call: Any) -> Any:
        def last(*args: Any) -> None:
            if next(calls) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            call(*args)

        return last

    os.fsync, os.replace = watched(os.fsync), watched(os.replace)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    main(argv)


def slow(index: int, lasts_s: float) -> dict[str, int]:
    """A point that takes a while."""
    time.sleep(lasts_s)
    return {"index": index}
