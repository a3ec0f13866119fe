"""What happened, as flat columns: one row a request, one a launch, one a delivery of tokens. Metrics come afterwards.

The simulator and the real GPU write the same rows. Deliveries hold what inter-token latency needs: request `request`
received `tokens` tokens at `time_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    "prefill_s": "f8",
    "draft_s": "f8",
    "wait_s": "f8",  # in a lane's queue between first token and finish
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
    "queue_depth": "i4",
    "start_s": "f8",
    "end_s": "f8",
    "solo_s": "f8",  # how long it would have taken alone
    "bytes": "f8",
    "flops": "f8",
}

DELIVERY_DTYPES: dict[str, str] = {"request": "i4", "tokens": "i2", "time_s": "f8"}


class Table:
    """Rows appended one by one or in blocks, kept as packed columns of 64 Ki rows."""

    __slots__ = ("_blocks", "_limit", "append", "dtypes", "rows")

    def __init__(self, dtypes: dict[str, str]) -> None:
        self.dtypes = dtypes
        self._blocks: list[Columns] = []
        self._limit = 1 << 16
        self.rows: list[tuple[Any, ...]] = []
        self.append = self.rows.append  # bound once: the hottest call of a run

    def flush(self) -> None:
        """Pack the rows appended so far; call now and then to keep memory small."""
        if self.rows:
            packed = zip(self.dtypes.items(), zip(*self.rows, strict=True), strict=True)
            self._blocks.append({name: np.array(col, dtype) for (name, dtype), col in packed})
            self.rows.clear()

    def trim(self) -> None:
        if len(self.rows) >= self._limit:
            self.flush()

    def extend(self, block: Columns) -> None:
        """Append a whole block of rows at once, behind those appended before."""
        self.flush()
        self._blocks.append({name: np.asarray(block[name], dtype) for name, dtype in self.dtypes.items()})

    def columns(self) -> Columns:
        self.flush()
        if not self._blocks:
            return {name: np.empty(0, dtype) for name, dtype in self.dtypes.items()}
        if len(self._blocks) > 1:
            self._blocks = [{n: np.concatenate([b[n] for b in self._blocks]) for n in self.dtypes}]
        return self._blocks[0]


@dataclass
class Log:
    """The tables a run fills."""

    launches: Table = field(default_factory=lambda: Table(LAUNCH_DTYPES))
    deliveries: Table = field(default_factory=lambda: Table(DELIVERY_DTYPES))


@dataclass
class Result:
    """One finished run: its rows, and where they came from."""

    experiment: Any  # the Experiment that made it
    requests: Columns
    deliveries: Columns
    launches: Columns
    meta: dict[str, Any]  # profile, foundation ("roofline, not measured"), clock, gpus, kv capacity, …


def request_columns(requests: Iterable[Request]) -> Columns:
    """The finished requests as columns, in their order."""
    rows: Sequence[Request] = list(requests)
    columns: Columns = {}
    for name, dtype in REQUEST_DTYPES.items():
        if name in STAGES:
            whole = np.fromiter(map(attrgetter(name.removesuffix("_s") + "_ns"), rows), "i8", len(rows))
            columns[name] = whole * 1e-9
        else:
            columns[name] = np.fromiter(map(attrgetter(name), rows), dtype, len(rows))
    return columns


def merged(table: Table, block: Columns, order: tuple[str, ...]) -> Columns:
    """A table's rows and a block of more, by time: the last of the columns in `order`, ties by those before it."""
    columns = table.columns()
    if block:
        columns = {name: np.concatenate([columns[name], block[name].astype(dtype)]) for name, dtype in table.dtypes.items()}
    time = columns[order[-1]]
    by_time = np.argsort(time, kind="stable")
    if np.any(np.diff(time[by_time]) == 0):
        by_time = np.lexsort([columns[name] for name in order])
    return {name: column[by_time] for name, column in columns.items()}
