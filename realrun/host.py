# mypy: disable-error-code="no-untyped-call"
# (torch leaves streams untyped.)
"""The host's side of the real GPU: its thread, the streams it launches on, and how idle it leaves the GPU.

What an operation costs the host has been paid when it is over, so there is nothing to add up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdvsim.realrun.engine.engine import Engine
from pdvsim.realrun.engine.graphs import GraphLane, OrderedStreams
from pdvsim.realrun.memory import LaneRole
from pdvsim.sim.config import Server
from pdvsim.sim.core import Role
from pdvsim.sim.hardware.host import HostTimes, Operation, SimulatedHost
from pdvsim.sim.machine.lane import HIGHEST, PRIORITY
from pdvsim.sim.records import Columns

Floats = NDArray[np.float64]

SM_SHARES = {"decode": 0.4, "verify": 0.4, "prefill": 0.2}  # with --priority partition
SM_GROUP = 8  # multiprocessors are given out in groups of this many
RESOURCE_BYTES = 144  # the driver's CUdevResource: its kind first, its multiprocessors at 96
ROW_GROUPS = (1, 8, 32)  # least rows of the batches that are reported together


class RealHost(SimulatedHost):
    """Every operation is done when asked for: the clock has moved on by what it took."""

    def __init__(self) -> None:
        super().__init__(HostTimes())

    def spend(self, now_s: float, cost_s: float, operation: Operation) -> float:
        return now_s

    def idle(self, lanes: int) -> None:
        """Waiting lanes are woken by events and cost nothing."""

    def notice(self, idle_since_s: float, now_s: float) -> float:
        return now_s


def open_lanes(engines: dict[Role, Engine], places: Sequence[LaneRole], server: Server) -> dict[LaneRole, GraphLane]:
    """A lane for each place; those of the same name share a stream of the priority, or the part of the GPU, it has."""
    device = next(iter(engines.values())).device
    names = list(dict.fromkeys(lane for lane, _ in places))
    streams: dict[str, OrderedStreams] = {}
    if server.priority == "partition":
        parts = partitioned(device, {name: SM_SHARES[name] for name in names})
        streams = {name: OrderedStreams({0: stream}) for name, stream in parts.items()}
    elif device.type == "cuda":
        for name in names:
            own = PRIORITY[name] if server.priority in ("stream", "dynamic") else 0
            highest = HIGHEST if server.priority == "dynamic" else own
            streams[name] = OrderedStreams.of(device, range(own, highest + 1))
    return {(name, role): GraphLane(engines[role], 0, streams.get(name)) for name, role in places}


def partitioned(device: torch.device, shares: dict[str, float]) -> dict[str, torch.cuda.Stream]:
    """A stream on its own multiprocessors for each share, in green contexts.

    By the driver's own calls: `torch.cuda.green_contexts` gives every context the same first multiprocessors.
    """
    refusal = "--priority partition needs green contexts (CUDA 12.5 or newer and a data-centre card): {}; use stream"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        call = _caller(driver)
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.synchronize(device)  # the primary context is there
        handle = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(handle), index)
        whole = ctypes.create_string_buffer(512)
        call("cuDeviceGetDevResource", handle, whole, 1)  # 1: multiprocessors
        count = ctypes.c_uint(torch.cuda.get_device_properties(device).multi_processor_count // SM_GROUP)
        groups, left = ctypes.create_string_buffer(RESOURCE_BYTES * count.value), ctypes.create_string_buffer(512)
        # One split into small groups that are then put together: what a split leaves over cannot be split again.
        call("cuDevSmResourceSplitByCount", groups, ctypes.byref(count), whole, left, 0, SM_GROUP)
        if any(_number(groups, i * RESOURCE_BYTES + 96) != SM_GROUP for i in range(count.value)):
            raise RuntimeError(f"the driver's groups are not of {SM_GROUP} multiprocessors")
        streams: dict[str, torch.cuda.Stream] = {}
        begin = 0
        for name, size in group_counts(shares, count.value).items():
            description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
            mine = ctypes.byref(groups, begin * RESOURCE_BYTES)
            call("cuDevResourceGenerateDesc", ctypes.byref(description), mine, size)
            call("cuGreenCtxCreate", ctypes.byref(context), description, handle, 1)  # 1: with a default stream
            call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, 1, 0)  # 1: waits for no other stream
            streams[name] = torch.cuda.ExternalStream(stream.value, device=device)
            begin += size
    except (OSError, AttributeError, RuntimeError) as error:
        raise ValueError(refusal.format(str(error).splitlines()[0])) from None
    return streams


def group_counts(shares: dict[str, float], groups: int) -> dict[str, int]:
    """Return how many of the `groups` of multiprocessors each share gets: the nearest whole number, at least one."""
    if groups < len(shares):
        raise RuntimeError(f"{groups * SM_GROUP} multiprocessors are too few for {len(shares)} lanes")
    counts = {name: max(1, round(share * groups)) for name, share in shares.items()}
    while sum(counts.values()) > groups:
        many = [name for name in counts if counts[name] > 1]
        counts[max(many, key=lambda name: counts[name] - shares[name] * groups)] -= 1
    return counts


def _number(buffer: ctypes.Array[ctypes.c_char], at: int) -> int:
    return ctypes.c_uint.from_buffer(buffer, at).value


def _caller(driver: ctypes.CDLL) -> Callable[..., None]:
    def call(name: str, *values: object) -> None:
        code = getattr(driver, name)(*values)
        if code:
            raise RuntimeError(f"{name} failed with error {code}")

    return call


class Covered:
    """How much of the time before an instant lies inside any of some intervals."""

    def __init__(self, start_s: Floats, end_s: Floats) -> None:
        order = np.argsort(start_s, kind="stable")
        reach = np.maximum.accumulate(end_s[order])
        before = np.concatenate(([-np.inf], reach[:-1]))
        new_stretch = start_s[order] > before
        starts = start_s[order][new_stretch]
        ends = reach[np.concatenate((np.flatnonzero(new_stretch)[1:] - 1, [len(reach) - 1]))] if len(reach) else reach
        self._at = np.column_stack((starts, ends)).ravel()
        self._sum = np.column_stack((np.zeros_like(starts), ends - starts)).ravel().cumsum()

    def until(self, time_s: Floats) -> Floats:
        return np.interp(time_s, self._at, self._sum) if len(self._at) else np.zeros_like(time_s)


def idle_shares(launches: Columns, requests: Columns) -> dict[str, Any]:
    """Share of each round that the GPU had nothing to run while requests were there: overall, and by rows.

    A round ends with a target forward over rows and began with the end of the one before it. Gaps between the kernels
    of one launch are the GPU's own and do not count; copying inputs in and results out does.
    """
    rounds = (launches["role"] == 1) & (launches["rows"] > 0)
    if rounds.sum() < 2:
        return {}
    order = np.argsort(launches["end_s"][rounds], kind="stable")
    end_s, rows = launches["end_s"][rounds][order], launches["rows"][rounds][order][1:]
    served = requests["finish_s"] >= 0
    finish_s = np.where(served, requests["finish_s"], end_s[-1])
    came = requests["arrival_s"] < finish_s
    present_s = np.diff(Covered(requests["arrival_s"][came], finish_s[came]).until(end_s))
    busy = np.diff(Covered(launches["start_s"], launches["end_s"]).until(end_s))
    idle = np.clip(present_s - busy, 0.0, None)
    shares: dict[str, Any] = {"host_idle_share": _share(idle, present_s), "host_idle_s_per_round": float(idle.mean())}
    for low, high in zip(ROW_GROUPS, (*ROW_GROUPS[1:], np.inf), strict=True):
        group = (rows >= low) & (rows < high)
        if group.any():
            name = f"{low}_to_{int(high) - 1}" if np.isfinite(high) else f"{low}_and_more"
            shares[f"host_idle_share_{name}_rows"] = _share(idle[group], present_s[group])
    return shares


def _share(part: Floats, whole: Floats) -> float:
    return float(part.sum() / whole.sum()) if whole.sum() > 0 else 0.0
