"""Files that a user names, read within limits: regular files only, of a size that is stated.

A pipe or a device would hang or never end. Every refusal is a ValueError of one line that names the file.
"""

from __future__ import annotations

import io
import json
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.sim.limits import MAX_CONFIG_BYTES, MAX_DATA_BYTES, MIB, shown

if TYPE_CHECKING:
    import pyarrow as pa


def opened(path: str | Path, most_bytes: int = MAX_DATA_BYTES) -> io.BufferedReader:
    """A regular file of at most `most_bytes`, open for reading; a ValueError or an OSError otherwise, never a wait."""
    if "\0" in str(path):
        raise ValueError("not a file name")
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # a pipe would wait for a writer
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file")
        if status.st_size > most_bytes:
            raise ValueError(f"is {status.st_size} bytes; at most {most_bytes // MIB} MiB are read")
    except ValueError:
        file.close()
        raise
    return file


def read_bytes(path: str | Path, most_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """The content of a regular file of at most `most_bytes`; a ValueError or an OSError otherwise."""
    with opened(path, most_bytes) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:  # it grew, or is one of those that have no size beforehand
        raise ValueError(f"is more than {most_bytes // MIB} MiB")
    return data


def read_text(path: str | Path, most_bytes: int = MAX_CONFIG_BYTES) -> str:
    """The content of such a file as text; a ValueError if it is not UTF-8."""
    try:
        return read_bytes(path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None


def read_json(path: str | Path) -> Any:
    """The document in a JSON file; a ValueError or an OSError otherwise."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """A JSON document; a ValueError of one line if it is none, or nested too deeply."""
    return _parsed(text, "JSON", json.loads)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file; a ValueError or an OSError otherwise."""
    tables: dict[str, Any] = _parsed(read_text(path), "TOML", tomllib.loads)
    return tables


def _parsed(text: str, what: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("holds too many lists or tables inside each other") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"is not {what}: {' '.join(str(error).split())}") from None
    except ValueError:
        raise ValueError(f"is not {what}: a number of thousands of digits") from None


def error_text(error: Exception) -> str:
    """Return the error of a file as one printable line without its name."""
    return printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)[:300]


def printable(text: str) -> str:
    """A text as one line, whatever a file put into it."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def quoted(value: object) -> str:
    """A value of a file as an error quotes it: short, whatever it is."""
    # Cut before formatting: a nested list may be too deep, and an integer too long, for repr.
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = shown(value) if isinstance(value, int) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def shortened(text: str, most: int = 100) -> str:
    """A text of a file, cut where it is long."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def read_table(path: str | Path) -> pa.Table:
    """The table in a parquet file; a ValueError or an OSError if it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with opened(path) as content, pq.ParquetFile(content) as file:
            table = file.read()
        table.validate(full=True)
    except (pa.ArrowException, KeyError, TypeError, NotImplementedError) as error:
        raise ValueError(f"not parquet, or cut short: {error_text(error)[:120]}") from None
    return table


def memory_bytes() -> int:
    """Memory of this machine, or what its container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total
