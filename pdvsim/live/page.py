"""The page: settings to turn, the window's figures as a table, charts. One for each browser, all of one session."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from time import monotonic
from typing import Any, Protocol

from bokeh.core.templates import get_env
from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import Button, CustomJS, Div, RadioButtonGroup, Select, Slider

from pdvsim.live.charts import Charts
from pdvsim.live.knobs import BURST, DROP_S, Setup
from pdvsim.live.pace import SPEEDS, WINDOWS_S, Feed, Shown
from pdvsim.live.table import table_html, table_px
from pdvsim.sim.config import Experiment

UPDATE_MS = 150
TABLE_EVERY = 2  # updates
OWN = "data set's"
BESIDE = "a real run and the same run simulated: the small figures are the simulation's error"
BATCHES = (4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)
LENGTHS = (32, 128, 256, 512, 1024, 2048, 4096)
AHEAD = 2  # updates that a browser may not have drawn yet: a slow one gets fewer, not later ones
HIDDEN_S = 2.0  # then it is told again: it draws nothing while nobody sees it
DRAWN = "requestAnimationFrame(() => setTimeout(() => { drawn.tags = sent.tags }))"
WHOLE = {"sizing_mode": "stretch_width"}


class Saving(Protocol):
    """A result that is being written."""

    def said(self) -> str | None:
        """What came of it, in a line or more of text; None while it goes on."""


Save = Callable[[Shown], Saving]


class Dashboard:
    """What one browser shows, and its way to the session that all browsers share."""

    def __init__(
        self,
        document: Document,
        feed: Feed,
        archs: Sequence[str],
        names: Sequence[str],
        setup: Setup | None,
        save: Save,
    ) -> None:
        """`setup` is what can be turned; without one a real run is shown, and nothing can."""
        self.document, self.feed, self.save = document, feed, save
        self.archs, self.names, self.setup = archs, names, setup
        self._pictures = self._orders = -1
        self._updates = 0
        self._syncing = False
        self._saving: Saving | None = None
        self._save_from: int | None = None  # orders that must have been obeyed before it is saved
        shown = feed.latest
        self.charts = Charts(self.archs, names, shown.figures)
        self.status = Div(text=self._status(shown), name="status", **WHOLE)
        self.table = Div(name="table", styles={"overflow-x": "auto", "max-width": "100%"}, **WHOLE)
        self.table.text = table_html(archs, names, shown.figures)
        self._drawn, self._sent_s = 0, 0.0
        self.status.js_on_change("tags", CustomJS(args={"sent": self.status, "drawn": self.table}, code=DRAWN))
        self.table.on_change("tags", self._heard)
        self.saved = Div(visible=False, **WHOLE)
        self.widgets: dict[str, Any] = {}
        self._pace_widgets()
        turned = [] if setup is None else [self._knob_widgets(setup.base)]
        self._sync(shown)
        for root in (self.status, self.pace, *turned, self.table, *self.charts.roots):
            document.add_root(root)
        document.title = f"pdvsim live: {', '.join(names)}"
        document.template = get_env().from_string(
            files("pdvsim.live").joinpath("page.html").read_text(encoding="utf-8")
        )
        # charts are drawn anew when their width changes: nothing that is shown may change it
        document.template_variables.update(table_px=table_px(len(archs)), turns=setup is not None)
        document.add_periodic_callback(self.update, UPDATE_MS)

    # controls ---------------------------------------------------------------------------------------------------------

    def _pace_widgets(self) -> None:
        self.pause = Button(label="Pause", width=90, name="pause")
        self.pause.on_click(lambda: self.feed.order("running", self.pause.label != "Pause"))
        self.speed = RadioButtonGroup(labels=[_times(s) for s in SPEEDS], width=290, name="speed")
        self.speed.on_change("active", lambda attr, old, new: self._order("speed", SPEEDS[new or 0]))
        self.window = Select(options=[f"{w:g} s" for w in WINDOWS_S], width=110, name="window")
        self.window.on_change("value", lambda attr, old, new: self._order("window_s", float(new.split()[0])))
        buttons = {
            "One second on": ("on", 1.0),
            "Restart": ("restart", None),
            f"Burst of {BURST}": ("burst", None),
            f"Halve acceptance {DROP_S:.0f} s": ("drop", None),
        }
        made = []
        for label, order in buttons.items():
            made.append(Button(label=label, width=30 + 8 * len(label), name=order[0]))
            made[-1].on_click(lambda order=order: self.feed.order(*order))
        self.keep = Button(label="Save", width=80, name="save")
        self.keep.on_click(self._save)
        every = (self.pause, self.speed, *made, self.keep, self.window) if self.setup else (self.window,)
        line = row(*every, styles={"flex-wrap": "wrap", "gap": "6px"}, **WHOLE)
        self.pace = column(line, self.saved, name="pace", **WHOLE)

    def _knob_widgets(self, knobs: Experiment) -> Any:
        rate, k = knobs.traffic.request_rate, knobs.server.longest_draft
        top = max(64.0, 4 * rate)
        datasets = dict.fromkeys((knobs.traffic.dataset_name, "sharegpt", "random"))
        self.widgets = {
            "request_rate": Slider(title="Requests a second", start=0.5, end=top, step=0.5, value=rate),
            "burstiness": Slider(title="Burstiness (1: Poisson)", start=0.1, end=4, step=0.1, value=1),
            "dataset_name": Select(title="Data set", options=list(datasets)),
            "input_len": Select(title="Prompt tokens"),
            "output_len": Select(title="Output tokens"),
            "acceptance_rate": Slider(title="Acceptance", start=0, end=1, step=0.05, value=0.5),
            "num_speculative_tokens": Slider(title="Draft length", start=0, end=max(8, k), step=1, value=k),
            "controller": Select(title="Who chooses it", options=["fixed", "feedback", "goodput"]),
            "max_num_seqs": Select(title="Batch limit"),
            "max_num_batched_tokens": Select(title="Prompt chunk"),
        }
        for name, widget in self.widgets.items():
            widget.name = name
            widget.sizing_mode = "stretch_width"
            event = "value_throttled" if isinstance(widget, Slider) else "value"
            widget.on_change(event, lambda attr, old, new, name=name: self._turn(name, new))
        return column(*self.widgets.values(), name="knobs", **WHOLE)

    def _turn(self, name: str, value: Any) -> None:
        if self._syncing:
            return
        if isinstance(value, str) and name not in ("dataset_name", "controller"):
            value = None if value == OWN else int(value)
        elif isinstance(value, float | int):  # of a slider, whose steps add up to 5.000000000000001
            value = int(value) if name == "num_speculative_tokens" else round(value, 6)
        self.feed.order("turn", replace(self.feed.latest.knobs, **{name: value}))

    def _order(self, what: str, value: Any) -> None:
        if not self._syncing:
            self.feed.order(what, value)

    def _save(self) -> None:
        if self._saving is None and self._save_from is None:
            self.keep.disabled, self._save_from = True, self.feed.ordered
            self.saved.visible = True
            self.saved.text = "saving: the session is run again, with every record kept …"

    # what is shown ----------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Show the latest picture, if it is new to this browser."""
        if self._saving is not None and (said := self._saving.said()) is not None:
            self._saving, self.keep.disabled = None, False
            self.saved.text = f'<pre style="white-space:pre-wrap;margin:4px 0">{html.escape(said)}</pre>'
        shown = self.feed.latest
        if not self.feed.alive:
            self.status.text = f"<b>the session has ended</b> {html.escape(self.feed.ended)}"
        elif self._save_from is not None and shown.orders >= self._save_from:
            self._saving, self._save_from = self.save(shown), None
        elif self.feed.pictures != self._pictures and not self._behind():
            self._pictures, self._updates = self.feed.pictures, self._updates + 1
            ordered = shown.orders != self._orders
            if ordered:
                self._orders = shown.orders
                self._sync(shown)
            self.status.text = self._status(shown)
            if ordered or self._updates % TABLE_EVERY == 0:  # nobody reads numbers faster
                self.table.text = table_html(self.archs, self.names, shown.figures)
            self.charts.show(shown.figures)
            self.status.tags, self._sent_s = [self._updates], monotonic()

    def _behind(self) -> bool:
        return self._updates - self._drawn >= AHEAD and monotonic() - self._sent_s < HIDDEN_S

    def _heard(self, attr: str, old: list[int], new: list[int]) -> None:
        [self._drawn] = new

    def _status(self, shown: Shown) -> str:
        pace = f"{shown.went:.1f}× real time" if shown.running else "paused"
        parts = [f"<b>{shown.now_s:.1f} s</b> simulated", pace] if self.setup else [_real(shown), BESIDE]
        parts += [f"figures of the last {shown.window_s:g} s"]
        if shown.figures[-1].get("dropped"):
            parts.append("<b>acceptance is halved</b>")
        if shown.refusal:
            parts.append(f'<span style="color:#b00020">{html.escape(shown.refusal)}</span>')
        return " · ".join(parts)

    def _sync(self, shown: Shown) -> None:
        """Let the controls show what is in force, whoever turned it."""
        self._syncing = True
        knobs = shown.knobs
        for name, widget in self.widgets.items():
            value = getattr(knobs, name)
            if isinstance(widget, Slider):
                widget.value = value
                continue
            if name in ("input_len", "output_len"):
                widget.options = [OWN, *_with(LENGTHS, value)]
            elif name in ("max_num_seqs", "max_num_batched_tokens"):
                widget.options = _with(BATCHES if name == "max_num_seqs" else CHUNKS, value)
            widget.value = OWN if value is None else str(value)
        self.pause.label = "Pause" if shown.running else "Go on"
        self.speed.active = SPEEDS.index(shown.speed) if shown.speed in SPEEDS else None
        self.window.value = f"{shown.window_s:g} s"
        self._syncing = False


def _with(choices: Sequence[int], value: int | None) -> list[str]:
    return [str(choice) for choice in sorted({*choices, *([] if value is None else [value])})]


def _real(shown: Shown) -> str:
    ended = "" if shown.running else ", the run is over"
    return f"<b>{shown.now_s:.1f} s</b> of the real run{ended}"


def _times(speed: float) -> str:
    return "as fast as it goes" if speed == float("inf") else f"{speed:g}×"
