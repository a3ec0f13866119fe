"""Atomic files, and documents with a digest that detects changes.

Every file that a command writes goes through `whole`, `write_whole` or `write_all`. A sealed document contains a digest
of its content. Not supported: file systems without atomic rename.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pdvsim.sim.reading import opened

SEAL = "sha256"
TEMPORARY = ".pdvsim-*.tmp"  # left by a killed process


@contextmanager
def whole(path: Path, replace: bool = False) -> Iterator[BinaryIO]:
    """A file to write, moved into place at the end of the block: complete, or the old file stays. Makes its folder.

    Only a regular file is replaced, also through a link; a device, a pipe or this program's output is written to.
    `replace` is for files in a folder of pdvsim: anything of that name is replaced. An OSError names the file.
    """
    try:
        if not replace and in_place(path):
            own = _own_output(path)
            sys.stdout.flush()
            with open(path, "ab") if own is None else os.fdopen(os.dup(own), "wb") as file:
                yield file
            return
        target = path if replace else Path(os.path.realpath(path))
        if not target.parent.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".pdvsim-{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as file:  # the name must be new, also as a link
                yield file
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(OSError):
                mode = target.stat().st_mode
                if stat.S_ISREG(mode):
                    temporary.chmod(stat.S_IMODE(mode))  # a private file stays private
            os.replace(temporary, target)
        finally:  # also after Ctrl-C
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        if error.filename is not None and ".pdvsim-" not in str(error.filename):
            raise  # of another file
        raise OSError(error.errno, error.strerror, str(path)) from None


def log_file(path: Path) -> BinaryIO:
    """A file that another program writes while it runs: the log of a server."""
    return path.open("wb")


def write_whole(path: Path, data: bytes, replace: bool = False) -> None:
    """Write one file atomically, even if the machine stops; an OSError names it."""
    write_all({path: data}, replace)


Content = bytes | Callable[[BinaryIO], object]  # of a file, or what writes it


def write_all(files: Mapping[Path, Content | None], replace: bool = False) -> None:
    """Write related files in order: none is moved into place before all are on disk. None as content removes a file."""
    with contextlib.ExitStack() as stack:
        for path, data in files.items():
            if data is not None:
                file = stack.enter_context(whole(path, replace))
                data(file) if callable(data) else file.write(data)
                file.flush()
                if len(files) > 1 and (replace or not in_place(path)):
                    os.fsync(file.fileno())
    for path, data in files.items():
        if data is None:
            path.unlink(missing_ok=True)


def append(path: Path, line: bytes) -> None:
    """Add a line in one call to the system; an OSError names the file."""
    try:
        with path.open("ab", buffering=0) as file:
            file.write(line)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def cut(path: Path) -> None:
    """Make a file of lines, or remove its last line if it was not written to its end."""
    data = path.read_bytes() if path.is_file() else b""
    if not data.endswith(b"\n"):
        path.touch()
        os.truncate(path, data.rfind(b"\n") + 1)


def check_writable(path: Path) -> None:
    """An OSError that names `path` if it cannot be written; leaves no file."""
    try:
        if path.is_symlink() and not (real := Path(os.path.realpath(path))).parent.is_dir():
            raise OSError(errno.ENOENT, f"is a link to {real}, whose folder does not exist")
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not os.access(path, os.W_OK):  # a write-protected file could be replaced, but should not
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        if in_place(path):
            return
        tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def in_place(path: Path) -> bool:
    """Whether `path` is written to rather than replaced: a device, a pipe, or this program's output."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or _own_output(path) is not None


def _own_output(path: Path) -> int | None:
    """The file descriptor that already writes to `path`; a second one would overwrite it."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(number)):
                return number
    return None


def digest(path: Path | str) -> str | None:
    """The SHA-256 of a file's content; None if it is not a regular file."""
    try:
        with opened(path, sys.maxsize) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return None


def sha256(data: bytes) -> str:
    """The SHA-256 of content."""
    return hashlib.sha256(data).hexdigest()


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document with the digest of its content, which is the same on another day, as the last key."""
    content = {key: value for key, value in document.items() if key not in (SEAL, "date")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**document, SEAL: sha256(text.encode())}


def unbroken(document: Any) -> bool:
    """Whether a document matches its seal."""
    return isinstance(document, dict) and document == sealed(document)
