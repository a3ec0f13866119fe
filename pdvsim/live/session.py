"""A session: one to four architectures serve the same requests in step, with the same changes of settings.

A session is determined by its experiments and its actions, independent of its speed. So it can be run again with all
records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from pdvsim.live.arrivals import Arrivals, largest
from pdvsim.live.gauge import Gauge, Window
from pdvsim.live.knobs import BURST, Action, Knobs, Setup
from pdvsim.live.station import Station
from pdvsim.sim.cluster import Cluster
from pdvsim.sim.records import Keeper, Log, Reader, Result
from pdvsim.sim.run import no_collector

STEP_S = 1.0  # per step
READ_S = 0.25  # simulated time between readings, at most


class Stations:
    """The stations of a setup, and the source of their requests."""

    def __init__(self, setup: Setup, reader: Callable[[Log, Cluster], Reader]) -> None:
        self.setup, self.knobs = setup, Knobs.of(setup.base)
        self.arrivals = Arrivals(setup.base.traffic, setup.base.acceptance)
        self.stations = [Station(e, reader) for e in setup.experiments(self.knobs)]

    def run_to(self, time_s: float) -> None:
        """Advance all stations to a time."""
        coming = self.arrivals.until(time_s)
        for station in self.stations:
            station.send(coming)
            station.run_to(time_s)

    def apply(self, action: Action) -> None:
        """Apply an action to every station and the source."""
        if action.knobs is None:
            crowd = self.arrivals.burst(BURST, action.at_s)
            for station in self.stations:
                station.send(crowd)
        else:
            old, new = (knobs.applied_to(self.setup.base) for knobs in (self.knobs, action.knobs))
            if (old.traffic, old.acceptance) != (new.traffic, new.acceptance):
                self.arrivals.change(new.traffic, new.acceptance, action.at_s)
            for station, experiment in zip(self.stations, self.setup.experiments(action.knobs), strict=True):
                station.change(experiment)
            self.knobs = action.knobs

    def check(self, knobs: Knobs) -> None:
        """Reject settings that some architecture does not support, or requests that it could never serve."""
        changed = knobs.applied_to(self.setup.base)
        most = largest(changed.traffic, changed.acceptance)
        self.setup.experiments(knobs)
        for station in self.stations:
            station.cluster.check([most])


class Session(Stations):
    """A session for a page: stations on one simulated clock, their recent metrics, and the actions so far."""

    def __init__(self, setup: Setup) -> None:
        levels_s, replicas = setup.base.scoring.slo(), setup.base.hardware.replicas
        super().__init__(setup, lambda log, of: Gauge(log, levels_s, of.bandwidths, replicas))
        self.actions: list[Action] = []
        self.now_s = 0.0
        self.check(self.knobs)

    def change(self, knobs: Knobs) -> None:
        """Change settings from now on; a ValueError of one line if invalid, without effect."""
        if knobs != self.knobs:
            self.check(knobs)
            self._record(Action(self.now_s, knobs))

    def burst(self) -> None:
        """Send a burst of requests."""
        self._record(Action(self.now_s))

    def _record(self, action: Action) -> None:
        self.apply(action)
        self.actions.append(action)

    def advance(self, time_s: float) -> None:
        """Advance to a time and read the new rows."""
        while self.now_s < time_s:
            self.now_s = min(time_s, self.now_s + READ_S)
            self.run_to(self.now_s)
            for station in self.stations:
                station.reader.take(self.now_s)

    def windows(self, window_s: float) -> list[Window]:
        """The last seconds of each architecture."""
        return [s.reader.window(self.now_s, window_s, s.state()) for s in self.stations if isinstance(s.reader, Gauge)]


def replay(setup: Setup, actions: Sequence[Action], until_s: float) -> list[Result]:
    """A session run again with all records; requests that arrived by `until_s` are served to their end."""
    stations = Stations(setup, lambda log, cluster: Keeper(log))
    with no_collector():
        now_s, left = 0.0, deque(actions)
        while True:
            while left and left[0].at_s <= now_s:
                stations.apply(left.popleft())
            if now_s >= until_s:
                break
            now_s = min(until_s, now_s + STEP_S, *(action.at_s for action in [*left][:1]))
            stations.run_to(now_s)
        return [_served(station) for station in stations.stations]


def _served(station: Station) -> Result:
    """The result of an ordinary run of the requests sent."""
    station.finish()
    keeper = station.reader
    assert isinstance(keeper, Keeper)
    keeper.take(station.env.now)
    traffic = replace(station.experiment.traffic, num_prompts=max(1, station.client.sent))
    served = replace(station.experiment, traffic=traffic)
    return Result(served, keeper.requests(), keeper.deliveries, keeper.launches, station.cluster.meta())
