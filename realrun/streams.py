"""The streams that a policy's lanes launch on: of their own priorities, or on parts of the GPU of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from pdvsim.realrun.engine.engine import Engine
from pdvsim.realrun.engine.graphs import GraphLane, OrderedStreams
from pdvsim.realrun.memory import LaneRole
from pdvsim.sim.config import Server
from pdvsim.sim.core import Role
from pdvsim.sim.machine.lane import HIGHEST, PRIORITY

SM_SHARES = {"decode": 0.4, "verify": 0.4, "prefill": 0.2}  # with --priority partition
SM_GROUP = 8  # multiprocessors are given out in groups of this many
RESOURCE_BYTES = 144  # the driver's CUdevResource: its kind first, its multiprocessors at 96


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
