"""Transfer of a real run's rows to a page, over a local socket that only this user can open.

The run's loop writes when it is idle, never waits, and drops a page that does not read. It sends raw rows; the page's
process computes the metrics. A message is a line of JSON, followed by the bytes of rows that it announces.
"""

from __future__ import annotations

import json
import math
import os
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.common.commandline import experiment_from
from pdvsim.live.gauge import SLOT_S, Gauge
from pdvsim.live.station import cache_of, queues_of, seen_by
from pdvsim.sim.client import Client
from pdvsim.sim.core import Request
from pdvsim.sim.records import REQUEST_DTYPES, Deliveries, Launches, Log, rows_of
from pdvsim.study.output import plain, settings

if TYPE_CHECKING:
    from pdvsim.realrun.site import RealSite

EVERY_S = 0.2
OVERDUE_S = 1.0
MOST_BYTES = 1 << 22  # most unread bytes of a page
REQUEST = (
    "id", "arrival_s", "first_token_s", "finish_s", "prompt_tokens", "output_tokens", "num_cached_tokens",
)  # fmt: skip
CARD = {
    "gpu_percent": "SM busy (%)",
    "memory_percent": "memory busy (%)",
    "power_w": "power (W)",
    "sm_mhz": "SM clock (MHz)",
}
Message = tuple[dict[str, Any], bytes, bytes]  # header, and packed rows of launches and deliveries


def socket_path() -> Path:
    """Socket of a real run, in a private folder of this user; an OSError if it is not private."""
    folder = Path(tempfile.gettempdir()) / f"pdvsim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    entry = folder.lstat()
    if entry.st_uid != os.getuid() or stat.S_IMODE(entry.st_mode) & 0o077 or not stat.S_ISDIR(entry.st_mode):
        raise OSError(f"{folder} must be a folder that only you can access")
    return folder / "live.sock"


class Broadcast:
    """An event source without events that sends new rows to the listeners when idle."""

    def __init__(self, site: RealSite, client: Client) -> None:
        self.site, self.client = site, client
        self.sent: list[Request] = []
        self.finished: list[Request] = []
        self._known: set[int] = set()
        self._due_s = 0.0
        self.cost_s = 0.0  # host time so far
        self._listeners: list[_Listener] = []
        self._told = site.on_finish
        site.on_finish = self._finished
        path = socket_path()
        path.unlink(missing_ok=True)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(path))
        self._door.listen()
        self._door.setblocking(False)

    def poll(self) -> bool:
        if self.site.env.now >= self._due_s + OVERDUE_S:  # also if the run is never idle
            self._tell_and_rest()
        return False

    def rest(self) -> None:
        """Send new rows, if it is time."""
        if self.site.env.now >= self._due_s:
            self._tell_and_rest()

    def _tell_and_rest(self) -> None:
        self.tell()
        self._due_s = self.site.env.now + EVERY_S

    def tell(self) -> None:
        """Send new rows to all pages."""
        began_s = perf_counter()
        with suppress(BlockingIOError):
            self._listeners.append(_Listener(self._door.accept()[0], self))
        for request in self.client.inside.values():
            self._notice(request)
        for listener in self._listeners:
            listener.tell(self.site.env.now)
        self._listeners = [listener for listener in self._listeners if listener.there]
        self.cost_s += perf_counter() - began_s

    def close(self) -> None:
        """The run has ended: send the rest and close."""
        self.tell()
        for listener in self._listeners:
            listener.finish()
        self._door.close()
        socket_path().unlink(missing_ok=True)

    def _finished(self, request: Request) -> None:
        self._notice(request)
        self.finished.append(request)
        self._told(request)

    def _notice(self, request: Request) -> None:
        if request.id not in self._known:
            self._known.add(request.id)
            self.sent.append(request)


class _Listener:
    """One page, and the rows sent to it."""

    def __init__(self, to: socket.socket, of: Broadcast) -> None:
        to.setblocking(False)
        self.there = True
        self._to, self._of = to, of
        self._launches = self._deliveries = self._sent = self._finished = 0
        self._judged = [0, 0]
        site = of.site
        hello = {"config": settings(site.experiment), "bandwidth": site.profile.gpu.bandwidth_bytes_per_s}
        self._unsent = _message(plain(hello))

    def tell(self, now_s: float) -> None:
        site, of = self._of.site, self._of
        arrived, done = of.sent[self._sent :], of.finished[self._finished :]
        self._sent, self._finished = len(of.sent), len(of.finished)
        for request in done:
            self._judged = [self._judged[0] + request.accepted, self._judged[1] + request.refused]
        log, kv, card = site.log, site.context.kv, site.device.telemetry.latest
        launches, deliveries = log.launches.packed(self._launches), log.deliveries.packed(self._deliveries)
        self._launches, self._deliveries = len(log.launches), len(log.deliveries)
        inside = of.client.inside.values()
        told = {
            "now_s": now_s,
            "arrived": [(request.id, request.arrival_s) for request in arrived],
            "finished": [[getattr(request, name) for name in REQUEST] for request in done],
            "accepted": self._judged[0] + sum(request.accepted for request in inside),
            "refused": self._judged[1] + sum(request.refused for request in inside),
            "in_system": len(inside),
            "kv_share": kv.used_tokens / max(1, kv.capacity_tokens),
            "queues": queues_of(site.servers),
            "controller": seen_by(site.servers[0]),
            "cache": cache_of([kv]),
            "card": {words: card[name] for name, words in CARD.items() if name in card},
        }
        self._unsent += _message(told, launches, deliveries)
        try:
            self._unsent = self._unsent[self._to.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.there = False
        if len(self._unsent) > MOST_BYTES:
            self.close()

    def finish(self) -> None:
        """Send the rest, blocking, as the run has ended."""
        self._to.settimeout(2)
        with suppress(OSError):
            self._to.sendall(self._unsent)
        self.close()

    def close(self) -> None:
        self.there = False
        self._to.close()


def connected() -> socket.socket:
    """A connection to the current real run; an OSError if there is none."""
    to = socket.socket(socket.AF_UNIX)
    to.settimeout(10)
    to.connect(str(socket_path()))
    return to


class Heard:
    """The receiving end: metrics of a real run."""

    def __init__(self, connection: socket.socket) -> None:
        self._from, self._rest = connection, bytearray()
        self.over = self._greeted = False
        while (hello := self._message()) is None:
            self._receive()
        # trusted: from a process of the same user
        self.experiment = experiment_from(hello[0]["config"], own_policies=True)
        self.gauge = Gauge(Log(), self.experiment.scoring.slo(), [hello[0]["bandwidth"]])
        self.card: dict[str, float] = {}
        self._from.setblocking(False)

    def listen(self) -> None:
        """Read what was sent."""
        with suppress(BlockingIOError):
            while not self.over:
                self._receive()
        while (told := self._message()) is not None:
            self._take(*told)

    def _receive(self) -> None:
        """Read once; a ValueError if the run is silent or ends before it sent anything."""
        try:
            part = self._from.recv(1 << 20)
        except BlockingIOError:
            raise
        except TimeoutError:
            raise ValueError("the real run does not answer") from None
        except OSError:
            part = b""
        if not part and not self._greeted:
            raise ValueError("the real run has ended")
        self.over = not part
        self._rest += part

    def _message(self) -> Message | None:
        """The next complete message: header, and rows of launches and deliveries."""
        end = self._rest.find(b"\n") + 1
        if not end:
            return None
        document = json.loads(bytes(self._rest[:end]))
        middle = end + document["launches"]
        last = middle + document["deliveries"]
        if len(self._rest) < last:
            return None
        message = document, bytes(self._rest[end:middle]), bytes(self._rest[middle:last])
        del self._rest[:last]
        self._greeted = True
        return message

    def _take(self, told: dict[str, Any], launches: bytes, deliveries: bytes) -> None:
        """Count every row in the slot of its time, as for a simulated run; late rows count in the first slot."""
        gauge, now_s = self.gauge, float(told["now_s"])
        columns = zip(*told["finished"], strict=True) if told["finished"] else [()] * len(REQUEST)
        finished = {n: np.array(column, REQUEST_DTYPES[n]) for n, column in zip(REQUEST, columns, strict=True)}
        tables = (
            (Launches.unpacked(launches), "end_s", gauge.launched),
            (Deliveries.unpacked(deliveries), "time_s", gauge.delivered),
            (finished, "finish_s", gauge.left),
        )
        from_s = -math.inf
        while from_s < now_s:
            to_s = min(now_s, gauge.slots[-1].start_s + SLOT_S)
            for id, arrival_s in told["arrived"]:
                if from_s < arrival_s <= to_s:
                    gauge.arrived(Request(id, arrival_s, 1, 1, b""))
            for rows, when, take in tables:
                take(rows_of(rows, (rows[when] > from_s) & (rows[when] <= to_s)))
            gauge.now_s, from_s = to_s, to_s
            yet = sum(arrival_s > to_s for _, arrival_s in told["arrived"]) - int((finished["finish_s"] > to_s).sum())
            state = told["in_system"] - yet, told["kv_share"], told["queues"], told["controller"], told["cache"]
            gauge.noted(*state)
            if to_s < now_s:
                gauge.next_slot()
                gauge.noted(*state)
        gauge.judged(told["accepted"], told["refused"])
        self.card = told["card"]


def _message(document: dict[str, Any], launches: bytes = b"", deliveries: bytes = b"") -> bytes:
    sizes = {"launches": len(launches), "deliveries": len(deliveries)}
    return json.dumps(document | sizes).encode() + b"\n" + launches + deliveries
