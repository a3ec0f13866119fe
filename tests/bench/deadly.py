"""Points and sweeps that end with their process. A module of its own: each process imports it, and little else."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

from pdvsim.cli import main


def deadly(index: int, victims: tuple[Any, ...]) -> dict[str, int]:
    """Point `victims[0]` kills the process it runs in; `victims[1]` the first one, which leaves a file `victims[2]`."""
    always, once, marker = (*victims, None, None, None)[:3]
    if index == always or (index == once and not Path(marker).exists()):
        if index == once:
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
