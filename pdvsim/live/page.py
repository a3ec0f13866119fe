"""The page of a session: controls, metrics of the window as a table, charts. The same for all browsers."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from pdvsim.live.charts import Charts
from pdvsim.live.knobs import BURST, Setup
from pdvsim.live.pace import SPEEDS, WINDOWS_S, Feed, Update
from pdvsim.live.table import table_html, table_px
from pdvsim.sim.config import Experiment
from pdvsim.view.report import embedded, filled_in

UPDATES_PER_TABLE = 2
OWN = "data set's"
BATCHES = (4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)
LENGTHS = (32, 128, 256, 512, 1024, 2048, 4096)
BUTTONS = {"on": "Advance 1 s", "restart": "Restart", "burst": f"Burst of {BURST}", "save": "Save"}

Saved = Callable[[], str | None]  # the outcome of saving, as text; None while it is running


@dataclass(frozen=True)
class SliderControl:
    """A number between two others."""

    title: str
    start: float
    end: float
    step: float

    def html(self, name: str) -> str:
        limits = f'min="{self.start:g}" max="{self.end:g}" step="{self.step:g}"'
        return f'<label>{self.title}: <output></output><input type="range" id="{name}" {limits}></label>'

    def read(self, name: str, value: Any) -> float | int:
        """The setting of its value; a ValueError if it cannot have it."""
        number = round(float(value), 6)  # its steps have rounding errors
        if not self.start <= number <= self.end:
            raise ValueError(f"{name} must be from {self.start:g} to {self.end:g}")
        return int(number) if name == "num_speculative_tokens" else number


@dataclass(frozen=True)
class SelectControl:
    """One of some texts, or a number among those that updates name."""

    title: str
    options: tuple[str, ...] = ()

    def html(self, name: str) -> str:
        options = "".join(f"<option>{html.escape(option)}</option>" for option in self.options)
        return f'<label>{self.title}<select id="{name}">{options}</select></label>'

    def read(self, name: str, value: Any) -> str | int | None:
        """The setting of its value; a ValueError if it cannot have it."""
        if self.options:
            return self.options[self.options.index(value)]
        return None if value == OWN else int(value)


class Dashboard:
    """The page of a session, its updates and commands, for all browsers."""

    static = str(files("plotly").joinpath("package_data"))  # the folder of plotly.min.js

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
        self.charts = Charts(self.archs, names, setup.base.scoring.slo())
        self.knobs = _knobs(setup.base)

    def html(self) -> str:
        """The page, the same for every browser; updates fill it."""
        width_px = table_px(len(self.archs))  # charts are redrawn if their width changes: content must not change it
        windows = SelectControl("Window", tuple(map(_seconds, WINDOWS_S)))
        buttons = [f'<button id="{name}">{text}</button>' for name, text in BUTTONS.items()]
        return filled_in(
            files("pdvsim.live").joinpath("page.html").read_text(encoding="utf-8"),
            {
                "<!--TITLE-->": html.escape(f"pdvsim live: {', '.join(self.names)}"),
                "/*TABLE*/": f"{width_px + 36}px",
                "/*NARROW*/": f"{width_px + 660}px",
                "<!--ABOUT-->": html.escape(self.about),
                "<!--SPEEDS-->": "".join(f"<button>{_times(speed)}</button>" for speed in SPEEDS),
                "<!--BUTTONS-->": "".join([*buttons, windows.html("window")]),
                "<!--KNOBS-->": "".join(knob.html(name) for name, knob in self.knobs.items()),
                "/*CHARTS*/": embedded({"lead": self.charts.lead, "others": self.charts.others}),
            },
        )

    # controls ---------------------------------------------------------------------------------------------------------

    def execute(self, what: str, value: Any) -> None:
        """Execute a browser's command; a ValueError, TypeError or LookupError if the page cannot have sent it."""
        if what == "window":
            self.feed.order("window_s", WINDOWS_S[list(map(_seconds, WINDOWS_S)).index(value)])
        elif what == "turn":
            name, turned = value
            self.feed.order("turn", {name: self.knobs[name].read(name, turned)})
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
            self._saved = f'<pre style="white-space:pre-wrap;margin:4px 0">{html.escape(outcome)}</pre>'
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
        shown, due = self.feed.latest, self.charts.due(sent)
        settings = [self._part("status", lambda: {"text": self._status(shown)})]
        if known != self.controls or sent % UPDATES_PER_TABLE == 0:  # numbers need fewer updates
            figures = shown.figures
            settings.append(self._part("table", lambda: {"text": table_html(self.archs, self.names, figures)}))
        if known != self.controls:
            settings += [self._part(name, partial(dict, values)) for name, values in self._settings(shown).items()]
        sources = [self._part(name, partial(self.charts.data, name, shown.figures)) for name in due]
        return f'{{"number": {sent + 1}, "settings": {{{", ".join(settings)}}}, "sources": {{{", ".join(sources)}}}}}'

    def _part(self, name: str, make: Callable[[], Any]) -> str:
        if name not in self._update_parts:
            self._update_parts[name] = f"{json.dumps(name)}: {json.dumps(make())}"
        return self._update_parts[name]

    def _status(self, shown: Update) -> str:
        if not self.feed.alive:
            return f"<b>the session has ended</b> {html.escape(self.feed.ended)}"
        pace = f"{shown.measured_speed:.1f}× real time" if shown.running else "paused"
        parts = [f"<b>{shown.now_s:.1f} s</b> simulated", pace, f"values of the last {shown.window_s:g} s"]
        late = [name for name, figures in zip(self.names, shown.figures, strict=True) if figures["overloaded"]]
        if late:
            parts.append(f'<b style="color:#a34700">{html.escape(", ".join(late))} overloaded: the queue grows</b>')
        if shown.refusal:
            parts.append(f'<span style="color:#b00020">{html.escape(shown.refusal)}</span>')
        return " · ".join(parts)

    def _settings(self, shown: Update) -> dict[str, dict[str, Any]]:
        """Values of the controls: the settings in force, from any browser."""
        busy = self._saving is not None or self._orders_before_save is not None
        settings: dict[str, dict[str, Any]] = {
            "window": {"value": _seconds(shown.window_s)},
            "pause": {"label": "Pause" if shown.running else "Continue"},
            "speed": {"active": SPEEDS.index(shown.speed) if shown.speed in SPEEDS else None},
            "save": {"disabled": busy},
            "saved": {"visible": bool(self._saved), "text": self._saved},
        }
        for name in asdict(shown.knobs):
            value = getattr(shown.knobs, name)
            settings[name] = {}  # options come before the value, which is one of them
            if name in ("input_len", "output_len"):
                settings[name]["options"] = [OWN, *_with(LENGTHS, value)]
            elif name in ("max_num_seqs", "max_num_batched_tokens"):
                settings[name]["options"] = _with(BATCHES if name == "max_num_seqs" else CHUNKS, value)
            settings[name]["value"] = OWN if value is None else value
        return settings


def _knobs(base: Experiment) -> dict[str, SliderControl | SelectControl]:
    """The controls of the settings that can change."""
    rate, k = base.traffic.request_rate, base.server.longest_draft
    return {
        "request_rate": SliderControl("Requests per second", 0.5, max(64.0, 4 * rate), 0.5),
        "burstiness": SliderControl("Burstiness (1: Poisson)", 0.1, 4, 0.1),
        "dataset_name": SelectControl("Data set", tuple({base.traffic.dataset_name: 0, "sharegpt": 0, "random": 0})),
        "input_len": SelectControl("Prompt tokens"),
        "output_len": SelectControl("Output tokens"),
        "acceptance_rate": SliderControl("Acceptance", 0, 1, 0.05),
        "num_speculative_tokens": SliderControl("Draft length", 0, max(8, k), 1),
        "controller": SelectControl("Controller", ("fixed", "feedback", "goodput", "adaptive-verification")),
        "max_num_seqs": SelectControl("Batch limit"),
        "max_num_batched_tokens": SelectControl("Prompt chunk"),
    }


def _with(choices: Sequence[int], value: int | None) -> list[str]:
    return [str(choice) for choice in sorted({*choices, *([] if value is None else [value])})]


def _times(speed: float) -> str:
    return "maximum speed" if speed == float("inf") else f"{speed:g}×"


def _seconds(window_s: float) -> str:
    return f"{window_s:g} s"
