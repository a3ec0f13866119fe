"""The host thread: launches, completions and hand-overs queue for it, and polling of idle lanes takes time too.

Lanes take turns on the thread, and none is interrupted. With W idle lanes, each wanting one look of cost c every P + c,
a turn is an operation of cost C and the n looks that come due in that time, n = W (C + n c) / (P + c), but one of each
lane at most: n = W C / max(C, P + c - W c). While few poll, an operation takes 1 / (1 - W c / (P + c)) times as long;
where their looks fill the thread, it waits for one look of each. W lanes look every P, or every W c if that is longer.

Not modelled: garbage collection, and other processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

from pdvsim.sim.limits import HostSeconds
from pdvsim.sim.prices.options import Host

Operation = Literal["launch", "completion", "handoff", "lookup"]
# An n-gram search: seconds per row, and per token searched. Least squares over 101,214 searches of
# `realrun.ngram` in SpecDecode-Bench's tokens (39 to 8,577), in one thread of an Intel Xeon (studies/README.md).
LOOKUP_ROW_S, LOOKUP_TOKEN_S = 4.7e-6, 5.4e-10
# A suffix look-up, seconds per row. ArcticInference's pull request 212 has 6.3 us per draft token and 4.1 us per token
# that enters the trees, with 3.26 draft tokens and 1.69 output tokens per round; the processor is not stated.
SUFFIX_ROW_S = 3.26 * 6.3e-6 + 1.69 * 4.1e-6


@dataclass(frozen=True)
class HostCost:
    """Host seconds of one launch, one completion read back, one hand-over between lanes, and of each row read back.

    The first launch that carries a prompt takes `join_s` more: its tokens are copied to the GPU and pages are dealt.
    `request_s` and `prompt_token_s` pass between a request's arrival and the server's scheduler, one request's prompt
    after the other's. An idle lane is notified of work immediately, unless it polls or has to wake up.
    """

    launch_s: HostSeconds
    completion_s: HostSeconds
    handoff_s: HostSeconds
    row_s: HostSeconds = 0.0
    request_s: HostSeconds = 0.0
    prompt_token_s: HostSeconds = 0.0
    join_s: HostSeconds = 0.0
    idle_poll_s: HostSeconds = 0.0  # between two looks of an idle lane; 0: it is notified
    idle_poll_cost_s: HostSeconds = 0.0
    notify_s: HostSeconds = 0.0

    @property
    def between_s(self) -> float:
        """Seconds from the end of a launch to the start of the next that waits for its result."""
        return self.launch_s + self.completion_s

    def scaled(self, between_s: float) -> HostCost:
        """The same with another time between launches, and all else in proportion; the same where it has none."""
        factor = between_s / self.between_s if self.between_s else 1.0
        return HostCost(**{name: value * factor for name, value in asdict(self).items()})

    def with_options(self, host: Host) -> HostCost:
        """The same with the figures that options give in place of the profile's."""
        given = {f.name: value for f in fields(self) if (value := getattr(host, f.name, None)) is not None}
        rows = {"row_s": 0.0} if host.completion_s is not None else {}
        joins = {"join_s": 0.0} if host.launch_s is not None else {}
        return replace(self, **given | rows | joins)

    def launched_s(self, entering: bool) -> float:
        """Host time of a launch, with which requests may enter."""
        return self.launch_s + self.join_s if entering else self.launch_s

    def completed_s(self, rows: int) -> float:
        """Host time of the completion of a launch with `rows` rows."""
        return self.completion_s + self.row_s * rows


class SimulatedHost:
    """Serves one operation at a time, in order of request; `note` is told of each, from when to when."""

    def __init__(self, times: HostCost, note: Callable[[Operation, float, float], None] | None = None) -> None:
        self.times = times
        self.free_at = 0.0
        self._polls = times.idle_poll_s > 0
        self._note = note
        self.idle_lanes = 0

    def spend(self, now_s: float, cost_s: float, operation: Operation) -> float:
        """Queue an operation now and return when it ends."""
        start_s = now_s if now_s > self.free_at else self.free_at
        if self.idle_lanes and self._polls and cost_s:
            cost_s += self._looks_s(cost_s)
        self.free_at = done_s = start_s + cost_s
        if self._note is not None and done_s > start_s:
            self._note(operation, start_s, done_s)
        return done_s

    def _looks_s(self, cost_s: float) -> float:
        """Time that the polls of idle lanes add to an operation."""
        times = self.times
        all_s = self.idle_lanes * times.idle_poll_cost_s
        return all_s * cost_s / max(cost_s, times.idle_poll_s + times.idle_poll_cost_s - all_s)

    def idle(self, lanes: int) -> None:
        """Change the number of idle lanes by +1 or -1."""
        self.idle_lanes += lanes

    def notice(self, idle_since_s: float, now_s: float) -> float:
        """Return the time at which an idle lane notices work that arrives now: at its next poll, or at its wake-up."""
        times = self.times
        if not times.idle_poll_s:
            return now_s + times.notify_s
        period = max(times.idle_poll_s, self.idle_lanes * times.idle_poll_cost_s)
        looks = -(-(now_s - idle_since_s) // period)
        return max(now_s, idle_since_s + looks * period)
