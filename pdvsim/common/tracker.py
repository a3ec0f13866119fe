"""loky's semaphore tracker, a separate process, without its standard error.

If the tracker is killed, loky starts another, which prints a traceback for every unknown semaphore. These are useless:
the process that made the semaphores removes them.
"""

from __future__ import annotations

import os

DIED = "resource_tracker: process died"  # start of loky's warning


def main(fd: int, verbose: bool = False) -> None:
    """Run the tracker; loky starts it by this function's name and module."""
    from joblib.externals.loky.backend.resource_tracker import main as track

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    track(fd, verbose)
