"""Pages: one HTML file each that works offline, with its style, script and data; `pdvsim live` feeds the same page.

Content is escaped, or embedded as JSON and inserted as text. A content security policy forbids loading anything.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from pdvsim.view.charts import plain
from pdvsim.view.style import grew, metric_label

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
