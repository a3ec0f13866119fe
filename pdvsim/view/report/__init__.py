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
from typing import Any

from pdvsim.view.charts import plain
from pdvsim.view.style import grew, metric_label

FORM = (
    '{}<form id="controls" aria-label="What to show"><fieldset id="archs">'
    "<legend>Architectures</legend></fieldset></form>\n<main></main>\n"
    '<div id="tip" hidden></div>\n<script type="application/json" id="data">{}</script>'
)


def page(document: Mapping[str, Any]) -> str:
    """The page that shows a document: its parts, and the controls that choose among them or change a live session."""
    warning = f'<p id="warning">{escape(document["warning"])}</p>' if document.get("warning") else ""
    live = '<div id="status"></div><div id="saved"></div>' if document.get("feed") else ""
    body = FORM.format(warning + live, embedded(plain(document)))
    return html_page(document["title"], document["lead"], body, ["page.js"], "; connect-src 'self'" if live else "")


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


def html_page(title: str, lead: str, body: str, scripts: Sequence[str] = (), policy: str = "") -> str:
    """A page with a body of HTML and scripts of this folder, which no other script can join."""
    here = files("pdvsim.view.report")
    code = [here.joinpath(name).read_text(encoding="utf-8") for name in scripts]
    hashes = [f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'" for text in code]
    parts = {
        "POLICY": f"; script-src {' '.join(hashes)}{policy}" if code else policy,
        "TITLE": escape(title),
        "STYLE": here.joinpath("page.css").read_text(encoding="utf-8"),
        "HEADING": escape(title),
        "LEAD": escape(lead),
        "BODY": body,
        "SCRIPTS": "".join(f"<script>{text}</script>\n" for text in code),
    }
    pieces = [here.joinpath("page.html").read_text(encoding="utf-8")]
    for name, text in parts.items():  # in their order: texts are not searched for further marks
        head, _, rest = pieces.pop().partition(f"<!--{name}-->")
        pieces += [head, text, rest]
    return "".join(pieces)


def embedded(document: Any) -> str:
    """The document as JSON for a script element: nothing in it can end the element."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
