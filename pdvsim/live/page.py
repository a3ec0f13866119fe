"""The page of a session: controls, metrics of the window as a table, charts. The same for all browsers."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any, get_args

from bokeh.core.templates import get_env
from bokeh.embed import file_html
from bokeh.layouts import column, row
from bokeh.models import Button, CustomJS, Div, RadioButtonGroup, Select, Slider
from bokeh.resources import Resources
from bokeh.util.paths import static_path

from pdvsim.live.charts import Charts
from pdvsim.live.knobs import BURST, Setup
from pdvsim.live.pace import SPEEDS, WINDOWS_S, Feed, Shown
from pdvsim.live.table import table_html, table_px
from pdvsim.sim.config import ControllerName, Experiment

UPDATES_PER_TABLE = 2
OWN = "data set's"
BATCHES = (4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)
LENGTHS = (32, 128, 256, 512, 1024, 2048, 4096)
WHOLE = {"sizing_mode": "stretch_width"}


Saved = Callable[[], str | None]  # the outcome of saving, as text; None while it is running


class Dashboard:
    """The page of a session, its updates and commands, for all browsers."""

    static = str(static_path())

    def __init__(
        self, feed: Feed, setup: Setup, names: Sequence[str], save: Callable[[Shown], Saved], about: str
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
        shown = feed.latest
        self.charts = Charts(self.archs, names, shown.figures)
        self.status = Div(text=self._status(shown), name="status", **WHOLE)
        self.table = Div(name="table", styles={"overflow-x": "auto", "max-width": "100%"}, **WHOLE)
        self.table.text = table_html(self.archs, names, shown.figures)
        self.widgets: dict[str, Any] = {}
        self._pace_widgets()
        self._roots = (self.status, self.pace, self._knob_widgets(setup.base), self.table, *self.charts.roots)
        for name, settings in self._settings(shown).items():
            self.widgets[name].update(**settings)

    def html(self) -> str:
        """The page, the same for every browser."""
        template = get_env().from_string(files("pdvsim.live").joinpath("page.html").read_text(encoding="utf-8"))
        # charts are redrawn if their width changes, so content must not change it
        given = {"table_px": table_px(len(self.archs)), "about": self.about}
        text: str = file_html(
            self._roots, Resources(mode="server", root_url="/"), f"pdvsim live: {', '.join(self.names)}",
            template=template, template_variables=given, suppress_callback_warning=True,
        )  # fmt: skip
        return text

    # controls ---------------------------------------------------------------------------------------------------------

    def _pace_widgets(self) -> None:
        labels = {
            "pause": ("Pause", 90),
            "on": ("Advance 1 s", 0),
            "restart": ("Restart", 0),
            "burst": (f"Burst of {BURST}", 0),
            "save": ("Save", 80),
        }
        buttons = {n: Button(label=text, width=px or 30 + 8 * len(text)) for n, (text, px) in labels.items()}
        for name, button in buttons.items():
            button.js_on_event("button_click", CustomJS(code=f"send('{name}')"))
        speed = RadioButtonGroup(labels=[_times(s) for s in SPEEDS], width=290)
        speed.js_on_change("active", CustomJS(code="choose('speed', cb_obj.active, 'speed')"))
        window = Select(options=[f"{w:g} s" for w in WINDOWS_S], width=110)
        window.js_on_change("value", CustomJS(code="choose('window', cb_obj.value, 'window')"))
        self.widgets |= {**buttons, "speed": speed, "window": window, "saved": Div(visible=False, **WHOLE)}
        for name, widget in self.widgets.items():
            widget.name = name
        line = ("pause", "speed", "on", "restart", "burst", "save", "window")
        row_of = row(*(self.widgets[n] for n in line), styles={"flex-wrap": "wrap", "gap": "6px"}, **WHOLE)
        self.pace = column(row_of, self.widgets["saved"], name="pace", **WHOLE)

    def _knob_widgets(self, knobs: Experiment) -> Any:
        rate, k = knobs.traffic.request_rate, knobs.server.longest_draft
        top = max(64.0, 4 * rate)
        datasets = dict.fromkeys((knobs.traffic.dataset_name, "sharegpt", "random"))
        turned: dict[str, Any] = {
            "request_rate": Slider(title="Requests per second", start=0.5, end=top, step=0.5, value=rate),
            "burstiness": Slider(title="Burstiness (1: Poisson)", start=0.1, end=4, step=0.1, value=1),
            "dataset_name": Select(title="Data set", options=list(datasets)),
            "input_len": Select(title="Prompt tokens"),
            "output_len": Select(title="Output tokens"),
            "acceptance_rate": Slider(title="Acceptance", start=0, end=1, step=0.05, value=0.5),
            "num_speculative_tokens": Slider(title="Draft length", start=0, end=max(8, k), step=1, value=k),
            "controller": Select(title="Controller", options=[*get_args(ControllerName)]),
            "max_num_seqs": Select(title="Batch limit"),
            "max_num_batched_tokens": Select(title="Prompt chunk"),
        }
        for name, widget in turned.items():
            widget.name = name
            widget.sizing_mode = "stretch_width"
            event = "value_throttled" if isinstance(widget, Slider) else "value"
            value = f"cb_obj.{event}"
            widget.js_on_change(event, CustomJS(code=f"choose('{name}', {value}, 'turn', ['{name}', {value}])"))
        self.widgets |= turned
        return column(*turned.values(), name="knobs", **WHOLE)

    def obey(self, what: str, value: Any) -> None:
        """Execute a browser's command; a ValueError, TypeError or LookupError if the page cannot have sent it."""
        if what == "window":
            self.feed.order("window_s", WINDOWS_S[[f"{w:g} s" for w in WINDOWS_S].index(value)])
        elif what == "turn":
            name, turned = value
            self.feed.order("turn", {name: self._turned(name, turned)})
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

    def _turned(self, name: str, value: Any) -> Any:
        """The value of a knob from that of its widget."""
        widget = self.widgets[name]
        if isinstance(widget, Slider):
            number = round(float(value), 6)  # its steps have rounding errors
            if not widget.start <= number <= widget.end:
                raise ValueError(f"{name} must be from {widget.start:g} to {widget.end:g}")
            return int(number) if name == "num_speculative_tokens" else number
        if name in ("dataset_name", "controller"):
            return widget.options[widget.options.index(value)]
        return None if value == OWN else int(value)

    def _ask_to_save(self) -> None:
        if self._saving is None and self._orders_before_save is None:
            self._orders_before_save = self.feed.ordered
            self._saved = "saving: the session is run again with all records …"
            self.controls += 1

    # what is shown ----------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Read updates; whether there is something to send."""
        shown, before = self.feed.latest, self.controls
        if self._saving is not None and (said := self._saving()) is not None:
            self._saving, self.controls = None, self.controls + 1
            self._saved = f'<pre style="white-space:pre-wrap;margin:4px 0">{html.escape(said)}</pre>'
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
        """The update for a browser that got so many messages and has these controls."""
        shown, due = self.feed.latest, self.charts.due(sent)
        settings = [self._part("status", lambda: {"text": self._status(shown)})]
        if known != self.controls or sent % UPDATES_PER_TABLE == 0:  # numbers need fewer updates
            figures = shown.figures
            settings.append(self._part("table", lambda: {"text": table_html(self.archs, self.names, figures)}))
        if known != self.controls:
            settings += [self._part(n, lambda v=v: v) for n, v in self._settings(shown).items()]  # type: ignore[misc]
        sources = [self._part(name, lambda name=name: self.charts.data(name, shown.figures)) for name in due]  # type: ignore[misc]
        return f'{{"number": {sent + 1}, "settings": {{{", ".join(settings)}}}, "sources": {{{", ".join(sources)}}}}}'

    def _part(self, name: str, make: Callable[[], Any]) -> str:
        if name not in self._update_parts:
            self._update_parts[name] = f"{json.dumps(name)}: {json.dumps(make())}"
        return self._update_parts[name]

    def _status(self, shown: Shown) -> str:
        if not self.feed.alive:
            return f"<b>the session has ended</b> {html.escape(self.feed.ended)}"
        pace = f"{shown.went:.1f}× real time" if shown.running else "paused"
        parts = [f"<b>{shown.now_s:.1f} s</b> simulated", pace, f"values of the last {shown.window_s:g} s"]
        late = [name for name, figures in zip(self.names, shown.figures, strict=True) if figures["overloaded"]]
        if late:
            parts.append(f'<b style="color:#a34700">{html.escape(", ".join(late))} overloaded: the queue grows</b>')
        if shown.refusal:
            parts.append(f'<span style="color:#b00020">{html.escape(shown.refusal)}</span>')
        return " · ".join(parts)

    def _settings(self, shown: Shown) -> dict[str, dict[str, Any]]:
        """Values of the controls: the settings in force, from any browser."""
        busy = self._saving is not None or self._orders_before_save is not None
        settings: dict[str, dict[str, Any]] = {
            "window": {"value": f"{shown.window_s:g} s"},
            "pause": {"label": "Pause" if shown.running else "Continue"},
            "speed": {"active": SPEEDS.index(shown.speed) if shown.speed in SPEEDS else None},
            "save": {"disabled": busy},
            "saved": {"visible": bool(self._saved), "text": self._saved},
        }
        for name in asdict(shown.knobs):
            value = getattr(shown.knobs, name)
            if isinstance(self.widgets[name], Slider):
                settings[name] = {"value": value}
                continue
            settings[name] = {"value": OWN if value is None else str(value)}
            if name in ("input_len", "output_len"):
                settings[name]["options"] = [OWN, *_with(LENGTHS, value)]
            elif name in ("max_num_seqs", "max_num_batched_tokens"):
                settings[name]["options"] = _with(BATCHES if name == "max_num_seqs" else CHUNKS, value)
        return settings


def _with(choices: Sequence[int], value: int | None) -> list[str]:
    return [str(choice) for choice in sorted({*choices, *([] if value is None else [value])})]


def _times(speed: float) -> str:
    return "maximum speed" if speed == float("inf") else f"{speed:g}×"
