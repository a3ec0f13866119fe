"""A `pdvsim live` in a process of its own, for the tests."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from test_processes import START, poison

ARCHS = ("pdv", "colocated")


@dataclass
class Served:
    """A `pdvsim live` under way."""

    process: subprocess.Popen[str]
    url: str
    folder: Path


def served(folder: Path, *more: str) -> Served:
    """In a folder with files that are named as modules of the standard library, and must not be imported."""
    argv = ["-c", START, "live", "--arch", ",".join(ARCHS), "--port", "0", "--no-browser", *more]
    process = subprocess.Popen(
        [sys.executable, *argv],
        cwd=folder,
        env=poison(folder),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    line = process.stderr.readline()
    address = re.search(r"live at (\S+)", line)
    assert address, line + process.stderr.read()
    return Served(process, address[1], folder)


def ended(live: Served) -> str:
    """After Ctrl-C: what it says."""
    live.process.send_signal(signal.SIGINT)
    try:
        assert not (live.folder / "imported").exists()
        return live.process.communicate(timeout=60)[1]
    finally:
        live.process.kill()
