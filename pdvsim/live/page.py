"""The page of a session: controls, metrics of the window as a table, charts. The same for all browsers."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from threading import Thread
from typing import Any

from pdvsim.common.console import say
from pdvsim.live.gauge import KEPT_S, LiveWindow
from pdvsim.live.knobs import BURST, Action, Knobs, Setup
from pdvsim.live.pace import Pacer
from pdvsim.live.parts import LivePart, parts
from pdvsim.sim.config import Experiment
from pdvsim.sim.policies import PolicyError, named
from pdvsim.view.charts import plain
from pdvsim.view.report import page
from pdvsim.view.style import arch_colour

SPEEDS = {"1×": 1.0, "10×": 10.0, "100×": 100.0, "maximum speed": float("inf")}
WINDOWS_S = {f"{window_s:g} s": window_s for window_s in (10.0, 30.0, KEPT_S)}
OWN = "data set's"
LENGTHS = [OWN, 32, 128, 256, 512, 1024, 2048, 4096]
BUTTONS = {"pause": "Pause", "on": "Advance 1 s", "restart": "Restart", "burst": f"Burst of {BURST}", "save": "Save"}

Save = Callable[[Setup, Sequence[Action], float], str]  # saves a session up to a time; returns the outcome


class Dashboard:
    """The page of a session, its updates and commands, for all browsers."""

    def __init__(self, setup: Setup, speed: float, save: Save, about: str) -> None:
        """`about` describes the setup; a ValueError of one line if it cannot be simulated."""
        self.pacer, self.save, self.about = Pacer(setup, speed), save, about
        self.window, self.setup = "30 s", setup
        self.names = [named(arch).rpartition(":")[2] for arch in setup.archs]
        self.knobs = _knobs(setup.base)
        self.parts = parts(setup.archs, self.names, setup.base.scoring.slo())
        self.controls = self._told = 0  # changes of them so far
        self.refusal = self.ended = ""  # of the last command; why the session ended by itself
        self._saved, self._saving = "", False
        self._windows: list[LiveWindow] = []
        self._ticks = 0
        self._update_parts: dict[str, tuple[int, str]] = {}  # as JSON, made at a tick for all browsers

    def html(self) -> str:
        """The page, the same for every browser; updates fill it."""
        buttons = [{"id": name, "kind": "button", "label": text} for name, text in BUTTONS.items()]
        speeds = {"id": "speed", "kind": "group", "label": "Speed", "options": [*SPEEDS]}
        window = {"id": "window", "label": "Window", "options": [*WINDOWS_S]}
        knobs = [{"id": name, **knob} for name, knob in self.knobs.items()]
        archs = zip(self.setup.archs, self.names, strict=True)
        return page(
            {
                "feed": True,
                "title": f"pdvsim live: {', '.join(self.names)}",
                "lead": self.about,
                "archs": [{"name": name, "colour": arch_colour(arch)} for arch, name in archs],
                "controls": [buttons[0], speeds, *buttons[1:], window, *knobs],
                "parts": [{"id": part.id, "title": part.title, "kind": part.kind} for part in self.parts],
            }
        )

    # controls ---------------------------------------------------------------------------------------------------------

    def execute(self, what: str, value: Any) -> None:
        """Execute a browser's command; a ValueError, TypeError or LookupError if the page cannot have sent it.

        A command that the session refuses has no effect, and the page says why.
        """
        pacer, session = self.pacer, self.pacer.session
        order: Callable[[], object]
        if what == "window":
            order = partial(setattr, self, "window", [*WINDOWS_S][[*WINDOWS_S].index(value)])
        elif what == "speed":
            order = partial(setattr, pacer, "speed", dict(enumerate(SPEEDS.values()))[value])
        elif what in self.knobs:
            changed: dict[str, Any] = {what: _read(what, self.knobs[what], value)}
            order = partial(session.change, replace(session.knobs, **changed))
        else:
            orders: dict[str, Callable[[], object]] = {
                "pause": partial(pacer.run, not pacer.running),
                "on": partial(session.advance, session.now_s + 1.0),
                "restart": pacer.restart,
                "burst": session.burst,
                "save": self._start_saving,
            }
            order = orders[what]
        self.controls, self.refusal, self._update_parts = self.controls + 1, "", {}
        try:
            self._go_on(order)
        except ValueError as error:
            self.refusal = str(error)

    def tick(self, busy_s: float) -> bool:
        """Go on with the session for at most `busy_s`; whether there is something new."""
        self._ticks += 1
        if self.pacer.running:
            self._go_on(partial(self.pacer.tick, busy_s))
        told, self._told = self._told, self.controls
        return told != self.controls or (self.pacer.running and not self.ended)

    def _go_on(self, order: Callable[[], object]) -> None:
        """Do something with the session; an error of a policy ends it."""
        self._windows = []
        try:
            if not self.ended:
                order()
        except PolicyError as error:
            self.ended, self.controls = str(error), self.controls + 1
            say("pdvsim", f"error: the session has ended: {error}")

    def _start_saving(self) -> None:
        """Save in another thread, which waits for a process, while the session goes on."""
        if self._saving:
            return
        self._saved, self._saving = "saving: the session is run again with all records …", True
        actions, now_s = list(self.pacer.session.actions), self.pacer.session.now_s

        def save() -> None:
            try:
                outcome = self.save(self.setup, actions, now_s)
            except Exception as error:  # of its process as well
                outcome = f"nothing was saved: {error}"
            self._saved, self._saving = f'<pre class="wrap">{html.escape(outcome)}</pre>', False
            self.controls += 1

        Thread(target=save, daemon=True).start()

    # what is shown ----------------------------------------------------------------------------------------------------

    def message(self, sent: int, known: int) -> str:
        """The update for a browser that got `sent` before and knows the controls of number `known`, as JSON."""
        changed = known != self.controls
        texts = {"status": self._status()} | ({"saved": self._saved} if changed else {})
        due = [part for part in self.parts if changed or sent % part.every == 0]
        made = ", ".join(map(self._made, due))
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
        self._windows = self._windows or self.pacer.session.windows(WINDOWS_S[self.window])
        return self._windows

    def _status(self) -> str:
        if self.ended:
            return f"<b>the session has ended</b> {html.escape(self.ended)}"
        pacer = self.pacer
        pace = f"{pacer.measured_speed:.1f}× real time" if pacer.running else "paused"
        now = f"<b>{pacer.session.now_s:.1f} s</b> simulated"
        texts = [now, pace, f"values of the last {self.window}"]
        late = [name for name, window in zip(self.names, self.windows, strict=True) if window.overloaded]
        if late:
            texts.append(f'<span class="bad">{html.escape(", ".join(late))} overloaded: the queue grows</span>')
        if self.refusal:
            texts.append(f'<span class="bad refused">{html.escape(self.refusal)}</span>')
        return " · ".join(texts)

    def _settings(self) -> dict[str, dict[str, Any]]:
        """Values of the controls: the settings in force, from any browser."""
        pacer = self.pacer
        speeds, knobs = [*SPEEDS.values()], asdict(pacer.session.knobs).items()
        return {
            "window": {"value": self.window},
            "pause": {"label": "Pause" if pacer.running else "Continue"},
            "speed": {"active": speeds.index(pacer.speed) if pacer.speed in speeds else -1},
            "save": {"disabled": self._saving},
            **{name: {"value": OWN if value is None else value} for name, value in knobs},
        }


def _knobs(base: Experiment) -> dict[str, dict[str, Any]]:
    """The controls of the settings that can change."""

    def between(label: str, low: float, high: float, step: float) -> dict[str, Any]:
        return {"kind": "range", "label": label, "min": low, "max": high, "step": step}

    rate, k = base.traffic.request_rate, base.server.longest_draft
    data_sets = list({base.traffic.dataset_name: 0, "sharegpt": 0, "random": 0})
    knobs = {
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
    assert knobs.keys() == Knobs.__dataclass_fields__.keys()
    return knobs


def _read(name: str, knob: Mapping[str, Any], value: Any) -> float | int | str | None:
    """The setting of a control's value; a ValueError if it cannot have it."""
    if knob.get("kind") == "range":
        number = round(float(value), 6)  # its steps have rounding errors
        if not knob["min"] <= number <= knob["max"]:
            raise ValueError(f"{name} must be from {knob['min']:g} to {knob['max']:g}")
        return int(number) if knob["step"] == 1 else number
    if isinstance(knob["options"][-1], str):
        return str(knob["options"][knob["options"].index(value)])
    return None if value == OWN and OWN in knob["options"] else int(value)
