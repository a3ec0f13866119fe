"""The drafter's temperature by the acceptance it brings: a search in three points that narrows, rests, and reopens."""

from __future__ import annotations

from math import sqrt


class TemperatureSearch:
    """Measures acceptance below, at and above a middle, moves there or between, and narrows until it rests.

    At rest it watches: where acceptance has changed, for whatever reason, the search begins anew.
    """

    WIDE, NARROW = 0.2, 0.04  # distance of the outer points: at first, and under which it rests
    VERDICTS = 120.0  # of each point, over the distance
    FEWEST = 60  # verdicts after which a point that is clearly worse has had enough
    CLEARLY = 3.0  # standard deviations
    MEMORY, CHANGE = 400.0, 0.08  # verdicts that the watch remembers, and the change that reopens the search
    LEAST, MOST = 0.0, 2.0

    def __init__(self, start: float) -> None:
        self.middle = start
        self.step = self.WIDE
        self.temperature = start  # to draft at
        self._counts: dict[float, tuple[float, float]] = {}  # accepted and judged, by temperature
        self._rest_rate: float | None = None  # acceptance when it came to rest
        self._watched = (0.0, 0.0)

    @property
    def resting(self) -> bool:
        return self.step < self.NARROW

    def observe(self, temperature: float, accepted: int, judged: int) -> None:
        """So many of the drafts made at this temperature were judged, so many of them accepted."""
        if self.resting:
            if temperature == self.temperature:
                self._watch(accepted, judged)
            return
        before = self._counts.get(temperature, (0.0, 0.0))
        self._counts[temperature] = (before[0] + accepted, before[1] + judged)
        waiting = [point for point in self._points() if not self._enough(point)]
        if waiting:
            self.temperature = waiting[0]
        else:
            self._narrow()

    def _points(self) -> tuple[float, float, float]:
        return self.middle, max(self.LEAST, self.middle - self.step), min(self.MOST, self.middle + self.step)

    def _rate(self, point: float) -> float:
        accepted, judged = self._counts[point]
        return accepted / judged

    def _enough(self, point: float) -> bool:
        judged = self._counts.get(point, (0.0, 0.0))[1]
        if judged >= self.VERDICTS / self.step:
            return True
        if point == self.middle or judged < self.FEWEST:
            return False
        rate, best = self._rate(point), self._rate(self.middle)
        return best - rate > self.CLEARLY * sqrt(max(best * (1 - best), 0.05) / judged)

    def _narrow(self) -> None:
        """Go to the best of the three, or between them where that is the middle, and look closer there."""
        middle, below, above = (self._rate(point) for point in self._points())
        if max(below, above) > middle:
            self.middle = self._points()[1 if below > above else 2]
            kept = {point: self._counts[point] for point in self._points() if point in self._counts}
        else:
            bend = 2 * middle - below - above
            if bend > 0:
                shift = self.step / 2 * (above - below) / bend
                self.middle = min(self.MOST, max(self.LEAST, self.middle + shift))
            self.step /= 2
            kept = {}
        self._counts = kept
        self.temperature = self.middle
        self._rest_rate, self._watched = None, (0.0, 0.0)

    def _watch(self, accepted: int, judged: int) -> None:
        keep = (1 - 1 / self.MEMORY) ** judged
        seen, tried = self._watched
        self._watched = seen, tried = seen * keep + accepted, tried * keep + judged
        if tried < 0.9 * self.MEMORY:
            return
        rate = seen / tried
        if self._rest_rate is None:
            self._rest_rate = rate
        elif abs(rate - self._rest_rate) > max(self.CHANGE, 4 * sqrt(max(rate * (1 - rate), 0.05) / tried)):
            self.step = self.WIDE
            self._counts = {}
