"""What happened, as flat columns: one row a request, one a launch, one a delivery of tokens. Metrics come afterwards.

The simulator and the real GPU write the same rows. Deliveries hold what inter-token latency needs: request `request`
received `tokens` tokens at `time_s`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import Request

Columns = dict[str, NDArray[Any]]

LANES: tuple[str, ...] = ("prefill", "decode", "verify", "main")

REQUEST_DTYPES: dict[str, str] = {
    "id": "i8",
    "replica": "i4",
    "arrival_s": "f8",
    "admitted_s": "f8",  # first work launched
    "first_token_s": "f8",
    "finish_s": "f8",
    "prompt_tokens": "i8",
    "output_tokens": "i8",
    "rounds": "i8",
    "drafted": "i8",
    "accepted": "i8",
    "prefill_s": "f8",  # the target reading the prompt
    "draft_s": "f8",
    "wait_s": "f8",  # drafted, in the queue for verification
    "verify_s": "f8",
}

STAGES = ("prefill_s", "draft_s", "wait_s", "verify_s")

LAUNCH_DTYPES: dict[str, str] = {
    "replica": "i2",
    "gpu": "i2",
    "lane": "i2",  # index into LANES
    "kind": "i2",  # index into core.KINDS
    "role": "i2",  # 0 draft model, 1 target model
    "rows": "i4",
    "tokens": "i4",  # new tokens over all rows and steps
    "steps": "i2",
    "width": "i4",  # new tokens a row in the first of the steps
    "queue_depth": "i4",
    "prompt_start": "i4",  # tokens cached before its prompts, the most of any of them
    "context": "i8",  # tokens cached of all rows
    "start_s": "f8",
    "end_s": "f8",
    "solo_s": "f8",  # how long it would have taken alone
    "bytes": "f8",
    "flops": "f8",
}

# launches as they are written; see `launch_code`
WRITTEN_DTYPES: dict[str, str] = {"code": "i8"} | {
    name: LAUNCH_DTYPES[name]
    for name in (
        "rows", "tokens", "queue_depth", "prompt_start", "context", "start_s", "end_s", "solo_s", "bytes", "flops",
    )
}  # fmt: skip
WIDEST = (1 << 16) - 1  # new tokens a row that a code can tell

DELIVERY_DTYPES: dict[str, str] = {"request": "i4", "tokens": "i2", "time_s": "f8"}


class Table:
    """Rows of numbers, appended one by one into one flat array."""

    __slots__ = ("_flat", "append", "dtypes")

    def __init__(self, dtypes: dict[str, str]) -> None:
        self.dtypes = dtypes
        self._flat = array("d")  # doubles hold every count exactly, and packing a row is one call
        self.append: Callable[[tuple[float, ...]], None] = self._flat.extend  # the hottest call of a run

    def __len__(self) -> int:
        return len(self._flat) // len(self.dtypes)

    def clear(self) -> None:
        del self._flat[:]

    def columns(self) -> Columns:
        grid = (
            np.frombuffer(self._flat, "f8").reshape(-1, len(self.dtypes))
            if self._flat
            else np.empty((0, len(self.dtypes)))
        )
        return {name: grid[:, i].astype(dtype) for i, (name, dtype) in enumerate(self.dtypes.items())}


class Deliveries:
    """Tokens delivered: by request, how many, and when."""

    __slots__ = ("_requests", "_times_s", "_tokens")

    def __init__(self) -> None:
        self._requests, self._tokens, self._times_s = array("i"), array("h"), array("d")

    def append(self, row: tuple[int, int, float]) -> None:
        """`row` is request, tokens and time."""
        self._requests.append(row[0])
        self._tokens.append(row[1])
        self._times_s.append(row[2])

    def extend(self, requests: Sequence[int], tokens: Sequence[int], time_s: float) -> None:
        """Several requests' tokens at one time."""
        self._requests.extend(requests)
        self._tokens.extend(tokens)
        self._times_s.extend([time_s] * len(requests))

    def __len__(self) -> int:
        return len(self._requests)

    def clear(self) -> None:
        del self._requests[:], self._tokens[:], self._times_s[:]

    def columns(self) -> Columns:
        parts = zip(DELIVERY_DTYPES.items(), (self._requests, self._tokens, self._times_s), strict=True)
        return {name: np.array(values, dtype) for (name, dtype), values in parts}


@dataclass
class Log:
    """The tables a run fills."""

    launches: Table = field(default_factory=lambda: Table(WRITTEN_DTYPES))
    deliveries: Deliveries = field(default_factory=Deliveries)


@dataclass
class Result:
    """One finished run: its rows, and where they came from."""

    experiment: Any  # the Experiment that made it
    requests: Columns
    deliveries: Columns
    launches: Columns
    meta: dict[str, Any]  # profile, foundation ("roofline, not measured"), clock, gpus, kv capacity, …
    streamed: dict[str, Any] | None = None  # its metrics, where the rows were not kept


def request_columns(requests: Sequence[Request], more_ns: dict[str, NDArray[np.int64]] | None = None) -> Columns:
    """The requests as columns, in their order; `more_ns` is time by stage that is not in their own books."""
    columns: Columns = {}
    for name, dtype in REQUEST_DTYPES.items():
        if name in STAGES:
            stage = name.removesuffix("_s") + "_ns"
            spent = np.fromiter(map(attrgetter(stage), requests), "i8", len(requests))
            columns[name] = (spent + more_ns[stage] if more_ns and stage in more_ns else spent) * 1e-9
        else:
            columns[name] = np.fromiter(map(attrgetter(name), requests), dtype, len(requests))
    return columns


def launch_code(replica: int, gpu: int, lane: int, kind: int, role: int, steps: int, width: int) -> int:
    """What a launch is, in one number: rows are written by the million."""
    what = ((((replica * 4 + gpu) * 8 + lane) * 8 + kind) * 2 + role) * 64 + steps
    return (what << 16) + (width if width < WIDEST else WIDEST)


def launch_columns(columns: Columns) -> Columns:
    """Launches as they were written, with their codes read."""
    code = columns.pop("code")
    for name, base in (("width", WIDEST + 1), ("steps", 64), ("role", 2), ("kind", 8), ("lane", 8), ("gpu", 4)):
        columns[name] = (code % base).astype(LAUNCH_DTYPES[name])
        code //= base
    columns["replica"] = code.astype(LAUNCH_DTYPES["replica"])
    return {name: columns[name] for name in LAUNCH_DTYPES}


def by_time(parts: Sequence[Columns], order: tuple[str, ...]) -> Columns:
    """Rows of all parts sorted by the last of the columns in `order`, ties by those before it."""
    names = list(parts[0])

    def joined(name: str) -> NDArray[Any]:
        return np.concatenate([part.pop(name) for part in parts])  # freed as they are joined

    keys = {name: joined(name) for name in order}
    time = keys[order[-1]]
    rank = np.argsort(time, kind="stable")
    if np.any(np.diff(time[rank]) == 0):
        rank = np.lexsort([keys[name] for name in order])
    return {name: (keys.pop(name) if name in keys else joined(name))[rank] for name in names}
