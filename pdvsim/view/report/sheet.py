"""Pages: one HTML file each that works offline, with its style, script and data; `pdvsim live` feeds the same page.

A page is a document of parts (`page`), or one answer: title, setting, sections, plots and provenance (`Sheet`). Content
is escaped, or embedded as JSON and inserted as text. A content security policy forbids loading anything.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import groupby
from string import Template
from typing import TYPE_CHECKING, Any, Protocol

from pdvsim.bench.output import picture
from pdvsim.view.charts import Chart, plain
from pdvsim.view.style import grew, metric_label, number_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120
CONTROLS = """<form id="controls" aria-label="What to show">
<fieldset id="archs"><legend>Architectures</legend></fieldset></form>"""


def page(document: Mapping[str, Any]) -> str:
    """The page of a document, which has a title, a lead and parts.

    Parts of HTML stand in it as they are. Before them its script draws the others, for every choice of the `controls`,
    or as a live session sends them if it is a `feed`. No other script can join.
    """
    still = [part for part in document["parts"] if "html" in part]
    drawn = [part for part in document["parts"] if "html" not in part]
    data = {"archs": [], "controls": [], **document, "parts": drawn}
    feed, warning, here = document.get("feed"), document.get("warning"), files("pdvsim.view.report")
    text = {name: here.joinpath(f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    digest = base64.b64encode(sha256(text["js"].encode()).digest()).decode()
    return Template(text["html"]).substitute(
        policy=f"; script-src 'sha256-{digest}'" + ("; connect-src 'self'" if feed else ""),
        title=escape(document["title"]),
        style=text["css"],
        lead=escape(document["lead"]),
        warning=f'<p id="warning">{escape(warning)}</p>' if warning else "",
        feed='<div id="status"></div><div id="saved"></div>' if feed else "",
        controls=CONTROLS if data["controls"] else "",
        kind=' class="drawn"' if drawn else "",
        main="\n".join(map(_section, still)),
        data=embedded(plain(data)),
        script=text["js"],
    )


def _section(part: Mapping[str, Any]) -> str:
    """A part of HTML, which is escaped."""
    note = f'<p class="note">{escape(part["note"])}</p>' if part.get("note") else ""
    return f'<section id="{part["id"]}" class="wide"><h2>{escape(part["title"])}</h2>{part["html"]}{note}</section>'


def metric_table(
    heads: Sequence[tuple[str, str]],
    queues: Sequence[str],
    groups: Mapping[str, str],
    cell: Callable[[str, int], tuple[str, str, str]],
) -> dict[str, Any]:
    """A table with one column per head: whether its queue grew, then metrics.

    `groups` are of the metrics, in order; those with one are folded. A cell is its text, a smaller one and a class.
    """
    rows = [("queue", "", [(text, "", "grew" if grew(text) else "") for text in queues])]
    rows += [(metric_label(m), group, [cell(m, at) for at in range(len(heads))]) for m, group in groups.items()]
    return {"heads": heads, "rows": rows}


def embedded(document: Any) -> str:
    """The document as JSON for a script element: nothing in it can end the element."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class Showable(Protocol):
    """A part of a section with its own HTML form; as text it is printed."""

    def html(self) -> str:
        """The part as HTML, with escaped texts."""


PageSection = tuple[str, Sequence[str | Showable]]  # heading, possibly empty, and parts


@dataclass(frozen=True)
class Highlight:
    """Main result of a page: a headline with lines, and a few values. As text: the lines."""

    lines: Sequence[str]
    figures: Mapping[str, str] = field(default_factory=dict)
    good: bool = True

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def html(self) -> str:
        headline, *rest = map(escape, self.lines)
        tiles = "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(value)}</dd></div>" for n, value in self.figures.items())
        lines = "".join(f"<p>{line}</p>" for line in rest)
        kind = "good" if self.good else "bad"
        return f'<div class="card {kind}"><p class="headline"><b>{headline}</b></p>{lines}<dl>{tiles}</dl></div>'


@dataclass(frozen=True)
class Sheet:
    """Content of a page. A plot is placed in the section of its heading, or before all sections."""

    title: str
    lead: str
    sections: Sequence[PageSection]
    pictures: Mapping[str, Figure] = field(default_factory=dict)  # by heading
    facts: Mapping[str, Any] = field(default_factory=dict)  # provenance, one level or two
    charts: Sequence[Chart] = ()  # before all sections

    def html(self) -> str:
        images = {name: f'<div class="scroll">{image(figure, name)}</div>' for name, figure in self.pictures.items()}
        sections = [
            (name or "Figures", parts_html(parts) + images.pop(name, "")) for name, parts in self.sections if parts
        ]
        blocks = [*images.items(), *sections, ("Provenance", facts_html(self.facts))]
        shown = {chart.title or chart.x: {"": {"charts": [replace(chart, title="")]}} for chart in self.charts}
        drawn = [{"id": f"chart-{at}", "title": n, "content": c} for at, (n, c) in enumerate(shown.items())]
        still = [{"id": f"part-{at}", "title": name, "html": block} for at, (name, block) in enumerate(blocks)]
        return page({"title": self.title, "lead": self.lead, "parts": [*drawn, *still]})


def parts_html(parts: Iterable[str | Showable]) -> str:
    """The parts of a section as HTML: lines as a list, texts of several lines as they are."""
    pieces = []
    for kind, group in groupby(parts, lambda part: "\n" in part if isinstance(part, str) else None):
        if kind is False:
            items = "".join(f"<li>{escape(str(line))}</li>" for line in group if line)
            pieces.append(f'<ul class="lines">{items}</ul>' if items else "")
        else:
            pieces += [f"<pre>{escape(part)}</pre>" if isinstance(part, str) else part.html() for part in group]
    return "".join(pieces)


def command_html(label: str, text: str, notes: Sequence[str]) -> str:
    """A command with a label, a copy button and notes."""
    code = f'<pre class="command"><code>{escape(text)}</code></pre>' if text else ""
    listed = f'<p class="note">{"<br>".join(map(escape, notes))}</p>' if notes else ""
    return f"<h3>{escape(label)}</h3>{code}{listed}"


def image(figure: Figure, name: str) -> str:
    """A figure as an image that fits its page."""
    data = base64.b64encode(picture(figure, "image.png", DPI)).decode()
    return f'<img style="max-width: 100%; height: auto" alt="{escape(name)}" src="data:image/png;base64,{data}">'


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as one level of texts, without empty ones."""
    texts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value and all(isinstance(v, float) for v in value.values()):
            texts[f"{prefix}{name}"] = ", ".join(f"{key} {number_text(v)}" for key, v in value.items())
        elif isinstance(value, Mapping):
            texts |= flat(value, f"{prefix}{name}.")
        elif value is not None and value != "" and not (isinstance(value, Sequence) and not value):
            listed = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            texts[f"{prefix}{name}"] = number_text(listed, 4) if isinstance(listed, float) else str(listed)
    return texts


def facts_html(facts: Mapping[str, Any]) -> str:
    """Facts as a list, with collapsed groups."""
    single = {name: value for name, value in facts.items() if not isinstance(value, Mapping)}
    groups = [(name, group) for name, group in facts.items() if isinstance(group, Mapping) and group]
    folded = (f"<details><summary>{escape(name)}</summary>{_facts(flat(group))}</details>" for name, group in groups)
    return _facts(flat(single)) + "".join(folded)


def _facts(values: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values.items())
    return f'<dl class="facts">{rows}</dl>'
