"""loky's tracker of semaphores, a process of its own, without its standard error.

When the tracker is killed, loky starts another, which prints a traceback for every semaphore that it has not heard of.
None of them is of use to anybody: the semaphores are removed by the process that made them.
"""

from __future__ import annotations

import os

DIED = "resource_tracker: process died"  # how the warning begins that loky gives then


def main(fd: int, verbose: bool = False) -> None:
    """Run the tracker; loky starts it by the name and the module of this function."""
    from joblib.externals.loky.backend.resource_tracker import main as track

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    track(fd, verbose)
