"""The page of a session: controls, metrics of the window as a table, charts. The same for all browsers."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Thread
from time import perf_counter
from typing import Any

from pdvsim.common.console import say
from pdvsim.live.gauge import KEPT_S, LiveWindow
from pdvsim.live.parts import LivePart, parts
from pdvsim.live.session import BURST, Action, Session, Setup
from pdvsim.sim.config import Experiment
from pdvsim.sim.policies import PolicyError, named
from pdvsim.view.charts import plain
from pdvsim.view.report.sheet import page
from pdvsim.view.style import arch_colour

SPEEDS = {"1×": 1.0, "10×": 10.0, "100×": 100.0, "maximum speed": float("inf")}
WINDOWS_S = {f"{window_s:g} s": window_s for window_s in (10.0, 30.0, KEPT_S)}
OWN = "data set's"
LENGTHS = [OWN, 32, 128, 256, 512, 1024, 2048, 4096]
MOST_CATCH_UP_S = 2.0  # after a pause of the machine
SLICE_S = 0.05  # least simulated time between checks of the wall clock
SLICES = 4  # approximate number per tick

Save = Callable[[Setup, Sequence[Action], float], str]  # saves a session up to a time; returns the outcome


class Dashboard:
    """The page of a session, which keeps step with the wall clock; its updates and commands, for all browsers.

    If the simulator cannot keep up with a speed, it runs as fast as it can.
    """

    def __init__(self, setup: Setup, speed: float, save: Save, about: str) -> None:
        """`about` describes the setup; a ValueError of one line if it cannot be simulated."""
        self.setup, self.speed, self.save, self.about = setup, speed, save, about
        self.window, self.running = "30 s", True
        self.measured_speed = 0.0  # recent speed in simulated seconds per second
        self.names = [named(arch).rpartition(":")[2] for arch in setup.archs]
        self.controls = _controls(setup.base)
        self.parts = parts(setup.archs, self.names, setup.base.scoring.slo())
        self.changes = self._told = 0  # of controls so far
        self.refusal = self.ended = ""  # of the last command; why the session ended by itself
        self._saved, self._saving = "", False
        self._windows: list[LiveWindow] = []
        self._ticks = 0
        self._update_parts: dict[str, tuple[int, str]] = {}  # as JSON, made at a tick for all browsers
        self._restart()

    def html(self) -> str:
        """The page, the same for every browser; updates fill it."""
        archs = zip(self.setup.archs, self.names, strict=True)
        return page(
            {
                "feed": True,
                "title": f"pdvsim live: {', '.join(self.names)}",
                "lead": self.about,
                "archs": [{"name": name, "colour": arch_colour(arch)} for arch, name in archs],
                "controls": [{"id": name, **control} for name, control in self.controls.items()],
                "parts": [{"id": part.id, "title": part.title, "kind": part.kind} for part in self.parts],
            }
        )

    # controls ---------------------------------------------------------------------------------------------------------

    def execute(self, what: str, value: Any) -> None:
        """Execute a browser's command; a ValueError, TypeError or LookupError if the page cannot have sent it.

        A command that the session refuses has no effect, and the page says why.
        """
        given, session = _read(what, self.controls[what], value), self.session
        orders: dict[str, Callable[[], object]] = {
            "pause": partial(self._run, not self.running),
            "speed": partial(setattr, self, "speed", SPEEDS.get(given)),
            "on": lambda: session.advance(session.now_s + 1.0),
            "restart": self._restart,
            "burst": session.burst,
            "save": self._start_saving,
            "window": partial(setattr, self, "window", given),
        }
        self.changes, self.refusal, self._update_parts = self.changes + 1, "", {}
        try:
            self._go_on(orders.get(what) or (lambda: session.change(session.knobs | {what: given})))
        except ValueError as error:
            self.refusal = str(error)

    def tick(self, busy_s: float) -> bool:
        """Go on with the session for at most `busy_s`; whether there is something new."""
        self._ticks += 1
        if self.running:
            self._go_on(partial(self._keep_step, busy_s))
        told, self._told = self._told, self.changes
        return told != self.changes or (self.running and not self.ended)

    def _go_on(self, order: Callable[[], object]) -> None:
        """Do something with the session; an error of a policy ends it."""
        self._windows = []
        try:
            if not self.ended:
                order()
        except PolicyError as error:
            self.ended, self.changes = str(error), self.changes + 1
            say("pdvsim", f"error: the session has ended: {error}")

    def _restart(self) -> None:
        """Begin a new session."""
        self.session = Session(self.setup)
        self._run(self.running)

    def _run(self, running: bool) -> None:
        """Run from now on, or pause."""
        self.running, self._due_s, self._last = running, 0.0, perf_counter()

    def _keep_step(self, busy_s: float) -> None:
        """Advance by the elapsed time times the speed, for at most `busy_s`; the rest is caught up later."""
        began, session = perf_counter(), self.session
        passed_s, self._last = began - self._last, began
        from_s = session.now_s
        self._due_s = min(self._due_s + passed_s * self.speed, MOST_CATCH_UP_S * self.speed)
        to_s, slice_s = from_s + self._due_s, max(SLICE_S, self.measured_speed * busy_s / SLICES)
        while session.now_s < to_s and perf_counter() - began < busy_s:
            session.advance(min(to_s, session.now_s + slice_s))
        self._due_s -= session.now_s - from_s
        went = (session.now_s - from_s) / max(passed_s, 1e-6)
        self.measured_speed += 0.2 * (went - self.measured_speed)

    def _start_saving(self) -> None:
        """Save in another thread, which waits for a process, while the session goes on."""
        if self._saving:
            return
        self._saved, self._saving = "saving: the session is run again with all records …", True
        actions, now_s = list(self.session.actions), self.session.now_s

        def save() -> None:
            try:
                outcome = self.save(self.setup, actions, now_s)
            except Exception as error:  # of its process as well
                outcome = f"nothing was saved: {error}"
            self._saved, self._saving = f'<pre class="wrap">{html.escape(outcome)}</pre>', False
            self.changes += 1

        Thread(target=save, daemon=True).start()

    # what is shown ----------------------------------------------------------------------------------------------------

    def message(self, sent: int, known: int) -> str:
        """The update for a browser that got `sent` before and knows the controls of number `known`, as JSON."""
        changed = known != self.changes
        texts = {"status": self._status()} | ({"saved": self._saved} if changed else {})
        made = ", ".join(self._made(part) for part in self.parts if changed or sent % part.every == 0)
        controls = json.dumps(plain(self._settings()) if changed else {})
        return f'{{"number": {sent + 1}, "html": {json.dumps(texts)}, "controls": {controls}, "parts": {{{made}}}}}'

    def _made(self, part: LivePart) -> str:
        """The latest content of a part, which is made again after some ticks."""
        at, text = self._update_parts.get(part.id, (-part.every, ""))
        if self._ticks - at >= part.every:
            text = f"{json.dumps(part.id)}: {json.dumps(plain(part.content(self.windows)))}"
            self._update_parts[part.id] = self._ticks, text
        return text

    @property
    def windows(self) -> list[LiveWindow]:
        """The last seconds of each architecture."""
        self._windows = self._windows or self.session.windows(WINDOWS_S[self.window])
        return self._windows

    def _status(self) -> str:
        if self.ended:
            return f"<b>the session has ended</b> {html.escape(self.ended)}"
        pace = f"{self.measured_speed:.1f}× real time" if self.running else "paused"
        texts = [f"<b>{self.session.now_s:.1f} s</b> simulated", pace, f"values of the last {self.window}"]
        late = [name for name, window in zip(self.names, self.windows, strict=True) if window.overloaded]
        if late:
            texts.append(f'<span class="bad">{html.escape(", ".join(late))} overloaded: the queue grows</span>')
        if self.refusal:
            texts.append(f'<span class="bad refused">{html.escape(self.refusal)}</span>')
        return " · ".join(texts)

    def _settings(self) -> dict[str, dict[str, Any]]:
        """Values of the controls: the settings in force, from any browser."""
        speeds, knobs = [*SPEEDS.values()], self.session.knobs.items()
        return {
            "window": {"value": self.window},
            "pause": {"label": "Pause" if self.running else "Continue"},
            "speed": {"active": speeds.index(self.speed) if self.speed in speeds else -1},
            "save": {"disabled": self._saving},
            **{name: {"value": OWN if value is None else value} for name, value in knobs},
        }


def _controls(base: Experiment) -> dict[str, dict[str, Any]]:
    """The controls by name: buttons, the window, and the settings that can change."""

    def between(label: str, low: float, high: float, step: float) -> dict[str, Any]:
        return {"kind": "range", "label": label, "min": low, "max": high, "step": step}

    rate, k = base.traffic.request_rate, base.server.longest_draft
    data_sets = list({base.traffic.dataset_name: 0, "sharegpt": 0, "random": 0})
    return {
        "pause": {"kind": "button", "label": "Pause"},
        "speed": {"kind": "group", "label": "Speed", "options": [*SPEEDS]},
        "on": {"kind": "button", "label": "Advance 1 s"},
        "restart": {"kind": "button", "label": "Restart"},
        "burst": {"kind": "button", "label": f"Burst of {BURST}"},
        "save": {"kind": "button", "label": "Save"},
        "window": {"label": "Window", "options": [*WINDOWS_S]},
        "request_rate": between("Requests per second", 0.5, max(64.0, 4 * rate), 0.5),
        "burstiness": between("Burstiness (1: Poisson)", 0.1, 4, 0.1),
        "dataset_name": {"label": "Data set", "options": data_sets},
        "input_len": {"label": "Prompt tokens", "options": LENGTHS},
        "output_len": {"label": "Output tokens", "options": LENGTHS},
        "acceptance_rate": between("Acceptance", 0, 1, 0.05),
        "num_speculative_tokens": between("Draft length", 0, max(8, k), 1),
        "controller": {"label": "Controller", "options": ["fixed", "feedback", "goodput", "adaptive-verification"]},
        "max_num_seqs": {"label": "Batch limit", "options": [4, 8, 16, 32, 64, 128, 256, 512]},
        "max_num_batched_tokens": {"label": "Prompt chunk", "options": [128, 256, 512, 1024, 2048, 4096, 8192]},
    }


def _read(name: str, control: Mapping[str, Any], value: Any) -> Any:
    """What a control's value stands for; a ValueError or LookupError if it cannot have it."""
    if control.get("kind") == "button":
        return None
    if control.get("kind") == "group":
        return dict(enumerate(control["options"]))[value]
    if control.get("kind") == "range":
        number = round(float(value), 6)  # its steps have rounding errors
        if not control["min"] <= number <= control["max"]:
            raise ValueError(f"{name} must be from {control['min']:g} to {control['max']:g}")
        return int(number) if control["step"] == 1 else number
    if isinstance(control["options"][-1], str):
        return control["options"][control["options"].index(value)]
    return None if value == OWN and OWN in control["options"] else int(value)
