"""One answer as a page: title, setting, sections, plots and provenance.

A single HTML file that needs no network. All content is escaped, and a content security policy forbids loading
anything.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from pdvsim.bench.output import picture
from pdvsim.view.charts import Chart
from pdvsim.view.report import page
from pdvsim.view.style import number_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120


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
    plain = {name: value for name, value in facts.items() if not isinstance(value, Mapping)}
    groups = [(name, group) for name, group in facts.items() if isinstance(group, Mapping) and group]
    folded = (f"<details><summary>{escape(name)}</summary>{_facts(flat(group))}</details>" for name, group in groups)
    return _facts(flat(plain)) + "".join(folded)


def _facts(values: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values.items())
    return f'<dl class="facts">{rows}</dl>'
