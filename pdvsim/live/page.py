"""The page of a session: controls, metrics of the window as a table, charts. The same for all browsers."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from pdvsim.live.knobs import BURST, Knobs, Setup
from pdvsim.live.pace import SPEEDS, WINDOWS_S, Feed, Update
from pdvsim.live.parts import parts
from pdvsim.sim.config import Experiment
from pdvsim.view.charts import plain
from pdvsim.view.report import page
from pdvsim.view.style import arch_colour

OWN = "data set's"
CHOICES = {
    "input_len": (32, 128, 256, 512, 1024, 2048, 4096),
    "output_len": (32, 128, 256, 512, 1024, 2048, 4096),
    "max_num_seqs": (4, 8, 16, 32, 64, 128, 256, 512),
    "max_num_batched_tokens": (128, 256, 512, 1024, 2048, 4096, 8192),
}
BUTTONS = {"pause": "Pause", "on": "Advance 1 s", "restart": "Restart", "burst": f"Burst of {BURST}", "save": "Save"}

Saved = Callable[[], str | None]  # the outcome of saving, as text; None while it is running


class Dashboard:
    """The page of a session, its updates and commands, for all browsers."""

    def __init__(
        self, feed: Feed, setup: Setup, names: Sequence[str], save: Callable[[Update], Saved], about: str
    ) -> None:
        """`setup` has the settings that can change, `names` those of its architectures; `about` describes the run."""
        self.feed, self.save, self.about = feed, save, about
        self.archs, self.names = setup.archs, names
        self.controls = 0
        self._pictures = self._orders = -1
        self._ended = False
        self._saving: Saved | None = None
        self._orders_before_save: int | None = None
        self._saved = ""
        self._update_parts: dict[str, str] = {}  # as JSON, made once for all browsers
        self.parts = parts(setup.archs, names, setup.base.scoring.slo())
        self.knobs = _knobs(setup.base)

    def html(self) -> str:
        """The page, the same for every browser; updates fill it."""
        buttons = [{"id": name, "kind": "button", "label": text} for name, text in BUTTONS.items()]
        speeds = {"id": "speed", "kind": "group", "label": "Speed", "options": list(map(_times, SPEEDS))}
        window = {"id": "window", "label": "Window", "options": list(map(_seconds, WINDOWS_S))}
        knobs = [{"id": name, **knob} for name, knob in self.knobs.items()]
        archs = zip(self.archs, self.names, strict=True)
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
        """Execute a browser's command; a ValueError, TypeError or LookupError if the page cannot have sent it."""
        if what == "window":
            self.feed.order("window_s", WINDOWS_S[list(map(_seconds, WINDOWS_S)).index(value)])
        elif what in self.knobs:
            self.feed.order("turn", {what: _read(what, self.knobs[what], value)})
        elif what == "speed":
            self.feed.order("speed", dict(enumerate(SPEEDS))[value])
        elif what == "pause":
            self.feed.order("running", not self.feed.latest.running)
        elif what == "save":
            self._ask_to_save()
        elif what in ("on", "restart", "burst"):
            self.feed.order(what, 1.0 if what == "on" else None)
        else:
            raise ValueError(f"unknown command {what!r}")

    def _ask_to_save(self) -> None:
        if self._saving is None and self._orders_before_save is None:
            self._orders_before_save = self.feed.ordered
            self._saved = "saving: the session is run again with all records …"
            self.controls += 1

    # what is shown ----------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Read updates; whether there is something to send."""
        shown, before = self.feed.latest, self.controls
        if self._saving is not None and (outcome := self._saving()) is not None:
            self._saving, self.controls = None, self.controls + 1
            self._saved = f'<pre class="wrap">{html.escape(outcome)}</pre>'
        if self._orders_before_save is not None and shown.orders >= self._orders_before_save:
            self._saving, self._orders_before_save = self.save(shown), None
        ends = not self.feed.alive and not self._ended
        self._ended = self._ended or ends
        if shown.orders != self._orders:
            self._orders, self.controls = shown.orders, self.controls + 1
        if self.feed.pictures == self._pictures and self.controls == before and not ends:
            return False
        self._pictures, self._update_parts = self.feed.pictures, {}
        return True

    def message(self, sent: int, known: int) -> str:
        """The update for a browser that got `sent` messages and has these controls."""
        shown, changed = self.feed.latest, known != self.controls
        texts = {"status": self._status(shown)} | ({"saved": self._saved} if changed else {})
        due = [part for part in self.parts if changed or sent % part.every == 0]
        made = ", ".join(self._part(part.id, partial(part.content, shown.figures)) for part in due)
        controls = self._part("controls", partial(self._settings, shown)) if changed else '"controls": {}'
        return f'{{"number": {sent + 1}, "html": {json.dumps(texts)}, {controls}, "parts": {{{made}}}}}'

    def _part(self, name: str, make: Callable[[], Any]) -> str:
        if name not in self._update_parts:
            self._update_parts[name] = f"{json.dumps(name)}: {json.dumps(plain(make()))}"
        return self._update_parts[name]

    def _status(self, shown: Update) -> str:
        if not self.feed.alive:
            return f"<b>the session has ended</b> {html.escape(self.feed.ended)}"
        pace = f"{shown.measured_speed:.1f}× real time" if shown.running else "paused"
        parts = [f"<b>{shown.now_s:.1f} s</b> simulated", pace, f"values of the last {shown.window_s:g} s"]
        late = [name for name, figures in zip(self.names, shown.figures, strict=True) if figures["overloaded"]]
        if late:
            parts.append(f'<span class="bad">{html.escape(", ".join(late))} overloaded: the queue grows</span>')
        if shown.refusal:
            parts.append(f'<span class="bad refused">{html.escape(shown.refusal)}</span>')
        return " · ".join(parts)

    def _settings(self, shown: Update) -> dict[str, dict[str, Any]]:
        """Values of the controls: the settings in force, from any browser."""
        settings: dict[str, dict[str, Any]] = {
            "window": {"value": _seconds(shown.window_s)},
            "pause": {"label": "Pause" if shown.running else "Continue"},
            "speed": {"active": SPEEDS.index(shown.speed) if shown.speed in SPEEDS else -1},
            "save": {"disabled": self._saving is not None or self._orders_before_save is not None},
        }
        for name, value in asdict(shown.knobs).items():
            settings[name] = {"value": OWN if value is None else value}
            if name in CHOICES:
                choices = [str(choice) for choice in sorted({*CHOICES[name], *([] if value is None else [value])})]
                settings[name]["options"] = [OWN, *choices] if name.endswith("_len") else choices
        return settings


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
        "input_len": {"label": "Prompt tokens"},
        "output_len": {"label": "Output tokens"},
        "acceptance_rate": between("Acceptance", 0, 1, 0.05),
        "num_speculative_tokens": between("Draft length", 0, max(8, k), 1),
        "controller": {"label": "Controller", "options": ["fixed", "feedback", "goodput", "adaptive-verification"]},
        "max_num_seqs": {"label": "Batch limit"},
        "max_num_batched_tokens": {"label": "Prompt chunk"},
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
    if "options" in knob:
        return str(knob["options"][knob["options"].index(value)])
    return None if value == OWN else int(value)


def _times(speed: float) -> str:
    return "maximum speed" if speed == float("inf") else f"{speed:g}×"


def _seconds(window_s: float) -> str:
    return f"{window_s:g} s"
