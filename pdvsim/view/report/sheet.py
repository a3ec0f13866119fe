"""One answer as a page: a title, the setting, what was printed, pictures and where the figures come from.

A single HTML file that needs no network and no script. What comes from elsewhere is escaped; a policy in its head
forbids loading anything.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from pdvsim.study.output import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Sheet:
    """What a page shows; `text` is as the command prints it."""

    title: str
    lead: str
    text: str
    pictures: Mapping[str, Figure] = field(default_factory=dict)  # by heading
    facts: Mapping[str, Any] = field(default_factory=dict)  # provenance, one level or two

    def html(self) -> str:
        """The page."""
        style = files("pdvsim.view.report").joinpath("page.css").read_text(encoding="utf-8")
        drawn = [
            f'<section><h2>{escape(name)}</h2><div class="scroll">{image(figure, name)}</div></section>'
            for name, figure in self.pictures.items()
        ]
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<link rel="icon" href="data:,">\n'
            f"<title>{escape(self.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
            f'<header>\n<h1>{escape(self.title)}</h1>\n<p id="lead">{escape(self.lead)}</p>\n</header>\n<main>\n'
            f"{''.join(drawn)}\n<section><h2>Figures</h2>{printed(self.text)}</section>\n"
            f"<section><h2>Provenance</h2>{provenance(self.facts)}</section>\n</main>\n</body>\n</html>\n"
        )


def image(figure: Figure, name: str) -> str:
    """A figure as an image within the page."""
    data = base64.b64encode(picture(figure, "image.png", DPI)).decode()
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">'


def printed(text: str) -> str:
    """A printed text as HTML: headings, tables that keep their columns, and lines that may wrap."""
    pieces: list[str] = []
    loose: list[str] = []
    lines = [*text.splitlines(), ""]
    at = 0

    def wrap() -> None:
        if any(loose):
            pieces.append('<pre class="wrap">{}</pre>'.format(escape("\n".join(loose).strip("\n"))))
        loose.clear()

    while at < len(lines):
        line, under = lines[at], lines[at + 1] if at + 1 < len(lines) else ""
        if line and set(under) == {"-"} and "  " not in line:
            wrap()
            pieces.append(f"<h3>{escape(line)}</h3>")
            at += 2
        elif line and set(under) == {"-"}:
            wrap()
            end = at + 2
            while end < len(lines) and "  " in lines[end]:
                end += 1
            pieces.append("<pre>{}</pre>".format(escape("\n".join(lines[at:end]))))
            at = end
        else:
            loose.append(line)
            at += 1
    wrap()
    return "".join(pieces)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as one level of texts; what says nothing is left out."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value and all(isinstance(v, float) for v in value.values()):
            found[f"{prefix}{name}"] = ", ".join(f"{key} {v:.3g}" for key, v in value.items())
        elif isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif value is not None and value != "" and not (isinstance(value, Sequence) and not value):
            listed = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            found[f"{prefix}{name}"] = f"{listed:.4g}" if isinstance(listed, float) else str(listed)
    return found


def provenance(facts: Mapping[str, Any]) -> str:
    """Facts as a list, groups of them folded away."""
    plain = {name: value for name, value in facts.items() if not isinstance(value, Mapping)}
    groups = [(name, group) for name, group in facts.items() if isinstance(group, Mapping) and group]
    folded = (f"<details><summary>{escape(name)}</summary>{_facts(flat(group))}</details>" for name, group in groups)
    return _facts(flat(plain)) + "".join(folded)


def _facts(values: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values.items())
    return f'<dl class="facts">{rows}</dl>'
