"""What happened, as flat columns: one row a request, one a launch, one a delivery of tokens. Metrics come afterwards.

The simulator and the real GPU write the same rows. Deliveries hold what inter-token latency needs: request `request`
received `tokens` tokens at `time_s`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import KINDS, Kind, Request, Role

Columns = dict[str, NDArray[Any]]

LANES: tuple[str, ...] = ("prefill", "decode", "verify", "main")
ROLES: tuple[Role, ...] = ("draft", "target")

REQUEST_DTYPES: dict[str, str] = {
    "id": "i8",
    "replica": "i4",
    "arrival_s": "f8",
    "admitted_s": "f8",  # first work launched
    "first_token_s": "f8",
    "finish_s": "f8",
    "prompt_tokens": "i8",
    "output_tokens": "i8",
    "rounds": "i8",  # forwards of the target behind the prompt
    "drafts": "i8",  # of these, those that had drafts to verify
    "drafted": "i8",
    "accepted": "i8",
    "refused": "i8",  # at most one a round: what lies behind it is not judged
    "preemptions": "i8",
    "resumptions": "i8",  # readings to the end after a preemption, each of which gave the next token
    "recomputed_tokens": "i8",  # that left the KV cache with a preemption
    "prefill_s": "f8",  # the target reading the prompt, and after a preemption all tokens so far
    "draft_s": "f8",
    "wait_s": "f8",  # drafted, in the queue for verification
    "verify_s": "f8",
}

STAGES = ("prefill_s", "draft_s", "wait_s", "verify_s")  # whole nanoseconds in a request's own books

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

_ROW = np.dtype(list(LAUNCH_DTYPES.items()))
_HEAD = Struct("=5h")  # of a row: what it is
packed_launch = Struct(f"={_HEAD.size}siihiiiq5d").pack  # a row: its head, and the columns from `rows` on

DELIVERY_DTYPES: dict[str, str] = {"request": "i4", "tokens": "i2", "time_s": "f8"}


class Launches:
    """One row a launch, packed as its columns are, so that they need no copy."""

    def __init__(self) -> None:
        self._packed = bytearray()

    @staticmethod
    def head(replica: int, gpu: int, lane: str, kind: Kind, role: Role) -> bytes:
        """What a launch is, as its row begins."""
        return _HEAD.pack(replica, gpu, LANES.index(lane), KINDS.index(kind), ROLES.index(role))

    def append(self, row: bytes) -> None:
        """A row, as `packed_launch` makes it."""
        self._packed += row

    def __len__(self) -> int:
        return len(self._packed) // _ROW.itemsize

    def drain(self) -> Columns:
        """The rows so far as columns; they are no longer held here."""
        rows = np.frombuffer(self._packed, _ROW)
        self._packed = bytearray()
        return {name: rows[name] for name in LAUNCH_DTYPES}


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

    def drain(self) -> Columns:
        """The rows so far as columns; they are no longer held here."""
        parts: tuple[array[Any], ...] = (self._requests, self._tokens, self._times_s)
        columns: Columns = {
            name: np.frombuffer(values, dtype)
            for (name, dtype), values in zip(DELIVERY_DTYPES.items(), parts, strict=True)
        }
        self._requests, self._tokens, self._times_s = array("i"), array("h"), array("d")
        return columns


@dataclass
class Log:
    """The tables a run fills."""

    launches: Launches = field(default_factory=Launches)
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


def request_columns(requests: Sequence[Request]) -> Columns:
    """The requests as columns, in their order."""
    columns: Columns = {}
    for name, dtype in REQUEST_DTYPES.items():
        if name in STAGES:
            stage = name.removesuffix("_s") + "_ns"
            columns[name] = np.fromiter(map(attrgetter(stage), requests), "i8", len(requests)) * 1e-9
        else:
            columns[name] = np.fromiter(map(attrgetter(name), requests), dtype, len(requests))
    return columns
