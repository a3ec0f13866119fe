"""Rows of runs in one append-only file: a JSON line per run, with the key of its experiment and a digest.

The key is a hash of the experiment, the files it reads and the version, so that what is known is not run again. A
killed process can at most leave a cut last line, which the next one removes. A line that was changed counts as missing.
Not supported: file systems without file locks.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from pdvsim import sim
from pdvsim.bench.pool import Outcome, Row
from pdvsim.common.files import append, cut, digest, sha256
from pdvsim.common.version import __version__
from pdvsim.sim.config import Experiment

ROWS = "rows.jsonl"
START = b'{"key": "'  # of a line
KEY_LENGTH = 16
KEY_END = len(START) + KEY_LENGTH
SEAL = b', "sha256": "'  # before the digest of a line
FAILED = b'", "failed": '  # after the key of a run that failed
CACHE = "PDVSIM_CACHE"  # environment variable: the folder of the rows of decisions; empty: none are kept
LARGEST_CACHE_BYTES = 256 * 2**20
OLDEST_CACHE_S = 30 * 86400.0


class KeptRun(NamedTuple):
    """A finished run: its row, and of its records the digests by table and facts that reading them needs."""

    row: Row
    details: dict[str, Any]


class Rows:
    """The rows in a file, or in memory only; a `shared` file has several writers, another one that holds its lock."""

    def __init__(self, path: Path | None = None, shared: bool = False) -> None:
        self.path, self.shared = path, shared
        self.failed: set[str] = set()  # keys of runs that failed and have no row since
        self.damaged = 0  # lines
        self._lines: dict[str, bytes] = {}
        self._read: dict[str, KeptRun | None] = {}
        self._inputs: dict[str, str | None] = {}  # digests of the files that experiments read
        for line in path.read_bytes().split(b"\n") if path is not None and path.is_file() else ():
            key, end = line[len(START) : KEY_END].decode("ascii", "replace"), line[KEY_END:]
            if not line.startswith(START) or not line.endswith(b"}"):
                self.damaged += bool(line)
            elif end.startswith(FAILED):
                self.failed.add(key)
            else:
                self._lines[key] = line
                self.failed.discard(key)

    def __len__(self) -> int:
        return len(self._lines)

    def get(self, key: str) -> KeptRun | None:
        """What is known of a key: None if nothing is, or its line was changed."""
        if key not in self._read and key in self._lines:
            entry, (text, _, seal) = None, self._lines[key].rpartition(SEAL)
            if sha256(text + b"}").encode() + b'"}' == seal:
                document = json.loads(self._lines[key])
                entry = KeptRun(document["row"], document["details"])
            self.damaged += entry is None
            self._read[key] = entry
        return self._read.get(key)

    def key(self, experiment: Experiment) -> str:
        """The key of an experiment: a hash of its settings, the content of the files it reads, and the version."""
        version = program() if self.shared else __version__
        for path in experiment.files:
            if path not in self._inputs:
                self._inputs[path] = digest(path)
        files = [(path, self._inputs[path]) for path in experiment.files]
        return sha256(f"{version} {files} {experiment!r}".encode())[:KEY_LENGTH]

    def add(self, key: str, outcome: Outcome, write: bool = True) -> None:
        """Keep an outcome, as it will be read back, and write it; an OSError names the file."""
        document: dict[str, Any] = {"key": key, "failed": outcome.reason, "traceback": outcome.traceback}
        if outcome.row is not None:
            document = {"key": key, **outcome.row}
        text = json.dumps(document, default=lambda value: value.item())  # numpy's
        if outcome.row is not None:
            document = json.loads(text)
            self._read[key] = KeptRun(document["row"], document["details"])
        if self.path is None or not write:
            return
        line = text[:-1].encode() + SEAL + sha256(text.encode()).encode() + b'"}\n'
        with _lock(self.path.parent) if self.shared else contextlib.nullcontext():
            append(self.path, line)


def _lock(folder: Path, blocking: bool = True) -> FileLock:
    """A lock that ends with its process; an error without file locks, as a marker file would outlive a crash."""
    return FileLock(folder / ".lock", blocking=blocking, fallback_to_soft=False)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The only writer of the rows in a folder, which is made, until the end of the block or of the process."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / ROWS, folder / ".lock"):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ValueError(f"{path}: is a link or no file instead of the sweep's own; remove it")
    lock = _lock(folder, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{folder}: another sweep is writing here; wait, or name another folder with -o") from None
    try:
        cut(folder / ROWS)
        yield
    finally:
        lock.release()


@cache
def program() -> str:
    """The version of this program's files, which differ between two states of a source folder."""
    folders = (Path(next(iter(sim.__path__))), Path(__file__).parent)
    files = (path for folder in folders for path in folder.rglob("*.*") if "__pycache__" not in path.parts)
    states = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(files)]
    return sha256(f"{__version__} {states}".encode())


def cache_rows() -> Rows:
    """The rows of earlier decisions of this program, in the user's cache folder; in memory if there can be none."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = os.environ.get(CACHE, str(Path(home, "pdvsim")))
    if not place:
        return Rows()
    path = Path(place) / f"rows-{program()[:KEY_LENGTH]}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in path.parent.glob("rows-*.jsonl"):
            state = file.stat()
            if state.st_size > LARGEST_CACHE_BYTES or time.time() - state.st_mtime > OLDEST_CACHE_S:
                file.unlink()
        with _lock(path.parent):
            cut(path)
        return Rows(path, shared=True)
    except OSError:
        return Rows()
