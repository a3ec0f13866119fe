"""A run as a timeline for ui.perfetto.dev: Chrome's trace format, one process a GPU, one track a lane.

Launches are complete events ("X", microseconds); requests in flight and the queue behind each lane are counters
("C"). Comes piece by piece: the trace is as long as the run, the memory is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from pdvsim.sim.core import KINDS
from pdvsim.sim.records import LANES, ROLES, Columns, Result, Table, parts

GPUS_PER_REPLICA = 16  # room between the process numbers of two replicas


def trace(result: Result) -> Iterator[bytes]:
    """`result` as Chrome trace JSON, piece by piece."""
    header = {name: str(result.meta[name]) for name in ("profile", "foundation", "clock") if name in result.meta}
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(header)},"traceEvents":[\n'.encode()
    yield ",\n".join(_names(result.launches)).encode()
    for lines in chain(_launches(result.launches), _queues(result.launches), _in_flight(result.requests)):
        if lines:
            yield (",\n" + ",\n".join(lines)).encode()
    yield b"\n]}\n"


def _names(launches: Table) -> list[str]:
    """Metadata: what the processes and tracks are called, GPUs and lanes in order."""
    replica, gpu, lane = (launches[name] for name in ("replica", "gpu", "lane"))
    keys = np.unique((replica.astype(np.int64) * GPUS_PER_REPLICA + gpu) * len(LANES) + lane).tolist()
    places = [(*divmod(key // len(LANES), GPUS_PER_REPLICA), key % len(LANES)) for key in keys]
    replicas = {r for r, _, _ in places} | {0}
    lines = []
    for r, g in sorted({(r, g) for r, g, _ in places} | {(r, 0) for r in replicas}):
        name = f"GPU {g}" if len(replicas) == 1 else f"replica {r}, GPU {g}"
        lines.append(_meta("process_name", _pid(r, g), 0, {"name": name}))
        lines.append(_meta("process_sort_index", _pid(r, g), 0, {"sort_index": _pid(r, g)}))
    for r, g, code in places:
        lines.append(_meta("thread_name", _pid(r, g), code + 1, {"name": LANES[code]}))
        lines.append(_meta("thread_sort_index", _pid(r, g), code + 1, {"sort_index": code + 1}))
    return lines


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args})


def _pid(replica: int, gpu: int) -> int:
    return replica * GPUS_PER_REPLICA + gpu + 1


def _launches(launches: Table) -> Iterator[list[str]]:
    for block in parts(launches):
        # Ends are rounded, not lengths: neighbours that touch must not overlap by a nanosecond after rounding.
        start_ns, end_ns = (np.rint(block[name] * 1e9).astype(np.int64) for name in ("start_s", "end_s"))
        pid = block["replica"].astype(np.int64) * GPUS_PER_REPLICA + block["gpu"] + 1
        columns = (
            block["kind"],
            block["role"],
            pid,
            block["lane"] + 1,
            start_ns / 1e3,
            (end_ns - start_ns) / 1e3,
            block["rows"],
            block["tokens"],
            block["steps"],
            block["queue_depth"],
            block["solo_s"] * 1e6,
        )
        yield [
            f'{{"ph":"X","name":"{KINDS[kind]}","cat":"{ROLES[role]}","pid":{pid},"tid":{tid},"ts":{ts:.3f},'
            f'"dur":{dur:.3f},"args":{{"rows":{rows},"tokens":{tokens},"steps":{steps},"queue_depth":{depth},'
            f'"solo_us":{solo:.3f}}}}}'
            for kind, role, pid, tid, ts, dur, rows, tokens, steps, depth, solo in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]


def _queues(launches: Table) -> Iterator[list[str]]:
    """Requests left waiting behind each lane, at each of its launches."""
    for block in parts(launches, ["replica", "gpu", "lane", "queue_depth", "start_s"]):
        pid = block["replica"].astype(np.int64) * GPUS_PER_REPLICA + block["gpu"] + 1
        columns = (pid, block["lane"], block["start_s"] * 1e6, block["queue_depth"])
        yield [
            f'{{"ph":"C","name":"{LANES[lane]} queue","pid":{pid},"ts":{ts:.3f},"args":{{"requests":{depth}}}}}'
            for pid, lane, ts, depth in zip(*(column.tolist() for column in columns), strict=True)
        ]


def _in_flight(requests: Columns) -> Iterator[list[str]]:
    """Requests in the system, per replica, at each arrival and finish."""
    for replica in np.unique(requests["replica"]).tolist():
        mine = requests["replica"] == replica
        left_s = requests["finish_s"][mine]
        left_s = left_s[left_s >= 0]
        time_s = np.concatenate((left_s, requests["arrival_s"][mine]))  # leavers first: a stable sort keeps it so
        change = np.repeat((-1, 1), (len(left_s), int(mine.sum())))
        order = np.argsort(time_s, kind="stable")
        for block in parts({"ts": time_s[order] * 1e6, "count": change[order].cumsum()}):
            yield [
                f'{{"ph":"C","name":"requests in flight","pid":{_pid(replica, 0)},"ts":{ts:.3f},'
                f'"args":{{"requests":{count}}}}}'
                for ts, count in zip(block["ts"].tolist(), block["count"].tolist(), strict=True)
            ]
