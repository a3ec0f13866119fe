"""A run as a timeline for ui.perfetto.dev, in Chrome's trace format, times in microseconds.

Each GPU is a process with one track per lane; the host is one process, and the requests are one with a track each. A
request's track holds its stages and, inside them, its launches. An arrow leads from a request through those launches,
in their order. Requests in flight and the queue of each lane are counters.

Slices of one track nest and never overlap, as Perfetto wants it; all times are whole nanoseconds, so rounding breaks
nothing. An arrow's ends and steps lie in the middle of their slices: Perfetto binds them to what is open there. Comes
piece by piece: the trace is as long as the run, the memory is not. The requests of a launch are kept only where a run
was `traced`, and so is what the host did; a real host's time is not recorded. Without them there are no arrows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import KINDS
from pdvsim.sim.records import LANES, ROLES, Carried, Result, Table, parts, rows_of

GPUS_PER_REPLICA = 1 << 13  # room between the process numbers of two replicas
HOSTS, REQUESTS = 1 << 24, 1 << 25  # process numbers of the replicas' hosts and requests
DRAFT = ROLES.index("draft")
PREFILL = KINDS.index("prefill")

Nanoseconds = NDArray[np.int64]


def trace(result: Result) -> Iterator[bytes]:
    """`result` as Chrome trace JSON, piece by piece."""
    header = {name: str(result.meta[name]) for name in ("profile", "foundation", "clock") if name in result.meta}
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(header)},"traceEvents":[\n'.encode()
    yield ",\n".join(_names(result.launches)).encode()
    for lines in chain(_launches(result), _counters(result), _host(result), _requests(result)):
        if lines:
            yield (",\n" + ",\n".join(lines)).encode()
    yield b"\n]}\n"


def _names(launches: Table) -> list[str]:
    """Metadata: what the GPUs' processes and tracks are called, GPUs and lanes in order."""
    keys = np.unique((_pids(launches) - 1) * len(LANES) + launches["lane"]).tolist()
    places = [(*divmod(key // len(LANES), GPUS_PER_REPLICA), key % len(LANES)) for key in keys]
    replicas = {r for r, _, _ in places} | {0}
    lines = []
    for r, g in sorted({(r, g) for r, g, _ in places} | {(r, 0) for r in replicas}):
        name = f"GPU {g}" if len(replicas) == 1 else f"replica {r}, GPU {g}"
        lines += _named("process", _pid(r, g), 0, name, _pid(r, g))
    for r, g, code in places:
        lines += _named("thread", _pid(r, g), code + 1, LANES[code], code + 1)
    return lines


def _named(what: str, pid: int, tid: int, name: str, order: int) -> list[str]:
    """The metadata of a process or a thread: its name, and where it stands."""
    place = {"ph": "M", "pid": pid, "tid": tid}
    return [
        json.dumps(place | {"name": f"{what}_name", "args": {"name": name}}),
        json.dumps(place | {"name": f"{what}_sort_index", "args": {"sort_index": order}}),
    ]


def _pid(replica: int, gpu: int) -> int:
    return replica * GPUS_PER_REPLICA + gpu + 1


def _pids(launches: Table) -> NDArray[np.int64]:
    """The process number of each launch's GPU."""
    return launches["replica"].astype(np.int64) * GPUS_PER_REPLICA + launches["gpu"] + 1


def _nanoseconds(times_s: NDArray[Any]) -> Nanoseconds:
    return np.rint(times_s * 1e9).astype(np.int64)


def _slice(name: str, category: str, pid: int, tid: int, start_ns: int, end_ns: int, args: str) -> str:
    """One complete event; `args` are JSON's members."""
    return (
        f'{{"ph":"X","name":"{name}","cat":"{category}","pid":{pid},"tid":{tid},"ts":{start_ns / 1e3:.3f},'
        f'"dur":{(end_ns - start_ns) / 1e3:.3f},"args":{{{args}}}}}'
    )


def _launches(result: Result) -> Iterator[list[str]]:
    number = 0
    for block in parts(result.launches):
        count = len(block["start_s"])
        carried = result.carried[number : number + count] if result.carried is not None else [None] * count
        columns = (
            block["kind"], block["role"], _pids(block), block["lane"] + 1, _nanoseconds(block["start_s"]),
            _nanoseconds(block["end_s"]), block["rows"], block["tokens"], block["steps"], block["queue_depth"],
            block["solo_s"] * 1e6,
        )  # fmt: skip
        lines = []
        rows_of = zip(*(column.tolist() for column in columns), strict=True)
        for at, (who, row) in enumerate(zip(carried, rows_of, strict=True), number):
            kind, role, process, lane, start, end, rows, tokens, steps, depth, solo = row
            name = f"{ROLES[role]} prefill" if kind == PREFILL else KINDS[kind]
            args = f'"launch":{at},"rows":{rows},"tokens":{tokens},"steps":{steps},"queue_depth":{depth}'
            args += f',"solo_us":{solo:.3f}'
            if who is not None:
                name += " + prefill" if who[1] and kind != PREFILL else ""
                args += f',"batch":{len(who[0]) + len(who[1])}'
                args += "".join(
                    f',"{what}":"{" ".join(map(str, ids))}"'
                    for what, ids in zip(("requests", "prompts_of"), who, strict=True)
                    if ids
                )
            lines.append(_slice(name, ROLES[role], process, lane, start, end, args))
        number += count
        yield lines


def _counters(result: Result) -> Iterator[list[str]]:
    """Requests queued at each lane; per replica, requests in the system and the share of prompts found in the cache."""
    launches, requests = result.launches, result.requests
    pids, lanes = _pids(launches), launches["lane"]
    for pid, lane in np.unique(np.column_stack((pids, lanes)), axis=0).tolist():
        here = (pids == pid) & (lanes == lane)
        depths = launches["start_s"][here], launches["queue_depth"][here]
        yield from _counter(f"{LANES[lane]} queue", pid, "requests", *depths)
    for replica in np.unique(requests["replica"]).tolist():
        own, pid = rows_of(requests, requests["replica"] == replica), _pid(replica, 0)
        left_s = own["finish_s"][own["finish_s"] >= 0]
        time_s = np.concatenate((left_s, own["arrival_s"]))  # leavers first: a stable sort keeps it so
        change = np.repeat((-1, 1), (len(left_s), len(own["id"])))
        order = np.argsort(time_s, kind="stable")
        yield from _counter("requests in flight", pid, "requests", time_s[order], change[order].cumsum())
        own = rows_of(own, own["num_cached_tokens"] >= 0)
        own = rows_of(own, np.argsort(own["admitted_s"], kind="stable"))
        found = 100 * own["num_cached_tokens"].cumsum() / own["prompt_tokens"].cumsum()
        yield from _counter("prefix cache hits so far (%)", pid, "percent", own["admitted_s"], found, ".2f")


def _counter(
    name: str, pid: int, key: str, times_s: NDArray[Any], values: NDArray[Any], form: str = ""
) -> Iterator[list[str]]:
    """The values of a counter, each from a time on."""
    for block in parts({"us": times_s * 1e6, "value": values}):
        yield [
            f'{{"ph":"C","name":"{name}","pid":{pid},"ts":{us:.3f},"args":{{"{key}":{value:{form}}}}}}'
            for us, value in zip(block["us"].tolist(), block["value"].tolist(), strict=True)
        ]


def _host(result: Result) -> Iterator[list[str]]:
    """Spans of each replica's host thread, one operation at a time."""
    spans = result.host or ()
    replicas = sorted({replica for replica, *_ in spans})
    for replica in replicas:
        name = "host" if len(replicas) == 1 else f"replica {replica}, host"
        yield [
            *_named("process", HOSTS + replica, 0, name, HOSTS + replica),
            *_named("thread", HOSTS + replica, 1, "thread", 1),
        ]
    for first in range(0, len(spans), 1 << 14):
        yield [
            _slice(what, "host", HOSTS + replica, 1, round(start_s * 1e9), round(end_s * 1e9), "")
            for replica, what, start_s, end_s in spans[first : first + (1 << 14)]
        ]


def _requests(result: Result) -> Iterator[list[str]]:
    """One track per request: its stages, the launches inside them, and its arrow through the launches."""
    requests, launches = result.requests, result.launches
    replicas = np.unique(requests["replica"]).tolist()
    for replica in replicas:
        name = "requests" if len(replicas) == 1 else f"replica {replica}, requests"
        yield _named("process", REQUESTS + replica, 0, name, REQUESTS + replica)
    starts, ends = (_nanoseconds(launches[name]).tolist() for name in ("start_s", "end_s"))
    rides = _rides(result.carried or (), starts, ends)
    kinds, roles = launches["kind"].tolist(), launches["role"].tolist()
    batches = launches["rows"].tolist()
    pids = _pids(launches).tolist()
    lanes = (launches["lane"] + 1).tolist()
    times = [_nanoseconds(requests[f"{name}_s"]) for name in ("arrival", "admitted", "first_token", "finish")]
    counted = ["prompt_tokens", "output_tokens", "rounds", "drafted", "accepted", "preemptions", "num_cached_tokens"]
    counted += ["session", "turn"] if (requests["session"] >= 0).any() else []
    for at, (id, replica) in enumerate(zip(requests["id"].tolist(), requests["replica"].tolist(), strict=True)):
        arrival, admitted, first, finish = (int(column[at]) for column in times)
        if finish < arrival:
            continue  # not served to its end
        pid, mine = REQUESTS + replica, rides.get(id, [])
        counts = ",".join(f'"{name}":{int(requests[name][at])}' for name in counted)
        lines = _named("thread", pid, id + 1, f"request {id}", id + 1)
        lines.append(_slice(f"request {id}", "request", pid, id + 1, arrival, finish, f'"id":{id},{counts}'))
        for stage, start, end in (
            ("queue", arrival, admitted),
            ("prefill", admitted, first),
            ("decode", first, finish),
        ):
            if end <= start:
                continue
            lines.append(_slice(stage, "stage", pid, id + 1, start, end, f'"id":{id}'))
            last_s, drafted = start, False
            for launch, reads in mine:
                kind = kinds[launch]
                if not start <= starts[launch] < end or (reads and roles[launch] == DRAFT):
                    continue  # the drafter prefills concurrently with the target
                begin, over = max(starts[launch], last_s), min(ends[launch], end)
                if over <= begin:
                    continue
                if drafted and begin > last_s and kind != PREFILL:
                    lines.append(_slice("wait for verify", "stage", pid, id + 1, last_s, begin, ""))
                word = "read" if reads else KINDS[kind]
                args = f'"launch":{launch},"rows":{batches[launch]}'
                lines.append(_slice(word, ROLES[roles[launch]], pid, id + 1, begin, over, args))
                last_s, drafted = over, KINDS[kind] == "draft"
        lines += _arrow(id, pid, admitted, [(pids[at], lanes[at], starts[at] + ends[at] >> 1) for at, _ in mine])
        yield lines


def _rides(carried: Sequence[Carried], starts: list[int], ends: list[int]) -> dict[int, list[tuple[int, bool]]]:
    """The launches that carried each request, in time order, without those of no duration; whether it read its prompt.

    Otherwise it was a row.
    """
    rides_of: dict[int, list[tuple[int, bool]]] = {}
    for launch, (rows, prompts) in enumerate(carried):
        if ends[launch] > starts[launch]:
            for ids, reads in ((rows, False), (prompts, True)):
                for id in ids:
                    rides_of.setdefault(id, []).append((launch, reads))
    for rides in rides_of.values():
        rides.sort(key=lambda ride: starts[ride[0]] + ends[ride[0]] >> 1)
    return rides_of


def _arrow(id: int, pid: int, admitted_ns: int, through: list[tuple[int, int, int]]) -> list[str]:
    """A flow from a request's track through its launches: one start, steps, one end, all with the request's number."""
    if not through or not 0 <= admitted_ns < through[0][2]:
        return []
    places = [(pid, id + 1, (admitted_ns + through[0][2]) // 2), *through]
    enclosing = ',"bp":"e"'
    marks = ["s", *("t" * (len(through) - 1)), "f"]
    return [
        f'{{"ph":"{mark}","id":{id},"name":"carried","cat":"carried","pid":{process},"tid":{thread},'
        f'"ts":{at_ns / 1e3:.3f}{enclosing if mark == "f" else ""}}}'
        for mark, (process, thread, at_ns) in zip(marks, places, strict=True)
    ]
