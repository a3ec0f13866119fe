"""Requests sampled over time, from settings that may change; without a change they equal those of an ordinary run.

A change starts a new sample, with its own seed, at the time of the change: pending requests of the old settings are
dropped. Not modelled: a rate that changes between two requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pdvsim.sim.config import Acceptance, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.workload.requests import Workload

AHEAD = 100_000  # requests of one sample; then the next starts
CHUNK = 64  # requests sampled together; a change discards the rest
SEEDS = 1 << 53


class Arrivals:
    """Arrivals, numbered from 0; every architecture gets its own copies."""

    def __init__(self, traffic: Traffic, acceptance: Acceptance) -> None:
        self.sent = self._draws = 0
        self._last_s = 0.0
        self.turn(traffic, acceptance, 0.0)

    def turn(self, traffic: Traffic, acceptance: Acceptance, now_s: float) -> None:
        """Use this traffic from now on."""
        self._settings, self._from_s = (traffic, acceptance), now_s
        self._coming = iter(self._workload())
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
        """So many more requests, now."""
        if self._crowd is None:
            self._crowd = iter(self._workload())
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
        return Workload(replace(traffic, num_prompts=AHEAD, seed=seed), acceptance, CHUNK)

    def _drawn(self) -> Request:
        request = next(self._coming, None)
        if request is None:
            self._from_s = self._last_s
            self._coming = iter(self._workload())
            request = next(self._coming)
        request.arrival_s += self._from_s
        self._last_s = request.arrival_s
        return request

    def _numbered(self, request: Request) -> Request:
        request.id = self.sent
        self.sent += 1
        return request


def largest(traffic: Traffic, acceptance: Acceptance) -> Request:
    """The request with the most tokens that may arrive."""
    return Workload(replace(traffic, num_prompts=AHEAD), acceptance, AHEAD).largest()


def copied(request: Request) -> Request:
    """A fresh copy of a request, for another server."""
    lengths = request.prompt_tokens, request.output_tokens
    return Request(request.id, request.arrival_s, *lengths, request.runs, request.chain)
