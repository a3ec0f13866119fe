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
    "queue_depth": "i4",
    "start_s": "f8",
    "end_s": "f8",
    "solo_s": "f8",  # how long it would have taken alone
    "bytes": "f8",
    "flops": "f8",
}

DELIVERY_DTYPES: dict[str, str] = {"request": "i4", "tokens": "i2", "time_s": "f8"}


class Table:
    """Rows of numbers, appended one by one into one flat array."""

    __slots__ = ("_flat", "append", "dtypes")

    def __init__(self, dtypes: dict[str, str]) -> None:
        self.dtypes = dtypes
        self._flat = array("d")  # doubles hold every count exactly, and packing a row is one call
        self.append: Callable[[tuple[float, ...]], None] = self._flat.extend  # the hottest call of a run

    def columns(self) -> Columns:
        grid = (
            np.frombuffer(self._flat, "f8").reshape(-1, len(self.dtypes))
            if self._flat
            else np.empty((0, len(self.dtypes)))
        )
        return {name: grid[:, i].astype(dtype) for i, (name, dtype) in enumerate(self.dtypes.items())}


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


def request_columns(requests: Sequence[Request], more_ns: dict[str, NDArray[np.int64]]) -> Columns:
    """The requests as columns, in their order; `more_ns` is time by stage that is not in their own books."""
    columns: Columns = {}
    for name, dtype in REQUEST_DTYPES.items():
        if name in STAGES:
            stage = name.removesuffix("_s") + "_ns"
            spent = np.fromiter(map(attrgetter(stage), requests), "i8", len(requests))
            columns[name] = (spent + more_ns[stage] if stage in more_ns else spent) * 1e-9
        else:
            columns[name] = np.fromiter(map(attrgetter(name), requests), dtype, len(requests))
    return columns


def typed(columns: Columns, dtypes: dict[str, str]) -> Columns:
    """The columns in their own types and order."""
    return {name: columns[name].astype(dtype, copy=False) for name, dtype in dtypes.items()}


def merged(table: Table, blocks: Sequence[Columns], order: tuple[str, ...]) -> Columns:
    """A table's rows and blocks of more, by time: the last of the columns in `order`, ties by those before it."""
    parts = [table.columns(), *blocks]

    def joined(name: str) -> NDArray[Any]:
        return np.concatenate([part.pop(name) for part in parts])  # freed as they are joined

    keys = {name: joined(name) for name in order}
    time = keys[order[-1]]
    by_time = np.argsort(time, kind="stable")
    if np.any(np.diff(time[by_time]) == 0):
        by_time = np.lexsort([keys[name] for name in order])
    return {name: (keys.pop(name) if name in keys else joined(name))[by_time] for name in table.dtypes}
