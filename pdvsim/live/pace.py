"""A session in step with the wall clock. If the simulator cannot keep up with a speed, it runs as fast as it can."""

from __future__ import annotations

from time import perf_counter

from pdvsim.live.knobs import Setup
from pdvsim.live.session import Session

BUSY_S = 0.12  # of a tick, at most; meanwhile no browser is answered
MOST_CATCH_UP_S = 2.0  # after a pause of the machine
SLICE_S = 0.05  # least simulated time between checks of the wall clock
SLICES = 4  # approximate number per tick


class Pacer:
    """Drives a session."""

    def __init__(self, setup: Setup, speed: float) -> None:
        self.setup, self.speed, self.running = setup, speed, True
        self.measured_speed = 0.0  # recent speed in simulated seconds per second
        self.restart()

    def restart(self) -> None:
        """Begin a new session."""
        self.session = Session(self.setup)
        self.run(self.running)

    def run(self, running: bool) -> None:
        """Run from now on, or pause."""
        self.running, self._due_s, self._last = running, 0.0, perf_counter()

    def tick(self) -> None:
        """Advance by the elapsed time times the speed, for at most a tick; the rest is caught up later."""
        began, session = perf_counter(), self.session
        passed_s, self._last = began - self._last, began
        from_s = session.now_s
        self._due_s = min(self._due_s + passed_s * self.speed, MOST_CATCH_UP_S * self.speed)
        to_s, slice_s = from_s + self._due_s, max(SLICE_S, self.measured_speed * BUSY_S / SLICES)
        while session.now_s < to_s and perf_counter() - began < BUSY_S:
            session.advance(min(to_s, session.now_s + slice_s))
        self._due_s -= session.now_s - from_s
        went = (session.now_s - from_s) / max(passed_s, 1e-6)
        self.measured_speed += 0.2 * (went - self.measured_speed)
