"""Links between the GPUs of a server: latency, bandwidth, and the queue for them; and the bytes that lanes exchange.

Each GPU has one port, full duplex. A transfer takes the sender's way out and the receiver's way in for its bytes over
the bandwidth, first come first served, and arrives a latency later.

All-reduces over NVLink take as long as published measurements on NVLink 4 by number of GPUs and bytes; NVLink 5 is
assumed to take as long, as most messages are short. Other links follow NCCL's ring model: two steps for each other GPU,
each with a latency and its part of the bytes.

Not modelled: concurrent transfers on a port, a switch or host bridge between the ports, the protocol's own bytes,
what a copy takes of the GPU's memory bandwidth, an engine that leaves small all-reduces to NCCL, quantised ones, and
steps within and between nodes that overlap.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

LinkName = Literal["nvlink4", "nvlink5", "pcie5", "pcie4", "infiniband-xdr", "400gbe", "100gbe"]


@dataclass(frozen=True)
class LinkSpec:
    """A kind of link; the bandwidth is of one direction."""

    latency_s: float
    bytes_per_s: float
    source: str
    hop_s: float = 0.0  # of the latency, what each further step of a ring adds


_TABLE = tomllib.loads((Path(__file__).parent / "data" / "links.toml").read_text(encoding="utf-8"))
LINKS: dict[LinkName, LinkSpec] = {name: LinkSpec(**link) for name, link in _TABLE["links"].items()}
SSD = LinkSpec(**_TABLE["ssd"])
ALL_REDUCES: dict[str, list[float]] = _TABLE["all_reduces"]  # by number of GPUs, microseconds over NVLink; and bytes
NVLINK5_CARDS = ("b200", "b300", "gb200", "gb300")
RACK = 72  # GPUs that NVLink joins in a GB200 or GB300 NVL72; elsewhere it joins those of a node
NODE = 8


def nvlink_of(card: str) -> tuple[LinkName, int]:
    """The NVLink of a card that has one, and how many GPUs it joins."""
    return "nvlink5" if card in NVLINK5_CARDS else "nvlink4", RACK if card in ("gb200", "gb300") else NODE


XDR_CARDS = ("b300", "gb300")  # whose systems have one ConnectX-8 per GPU; those of the others are taken as 400 Gb/s


def nodes_of(card: str, gpus: int) -> int:
    """Number of nodes, or racks of one NVLink, that `gpus` GPUs take."""
    return -(-gpus // nvlink_of(card)[1])


def between_nodes(card: str) -> LinkSpec:
    """The link of each GPU to those of other nodes."""
    return LINKS["infiniband-xdr" if card in XDR_CARDS else "400gbe"]


def gather_s(link: LinkSpec, nodes: int, size: float) -> float:
    """Seconds of a ring with one port per node, until each has all of `size` bytes of which it had its share."""
    return link.latency_s + (nodes - 2) * link.hop_s + (1 - 1 / nodes) * size / link.bytes_per_s


def all_reduce_s(link: LinkSpec, gpus: int, size: float) -> float:
    """Seconds until every GPU of a group has the sum of `size` bytes of each."""
    if gpus == 1:
        return 0.0
    if link in (LINKS["nvlink4"], LINKS["nvlink5"]):
        known = min(gpus, 8)  # a larger group takes as long for the same bytes sent by each GPU
        size *= (1 - 1 / gpus) / (1 - 1 / known)
        at, micros = ALL_REDUCES["bytes"], list(accumulate(ALL_REDUCES[str(known)], max))  # more is never faster
        if size >= at[-1]:
            return float(micros[-1] + (size - at[-1]) * (micros[-1] - micros[-2]) / (at[-1] - at[-2])) * 1e-6
        upper = max(1, bisect_right(at, size))
        slope = (micros[upper] - micros[upper - 1]) / (at[upper] - at[upper - 1])
        return (slope * (max(size, at[0]) - at[upper - 1]) + micros[upper - 1]) * 1e-6
    steps = 2 * (gpus - 1)
    return link.latency_s + (steps - 1) * link.hop_s + steps * size / gpus / link.bytes_per_s


TOKEN_BYTES = 4  # an int32
VERDICT_BYTES = 2 * TOKEN_BYTES  # how many drafts were accepted, and the target's own token


def draft_bytes(tokens: int) -> float:
    """Bytes of `tokens` draft tokens, from drafter to target. Verification is greedy, so probabilities are not sent."""
    return TOKEN_BYTES * tokens


def verdict_bytes(rows: int, catch_up: int = 0) -> float:
    """Bytes from target to drafter: each row's verdict, and `catch_up` tokens decoded without the drafter."""
    return VERDICT_BYTES * rows + TOKEN_BYTES * catch_up


class Piece(NamedTuple):
    """Bytes that come into being between two times, layer by layer."""

    begin_s: float
    end_s: float
    size: float


class Fabric:
    """The links of one server: when a transfer arrives, and how much went from where to where."""

    def __init__(self, spec: LinkSpec, gpus: int) -> None:
        self.spec = spec
        self._out_free_s = [0.0] * gpus
        self._in_free_s = [0.0] * gpus
        self.bytes: dict[tuple[int, int], float] = {}
        self.busy_s: dict[tuple[int, int], float] = {}

    def send(self, now_s: float, source: int, target: int, size: float) -> float:
        """Send `size` bytes that are ready now; returns when they have arrived. Calls come in order of time."""
        return self.stream(source, target, [Piece(now_s, now_s, size)])

    def stream(self, source: int, target: int, pieces: Iterable[Piece], layers: int = 1) -> float:
        """Send pieces as their layers come into being; returns when all have arrived.

        A piece can be under way once its first layer exists, and its last layer is sent after the end of the piece.
        """
        done_s, way = max(self._out_free_s[source], self._in_free_s[target]), (source, target)
        for begin_s, end_s, size in pieces:
            takes_s = size / self.spec.bytes_per_s
            first_s = begin_s + (end_s - begin_s) / layers
            done_s = max(max(done_s, first_s) + takes_s, end_s + takes_s / layers)
            self.bytes[way] = self.bytes.get(way, 0.0) + size
            self.busy_s[way] = self.busy_s.get(way, 0.0) + takes_s
        self._out_free_s[source] = self._in_free_s[target] = done_s
        return done_s + self.spec.latency_s

    def alone_s(self, size: float) -> float:
        """A transfer that meets no other."""
        return self.spec.latency_s + size / self.spec.bytes_per_s
