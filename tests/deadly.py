"""Points that kill the process they run in. A module of its own: every worker imports it, and little else."""

from __future__ import annotations

import os
import signal
from pathlib import Path


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
