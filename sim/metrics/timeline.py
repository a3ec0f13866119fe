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
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import KINDS
from pdvsim.sim.records import LANES, ROLES, Carried, Columns, Result, Table, parts, rows_of

GPUS_PER_REPLICA = 1 << 13  # room between the process numbers of two replicas
HOSTS, REQUESTS = 1 << 24, 1 << 25  # process numbers of the replicas' hosts and requests
DRAFT = ROLES.index("draft")
PREFILL = KINDS.index("prefill")
EVENTS = 1 << 13  # of a piece

TraceEvent = dict[str, Any]


def trace(result: Result) -> Iterator[bytes]:
    """`result` as Chrome trace JSON, piece by piece."""
    header = {name: str(result.meta[name]) for name in ("profile", "foundation", "clock") if name in result.meta}
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(header)},"traceEvents":[\n'.encode()
    events = chain(_names(result.launches), _launches(result), _counters(result), _host(result), _requests(result))
    between, encode = "", json.JSONEncoder(separators=(",", ":")).encode
    while piece := list(islice(events, EVENTS)):
        yield (between + encode(piece)[1:-1]).encode()
        between = ",\n"
    yield b"\n]}\n"


def _names(launches: Table) -> Iterator[TraceEvent]:
    """Metadata: what the GPUs' processes and tracks are called, GPUs and lanes in order."""
    keys = np.unique((_pids(launches) - 1) * len(LANES) + launches["lane"]).tolist()
    places = [(*divmod(key // len(LANES), GPUS_PER_REPLICA), key % len(LANES)) for key in keys]
    replicas = {r for r, _, _ in places} | {0}
    for r, g in sorted({(r, g) for r, g, _ in places} | {(r, 0) for r in replicas}):
        name = f"GPU {g}" if len(replicas) == 1 else f"replica {r}, GPU {g}"
        yield from _named("process", _pid(r, g), 0, name, _pid(r, g))
    for r, g, code in places:
        yield from _named("thread", _pid(r, g), code + 1, LANES[code], code + 1)


def _named(what: str, pid: int, tid: int, name: str, order: int) -> Iterator[TraceEvent]:
    """The metadata of a process or a thread: its name, and where it stands."""
    place = {"ph": "M", "pid": pid, "tid": tid}
    yield place | {"name": f"{what}_name", "args": {"name": name}}
    yield place | {"name": f"{what}_sort_index", "args": {"sort_index": order}}


def _pid(replica: int, gpu: int) -> int:
    return replica * GPUS_PER_REPLICA + gpu + 1


def _pids(launches: Table) -> NDArray[np.int64]:
    """The process number of each launch's GPU."""
    return launches["replica"].astype(np.int64) * GPUS_PER_REPLICA + launches["gpu"] + 1


def _nanoseconds(times_s: NDArray[Any]) -> NDArray[np.int64]:
    return np.rint(times_s * 1e9).astype(np.int64)


def _slice(name: str, category: str, pid: int, tid: int, start_ns: int, end_ns: int, **args: Any) -> TraceEvent:
    """One complete event."""
    return {
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3, "args": args,
    }  # fmt: skip


def _launches(result: Result) -> Iterator[TraceEvent]:
    number = 0
    for block in parts(result.launches):
        count = len(block["start_s"])
        carried = result.carried[number : number + count] if result.carried is not None else [None] * count
        times_ns = {name: _nanoseconds(block[f"{name}_s"]).tolist() for name in ("start", "end")}
        args = {name: block[name].tolist() for name in ("rows", "tokens", "steps", "queue_depth")}
        args["solo_us"] = (block["solo_s"] * 1e6).round(3).tolist()
        kinds, roles, lanes = (block[name].tolist() for name in ("kind", "role", "lane"))
        for at, (who, pid) in enumerate(zip(carried, _pids(block).tolist(), strict=True)):
            name = f"{ROLES[roles[at]]} prefill" if kinds[at] == PREFILL else KINDS[kinds[at]]
            row = {"launch": number + at} | {what: column[at] for what, column in args.items()}
            if who is not None:
                rows, prompts = who
                name += " + prefill" if prompts and kinds[at] != PREFILL else ""
                named = {"requests": " ".join(map(str, rows)), "prompts_of": " ".join(map(str, prompts))}
                row |= {"batch": len(rows) + len(prompts)} | {what: ids for what, ids in named.items() if ids}
            yield _slice(name, ROLES[roles[at]], pid, lanes[at] + 1, times_ns["start"][at], times_ns["end"][at], **row)
        number += count


def _counters(result: Result) -> Iterator[TraceEvent]:
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
        yield from _counter("prefix cache hits so far (%)", pid, "percent", own["admitted_s"], found.round(2))


def _counter(name: str, pid: int, key: str, times_s: NDArray[Any], values: NDArray[Any]) -> Iterator[TraceEvent]:
    """The values of a counter, each from a time on."""
    for us, value in zip((times_s * 1e6).round(3).tolist(), values.tolist(), strict=True):
        yield {"ph": "C", "name": name, "pid": pid, "ts": us, "args": {key: value}}


def _host(result: Result) -> Iterator[TraceEvent]:
    """Spans of each replica's host thread, one operation at a time."""
    spans = result.host or ()
    replicas = sorted({replica for replica, *_ in spans})
    for replica in replicas:
        name = "host" if len(replicas) == 1 else f"replica {replica}, host"
        yield from _named("process", HOSTS + replica, 0, name, HOSTS + replica)
        yield from _named("thread", HOSTS + replica, 1, "thread", 1)
    for replica, what, start_s, end_s in spans:
        yield _slice(what, "host", HOSTS + replica, 1, round(start_s * 1e9), round(end_s * 1e9))


def _requests(result: Result) -> Iterator[TraceEvent]:
    """One track per request: its stages, the launches inside them, and its arrow through the launches."""
    requests, launches = result.requests, result.launches
    replicas = np.unique(requests["replica"]).tolist()
    for replica in replicas:
        name = "requests" if len(replicas) == 1 else f"replica {replica}, requests"
        yield from _named("process", REQUESTS + replica, 0, name, REQUESTS + replica)
    columns: Columns = {name: launches[name] for name in ("kind", "role", "rows", "lane")}
    columns |= {"start": _nanoseconds(launches["start_s"]), "end": _nanoseconds(launches["end_s"])}
    columns |= {"middle": columns["start"] + columns["end"] >> 1, "pid": _pids(launches)}
    works = {name: column.tolist() for name, column in columns.items()}
    rides_of = _rides(result.carried or (), works["start"], works["end"], works["middle"])
    times = [_nanoseconds(requests[f"{name}_s"]) for name in ("arrival", "admitted", "first_token", "finish")]
    counted = ["prompt_tokens", "output_tokens", "rounds", "drafted", "accepted", "preemptions", "num_cached_tokens"]
    counted += ["session", "turn"] if (requests["session"] >= 0).any() else []
    for at, (id, replica) in enumerate(zip(requests["id"].tolist(), requests["replica"].tolist(), strict=True)):
        arrival, admitted, first, finish = (int(column[at]) for column in times)
        if finish < arrival:
            continue  # not served to its end
        pid, rides = REQUESTS + replica, rides_of.get(id, [])
        counts = {name: int(requests[name][at]) for name in counted}
        yield from _named("thread", pid, id + 1, f"request {id}", id + 1)
        yield _slice(f"request {id}", "request", pid, id + 1, arrival, finish, id=id, **counts)
        for stage, start, end in (
            ("queue", arrival, admitted),
            ("prefill", admitted, first),
            ("decode", first, finish),
        ):
            if end > start:
                yield _slice(stage, "stage", pid, id + 1, start, end, id=id)
                yield from _stage(works, rides, pid, id + 1, start, end)
        through = [tuple(works[name][launch] for name in ("pid", "lane", "middle")) for launch, _ in rides]
        if through and 0 <= admitted < through[0][2]:  # from the request's track through its launches
            places = [(pid, id, (admitted + through[0][2]) // 2), *through]
            marks = [{"ph": "s"}, *([{"ph": "t"}] * (len(through) - 1)), {"ph": "f", "bp": "e"}]
            for mark, (process, thread, at_ns) in zip(marks, places, strict=True):
                flow = {"id": id, "name": "carried", "cat": "carried", "pid": process, "tid": thread + 1}
                yield mark | flow | {"ts": at_ns / 1e3}


def _stage(
    works: dict[str, list[int]], rides: Sequence[tuple[int, bool]], pid: int, tid: int, start: int, end: int
) -> Iterator[TraceEvent]:
    """The launches of a request in one of its stages, and its waits for a verify."""
    last, drafted = start, False
    for launch, reads in rides:
        kind, role, began = works["kind"][launch], works["role"][launch], works["start"][launch]
        if not start <= began < end or (reads and role == DRAFT):
            continue  # the drafter prefills concurrently with the target
        begin, over = max(began, last), min(works["end"][launch], end)
        if over <= begin:
            continue
        if drafted and begin > last and kind != PREFILL:
            yield _slice("wait for verify", "stage", pid, tid, last, begin)
        word = "read" if reads else KINDS[kind]
        yield _slice(word, ROLES[role], pid, tid, begin, over, launch=launch, rows=works["rows"][launch])
        last, drafted = over, KINDS[kind] == "draft"


def _rides(
    carried: Sequence[Carried], starts: list[int], ends: list[int], middles: list[int]
) -> dict[int, list[tuple[int, bool]]]:
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
        rides.sort(key=lambda ride: middles[ride[0]])
    return rides_of
