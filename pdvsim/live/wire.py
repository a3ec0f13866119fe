"""A real run's rows on their way to a page: over a local socket that only this user can open, a line of JSON at a time.

The run's own loop writes when nothing is due, never waits, and drops a page that does not read. It sends rows, not
figures: those are made by the page's process.
"""

from __future__ import annotations

import json
import math
import os
import socket
import stat
import tempfile
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.live.gauge import SLOT_S, Gauge
from pdvsim.live.station import queues_of, seen_by
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Host, Scoring, Server, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.records import DELIVERY_DTYPES, LAUNCH_DTYPES, REQUEST_DTYPES, Log, request_columns
from pdvsim.sim.run import Client
from pdvsim.study.output import plain, settings

if TYPE_CHECKING:
    from pdvsim.realrun.site import RealSite

EVERY_S = 0.2
OVERDUE_S = 1.0
MOST_BYTES = 1 << 22  # that a page may leave unread
LAUNCH = ("lane", "kind", "rows", "tokens", "steps", "queue_depth", "start_s", "end_s", "bytes")
REQUEST = ("id", "arrival_s", "first_token_s", "finish_s", "output_tokens")
CARD = {
    "gpu_percent": "SM busy (%)",
    "memory_percent": "memory busy (%)",
    "power_w": "power (W)",
    "sm_mhz": "SM clock (MHz)",
}
GROUPS: dict[str, type] = {
    "traffic": Traffic, "acceptance": Acceptance, "server": Server, "hardware": Hardware, "host": Host,
    "scoring": Scoring,
}  # fmt: skip


def socket_path() -> Path:
    """Where a real run can be listened to: in a folder that is this user's alone; an OSError if it is not."""
    folder = Path(tempfile.gettempdir()) / f"pdvsim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{folder} must be a folder that only you can open")
    return folder / "live.sock"


class Broadcast:
    """A source of no events, asked to do its chores: tells who listens what is new."""

    def __init__(self, site: RealSite, client: Client) -> None:
        self.site, self.client = site, client
        self.sent: list[Request] = []
        self.finished: list[Request] = []
        self._known: set[int] = set()
        self._due_s = 0.0
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
        if self.site.env.now >= self._due_s + OVERDUE_S:  # a run with no moment to spare is still shown
            self._tell_and_rest()
        return False

    def rest(self) -> None:
        """Tell what is new, if it is time."""
        if self.site.env.now >= self._due_s:
            self._tell_and_rest()

    def _tell_and_rest(self) -> None:
        self.tell()
        self._due_s = self.site.env.now + EVERY_S

    def tell(self) -> None:
        """Tell everyone what is new to them."""
        with suppress(BlockingIOError):
            self._listeners.append(_Listener(self._door.accept()[0], self))
        for request in self.client.inside.values():
            self._notice(request)
        for listener in self._listeners:
            listener.tell(self.site.env.now)
        self._listeners = [listener for listener in self._listeners if listener.there]

    def close(self) -> None:
        """The run is over: tell the rest, and go."""
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
    """One page, and what it has been told."""

    def __init__(self, to: socket.socket, of: Broadcast) -> None:
        to.setblocking(False)
        self.there = True
        self._to, self._of = to, of
        self._launches = self._deliveries = self._sent = self._finished = 0
        self._judged = [0, 0]
        site = of.site
        hello = {"config": settings(site.experiment), "bandwidth": site.profile.gpu.bandwidth_bytes_per_s}
        self._unsent = _line(hello)

    def tell(self, now_s: float) -> None:
        site, of = self._of.site, self._of
        arrived, done = of.sent[self._sent :], of.finished[self._finished :]
        self._sent, self._finished = len(of.sent), len(of.finished)
        for request in done:
            self._judged = [self._judged[0] + request.accepted, self._judged[1] + request.refused]
        launches, deliveries = site.log.launches.since(self._launches), site.log.deliveries.since(self._deliveries)
        self._launches += len(launches["lane"])
        self._deliveries += len(deliveries["request"])
        finished, kv, card = request_columns(done), site.context.kv, site.device.telemetry.latest
        inside = of.client.inside.values()
        told = {
            "now_s": now_s,
            "arrived": [(request.id, request.arrival_s) for request in arrived],
            "launches": {name: launches[name].tolist() for name in LAUNCH},
            "deliveries": {name: column.tolist() for name, column in deliveries.items()},
            "finished": {name: finished[name].tolist() for name in REQUEST},
            "accepted": self._judged[0] + sum(request.accepted for request in inside),
            "refused": self._judged[1] + sum(request.refused for request in inside),
            "in_system": len(inside),
            "kv_share": kv.used_tokens / max(1, kv.capacity_tokens),
            "queues": queues_of(site.servers),
            "controller": seen_by(site.servers[0]),
            "card": {words: card[name] for name, words in CARD.items() if name in card},
        }
        self._unsent += _line(told)
        try:
            self._unsent = self._unsent[self._to.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.there = False
        if len(self._unsent) > MOST_BYTES:
            self.close()

    def finish(self) -> None:
        """Send what is unsent: there is nothing left to disturb."""
        self._to.settimeout(2)
        with suppress(OSError):
            self._to.sendall(self._unsent)
        self.close()

    def close(self) -> None:
        self.there = False
        self._to.close()


def connected() -> socket.socket:
    """A connection to the real run under way; an OSError if there is none."""
    to = socket.socket(socket.AF_UNIX)
    to.settimeout(10)
    to.connect(str(socket_path()))
    return to


class Heard:
    """The other end: what a real run tells, as figures."""

    def __init__(self, connection: socket.socket) -> None:
        self._from, self._rest = connection, b""
        self.over = False
        hello = json.loads(self._lines(True)[0])
        self.experiment = experiment_of(hello["config"])
        self.gauge = Gauge(Log(), self.experiment.scoring.slo(), hello["bandwidth"])
        self.card: dict[str, float] = {}
        self._from.setblocking(False)

    def listen(self) -> None:
        """Take in what has been told."""
        for line in self._lines(False):
            self._take(json.loads(line))

    def _lines(self, one: bool) -> list[bytes]:
        """Whole lines that are there; the first where `one` is waited for."""
        while True:
            try:
                part = self._from.recv(1 << 20)
            except BlockingIOError:
                break
            except TimeoutError:
                raise ValueError("the real run does not answer") from None
            except OSError:
                part = b""
            if not part:
                self.over = True
                break
            self._rest += part
            if one and b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                return [line]
        if one:
            raise ValueError("the real run has ended")
        *lines, self._rest = self._rest.split(b"\n")
        return lines

    def _take(self, told: dict[str, Any]) -> None:
        gauge, now_s = self.gauge, float(told["now_s"])
        while gauge.slots[-1].start_s + SLOT_S <= now_s:  # as slots of a simulated run
            gauge.now_s = gauge.slots[-1].start_s + SLOT_S
            gauge.next_slot()
            gauge.noted(told["in_system"], told["kv_share"], told["queues"], told["controller"])
        for id, arrival_s in told["arrived"]:
            gauge.arrived(Request(id, arrival_s, 1, 1, b""))
        gauge.launched({name: np.array(told["launches"][name], LAUNCH_DTYPES[name]) for name in LAUNCH})
        gauge.delivered({n: np.array(told["deliveries"][n], dtype) for n, dtype in DELIVERY_DTYPES.items()})
        gauge.left({name: np.array(told["finished"][name], REQUEST_DTYPES[name]) for name in REQUEST})
        gauge.judged(told["accepted"], told["refused"])
        gauge.noted(told["in_system"], told["kv_share"], told["queues"], told["controller"])
        gauge.now_s, self.card = now_s, told["card"]


def experiment_of(config: dict[str, Any]) -> Experiment:
    """The experiment that settings in plain values describe."""
    groups = {}
    for name, kind in GROUPS.items():
        given = {f.name: config[name][f.name] for f in fields(kind) if f.name in config[name]}
        groups[name] = kind(**{key: _plain_value(value) for key, value in given.items()})
    return Experiment(config["arch"], **groups)


def _plain_value(value: Any) -> Any:
    return math.inf if value == "inf" else tuple(value) if isinstance(value, list) else value


def _line(document: dict[str, Any]) -> bytes:
    return json.dumps(plain(document), separators=(",", ":")).encode() + b"\n"
