"""A `pdvsim live` in a process of its own, for the tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ARCHS = ("pdv", "colocated")
POISONED = [
    "signal",
    "subprocess",
    "weakref",
    "multiprocessing",
    "random",
    "socket",
    "json",
    "numpy",
    "pandas",
    "tornado",
]
START = "import sys; sys.path.remove(''); from pdvsim.cli import main; sys.exit(main())"


@dataclass
class Served:
    """A `pdvsim live` under way."""

    process: subprocess.Popen[str]
    url: str
    folder: Path


def served(folder: Path, *more: str) -> Served:
    """In a folder with files that are named as modules of the standard library, and must not be imported."""
    for name in POISONED:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write({name!r})")
    argv = ["-c", START, "live", "--arch", ",".join(ARCHS), "--port", "0", "--no-browser", *more]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, *argv], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
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
