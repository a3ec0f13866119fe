"""Requests sampled over time, from settings that may change; without a change they equal those of an ordinary run.

A change starts a new sample, with its own seed, at the time of the change: pending requests of the old settings are
dropped, and conversations that have begun continue. The turns of a conversation are drawn with its first one. Not
modelled: a rate that changes between two requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pdvsim.sim.config import Acceptance, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.workload.conversations import TURNS
from pdvsim.sim.workload.requests import Workload

SAMPLED_REQUESTS = 100_000  # then the next sample starts
CHUNK = 64  # requests sampled together; a change discards the rest
SEEDS = 1 << 53


class Arrivals:
    """Arrivals, numbered from 0; every architecture gets its own copies."""

    def __init__(self, traffic: Traffic, acceptance: Acceptance) -> None:
        self.sent = self._draws = 0
        self._last_s = 0.0
        self.change(traffic, acceptance, 0.0)

    def change(self, traffic: Traffic, acceptance: Acceptance, now_s: float) -> None:
        """Use this traffic from now on."""
        self._settings, self._from_s = (traffic, acceptance), now_s
        self._pending = self._sample()
        self._next = self._drawn()
        self._crowd: Iterator[Request] | None = None

    def until(self, time_s: float) -> list[Request]:
        """Requests up to a time, in order, each returned once."""
        requests: list[Request] = []
        while self._next.arrival_s <= time_s:
            requests.append(self._numbered(self._next))
            self._next = self._drawn()
        return requests

    def burst(self, count: int, now_s: float) -> list[Request]:
        """Further requests that arrive now, `count` of them."""
        if self._crowd is None:
            self._crowd = self._sample()
        requests = []
        for _ in range(count):
            request = next(self._crowd)
            request.arrival_s = now_s
            requests.append(self._numbered(request))
        return requests

    def _workload(self) -> Workload:
        traffic, acceptance = self._settings
        seed = (traffic.seed + self._draws * 1_000_003) % SEEDS
        self._draws += 1
        return Workload(_ahead(replace(traffic, seed=seed)), acceptance, CHUNK)

    def _drawn(self) -> Request:
        request = next(self._pending, None)
        if request is None:
            self._from_s = self._last_s
            self._pending = self._sample()
            request = next(self._pending)
        request.arrival_s += self._from_s
        self._last_s = max(self._last_s, request.arrival_s)
        return request

    def _sample(self) -> Iterator[Request]:
        """A new sample: its conversations and its requests' own texts, which have odd numbers, are in no other."""
        number = self._draws
        for request in self._workload():
            if request.session >= 0:
                request.session += number * SAMPLED_REQUESTS
            if number and request.chain:
                more = (0, 2 * number * SAMPLED_REQUESTS * TURNS)
                request.chain = tuple((end, text + more[text % 2]) for end, text in request.chain)
            yield request

    def _numbered(self, request: Request) -> Request:
        request.id = self.sent
        self.sent += 1
        return request


def largest(traffic: Traffic, acceptance: Acceptance) -> Request:
    """The request with the most tokens that may arrive."""
    return Workload(_ahead(traffic), acceptance, SAMPLED_REQUESTS).largest()


def _ahead(traffic: Traffic) -> Traffic:
    """The traffic of one sample; fewer conversations, as all are drawn first, for their mean number of turns."""
    return replace(traffic, num_prompts=SAMPLED_REQUESTS // 10 if traffic.converses else SAMPLED_REQUESTS)


def copy_of(request: Request) -> Request:
    """A fresh copy of a request, for another server."""
    asked = request.arrival_s, request.prompt_tokens, request.output_tokens, request.accept_runs, request.chain
    return Request(request.id, *asked, request.think_s, session=request.session, turn=request.turn)
