"""Records of a run as flat columns: one row per request, per launch and per delivery of tokens; metrics come later.

The simulator and the real GPU write the same rows. Deliveries hold what inter-token latency needs: request `request`
received `tokens` tokens at `time_s`. A long run has millions of rows, so they are kept packed, beyond `HELD_BYTES` on
disk, and worked through a part at a time. The rows of requests are all in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from os import SEEK_END
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import Request, Role

Array = NDArray[Any]
Columns = dict[str, Array]
Table = Mapping[str, Array]  # columns, or what gives them

ROWS = 1 << 16  # of a part: many for numpy, few for the processor's cache
REQUESTS = 4096  # served, before they are taken into the records
HELD_BYTES = 1 << 25  # of a table that are held in memory, packed; more go to a temporary file

LANES: tuple[str, ...] = ("prefill", "decode", "verify", "main")
ROLES: tuple[Role, ...] = ("draft", "target")

# of `Request` and `RequestUsage`, where each is described: seconds are floats, all others whole numbers
_REQUEST_COLUMNS = (
    "id", "replica", "arrival_s", "admitted_s", "first_token_s", "finish_s", "prompt_tokens", "output_tokens", "rounds",
    "drafts", "drafted", "accepted", "refused", "undrafted_rounds", "ahead_tokens", "ahead_used", "preemptions",
    "resumptions", "recomputed_tokens", "num_cached_tokens", "session", "turn", "prefill_s", "draft_s", "wait_s",
    "verify_s",
)  # fmt: skip
REQUEST_DTYPES = {name: "f8" if name.endswith("_s") else "i8" for name in _REQUEST_COLUMNS} | {"replica": "i4"}
_GIVEN = {"id", "arrival_s", "prompt_tokens", "output_tokens", "session", "turn"}
_COLUMNS = {name: attrgetter(name) for name in _REQUEST_COLUMNS}

LAUNCH_DTYPES: dict[str, str] = {
    "replica": "i2",
    "gpu": "i2",
    "lane": "i2",  # index into LANES
    "kind": "i2",  # index into core.KINDS
    "role": "i2",  # 0 draft model, 1 target model
    "rows": "i4",
    "tokens": "i4",  # new tokens over all rows and steps
    "steps": "i2",
    "width": "i4",  # new tokens per row in the first of the steps
    "queue_depth": "i4",
    "prompt_start": "i4",  # tokens cached before its prompts, the most of any of them
    "context": "i8",  # tokens cached of all rows
    "start_s": "f8",
    "end_s": "f8",
    "solo_s": "f8",  # how long it would have taken alone
    "bytes": "f8",
    "flops": "f8",
}

DELIVERY_DTYPES: dict[str, str] = {"request": "i4", "tokens": "i2", "time_s": "f8"}
_ONE = array("i", (1,))


KIND_COLUMNS = ("replica", "gpu", "lane", "kind", "role", "rows", "tokens", "steps", "width")
# those columns, and what solo_s, bytes and flops are: each a constant, and a factor of the cached tokens
LaunchKind = tuple[float, ...]

Carried = tuple[tuple[int, ...], tuple[int, ...]]  # requests in a launch: its rows, and those of its prompts
HostSpan = tuple[int, str, float, float]  # replica, operation, from and to in seconds


class Launches:
    """One row per launch. Launches of one kind may be stored in a shorter form."""

    carried: list[Carried] | None = None  # requests of each launch, in order, if a timeline is asked for

    def __init__(self) -> None:
        self._rows = array("d")  # all columns of a row, one row after the other
        self.append = self._rows.fromlist
        self.kinds: list[LaunchKind] = []
        self._short = array("d")

    def extend_short(self, rows: list[float]) -> None:
        """Rows of five: number in `kinds`, queue depth, context, start and end."""
        self._short.fromlist(rows)

    def __len__(self) -> int:
        return len(self._rows) // len(LAUNCH_DTYPES) + len(self._short) // 5

    def drain(self) -> Columns:
        """The rows so far as columns, in the order of their ends; they are no longer held here."""
        rows = np.array(self._rows).reshape(-1, len(LAUNCH_DTYPES)).T
        del self._rows[:]
        short = self._long()
        columns = {
            name: np.concatenate((row.astype(dtype), short[name]))
            for row, (name, dtype) in zip(rows, LAUNCH_DTYPES.items(), strict=True)
        }
        if self.carried is not None:  # those are in the order in which launches ended
            return columns
        order = np.lexsort([columns[name] for name in ("lane", "gpu", "replica", "end_s")])
        return rows_of(columns, order)

    def _long(self) -> Columns:
        """The short rows with all their columns."""
        short = np.array(self._short).reshape(-1, 5).T
        del self._short[:]
        numbers, (depth, context, start_s, end_s) = short[0].astype(np.int64), short[1:]
        kinds = np.array(self.kinds).reshape(-1, len(KIND_COLUMNS) + 6).T
        kind_columns, lines = kinds[:-6], kinds[-6:][:, numbers]
        columns: Columns = {
            name: column.astype(LAUNCH_DTYPES[name])[numbers]
            for name, column in zip(KIND_COLUMNS, kind_columns, strict=True)
        }
        columns |= {"queue_depth": depth.astype("i4"), "prompt_start": np.zeros(len(numbers), "i4")}
        columns |= {"context": context.astype("i8"), "start_s": start_s, "end_s": end_s}
        for at, name in enumerate(("solo_s", "bytes", "flops")):
            columns[name] = lines[2 * at] + lines[2 * at + 1] * context
        return columns


class Deliveries:
    """Tokens delivered: by request, how many, and when. Rows of one request in a row name it once."""

    __slots__ = ("_counts", "_requests", "_times_s", "_tokens", "unwritten")

    def __init__(self) -> None:
        self.unwritten: list[Callable[[], None]] = []  # write what is known of requests, and not in the log yet
        self._clear()

    def _clear(self) -> None:
        self._requests, self._counts = array("i"), array("i")
        self._tokens, self._times_s = bytearray(), array("d")  # a round gains fewer tokens than a byte holds

    def append(self, row: tuple[int, int, float]) -> None:
        """`row` is request, tokens and time."""
        self._requests.append(row[0])
        self._counts.append(1)
        self._tokens.append(row[1])
        self._times_s.append(row[2])

    def extend(self, requests: list[int], tokens: list[int], time_s: float) -> None:
        """Several requests' tokens at one time."""
        self._requests.fromlist(requests)
        self._counts.extend(_ONE * len(requests))
        self._tokens += bytes(tokens)
        self._times_s.extend(array("d", (time_s,)) * len(requests))

    def extend_one(self, request: int, tokens: bytes, over: int, times_s: array[float]) -> None:
        """Append one request's tokens at several times, the last less what is `over`."""
        self._requests.append(request)
        self._counts.append(len(tokens))
        self._tokens += tokens
        self._tokens[-1] -= over
        self._times_s += times_s

    def __len__(self) -> int:
        return len(self._tokens)

    def drain(self) -> Columns:
        """The rows so far as columns, in the order of time and request; they are no longer held here."""
        for write in self.unwritten:
            write()
        requests = np.repeat(np.frombuffer(self._requests, "i4"), np.frombuffer(self._counts, "i4"))
        times_s, tokens = np.frombuffer(self._times_s), np.frombuffer(self._tokens, np.uint8)
        order = np.lexsort((requests, times_s))
        columns = {"request": requests[order], "tokens": tokens[order].astype("i2"), "time_s": times_s[order]}
        self._clear()
        return columns


@dataclass
class Log:
    """The tables a run fills."""

    launches: Launches = field(default_factory=Launches)
    deliveries: Deliveries = field(default_factory=Deliveries)
    host: list[HostSpan] | None = None  # what the host did, where a timeline asks


@dataclass
class Result:
    """One finished run: its rows, and where they came from."""

    experiment: Any  # the Experiment that made it
    requests: Columns
    deliveries: Table
    launches: Table
    meta: dict[str, Any]  # profile, foundation ("roofline, not measured"), clock, gpus, kv capacity, …
    streamed: dict[str, Any] | None = None  # its metrics, where the rows were not kept
    carried: Sequence[Carried] | None = None  # requests of each launch, if a timeline was asked for
    host: Sequence[HostSpan] | None = None  # and what the host did


def request_columns(requests: Sequence[Request]) -> Columns:
    """The requests as columns, in their order."""
    columns: Columns = {}
    taken = [request.taken for request in requests]
    for name, dtype in REQUEST_DTYPES.items():
        rows = requests if name in _GIVEN else taken
        columns[name] = np.fromiter(map(_COLUMNS[name], rows), dtype, len(rows))
    return columns


def rows_of(columns: Table, rows: Array | slice) -> Columns:
    """Return the selected rows."""
    return {name: column[rows] for name, column in columns.items()}


def packed(column: Array) -> tuple[Array, Array, Array]:
    """A column in fewer bytes: whole numbers as narrow as they fit, equal neighbours once. Nothing is rounded.

    The values that are kept; how often each occurs, empty if once; and the least value, in the column's own type.
    """
    dtype, least, counts = column.dtype, 0, np.empty(0, np.uint8)
    if dtype.kind == "i" and len(column):
        least = int(column.min())
        column = (column - least).astype(np.min_scalar_type(int(column.max()) - least))
    bits = column.view(f"u{column.itemsize}")  # -0.0 is not 0.0, and nan is itself
    ends = np.flatnonzero(bits[1:] != bits[:-1])  # of all runs of equal numbers but the last
    if 2 * (len(ends) + 1) < len(column):
        ends = np.append(ends, len(column) - 1)
        counts = np.diff(ends, prepend=-1)
        column, counts = column[ends], counts.astype(np.min_scalar_type(counts.max()))
    return np.ascontiguousarray(column), counts, np.array([least], dtype)


def unpacked(values: Array, counts: Array, least: Array) -> Array:
    """The column as it was."""
    values = (np.repeat(values, counts) if len(counts) else values).astype(least.dtype)
    if least[0]:  # adding nothing would make 0.0 of -0.0
        values += least
    return values


class PackedTable(Table):
    """A table kept packed, part by part, in memory as far as HELD_BYTES reach, else in a temporary file without a name.

    What it gives are copies, so they cannot be written to.
    """

    def __init__(self) -> None:
        # where each column begins, and the type and number of what is there
        self._parts: list[dict[str, tuple[int, list[tuple[np.dtype[Any], int]]]]] = []
        self._file = SpooledTemporaryFile(HELD_BYTES, prefix="pdvsim-")  # noqa: SIM115

    def append(self, part: Columns) -> None:
        """Append rows."""
        self._file.seek(0, SEEK_END)
        places = {}
        for name, column in part.items():
            pieces = packed(column)
            places[name] = self._file.tell(), [(piece.dtype, len(piece)) for piece in pieces]
            for piece in pieces:
                self._file.write(piece.tobytes())
        self._parts.append(places)

    def parts(self, names: Sequence[str]) -> Iterator[Columns]:
        """Return the named columns of each part."""
        return ({name: self._read(*part[name]) for name in names} for part in self._parts)

    def _read(self, start: int, pieces: list[tuple[np.dtype[Any], int]]) -> Array:
        self._file.seek(start)
        return unpacked(*(np.frombuffer(self._file.read(dtype.itemsize * count), dtype) for dtype, count in pieces))

    def __getitem__(self, name: str) -> Array:
        column = np.concatenate([part[name] for part in self.parts([name])])
        column.flags.writeable = False
        return column

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts[0])

    def __len__(self) -> int:
        return len(self._parts[0])

    def __or__(self, other: Columns) -> Columns:
        return dict(self) | other


def parts(table: Table, names: Sequence[str] = ()) -> Iterator[Columns]:
    """A table, or some columns of it, about ROWS rows at a time; without rows one part, which is empty."""
    names = names or list(table)
    if isinstance(table, PackedTable):
        yield from table.parts(names)
    else:
        for first in range(0, len(table[names[0]]) or 1, ROWS):
            yield {name: table[name][first : first + ROWS] for name in names}


class Reader:
    """Takes what has happened out of a log, in parts of a limited number of served requests or rows."""

    def __init__(self, log: Log, at_once: int) -> None:
        self.log, self._at_once = log, at_once
        self.served: list[Request] = []

    def arrived(self, request: Request) -> None:
        """A request is sent."""

    def finished(self, request: Request) -> None:
        """A request has all its tokens, and they are in the log."""
        self.served.append(request)
        log = self.log
        if len(self.served) >= self._at_once or len(log.launches) >= ROWS or len(log.deliveries) >= ROWS:
            self.take(request.taken.finish_s)

    def take(self, now_s: float) -> None:
        """Take the log and the served requests out, at a time from which on more may come."""
        raise NotImplementedError


class Keeper(Reader):
    """Keeps the rows of a run."""

    def __init__(self, log: Log) -> None:
        super().__init__(log, REQUESTS)
        self.deliveries, self.launches = PackedTable(), PackedTable()
        self._requests: list[Columns] = []
        self._sent_ids = array("q")

    def arrived(self, request: Request) -> None:
        self._sent_ids.append(request.id)

    def take(self, now_s: float) -> None:
        self.deliveries.append(self.log.deliveries.drain())
        self.launches.append(self.log.launches.drain())
        self._requests.append(request_columns(self.served))
        self.served = []

    def requests(self) -> Columns:
        """Columns of all requests, in the order in which they were sent."""
        columns = {name: np.concatenate([part[name] for part in self._requests]) for name in REQUEST_DTYPES}
        order = np.argsort(columns["id"])
        return rows_of(columns, order[np.searchsorted(columns["id"], self._sent_ids, sorter=order)])
