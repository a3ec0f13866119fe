"""Results as one interactive page: a single HTML file that works offline, including plotly.js, style, script and data.

Content from files is embedded as JSON and inserted as text, never as markup. A content security policy forbids loading
anything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def page(document: dict[str, Any]) -> str:
    """The page that shows a document made by `pdvsim.view.report.document`."""
    from plotly.offline import get_plotlyjs

    here = files("pdvsim.view.report")
    html = here.joinpath("page.html").read_text(encoding="utf-8")
    parts = {
        "/*STYLE*/": here.joinpath("page.css").read_text(encoding="utf-8"),
        "/*DATA*/": embedded(document),
        "/*PLOTLY*/": get_plotlyjs(),
        "/*CHARTS*/": here.joinpath("charts.js").read_text(encoding="utf-8"),
        "/*PAGE*/": here.joinpath("page.js").read_text(encoding="utf-8"),
    }
    return filled_in(html, parts)


def filled_in(html: str, parts: Mapping[str, str]) -> str:
    """A page with a text in place of each mark, in the order of the marks; texts are not searched for further marks."""
    pieces = [html]
    for mark, text in parts.items():
        head, separator, rest = pieces.pop().partition(mark)
        assert separator, mark
        pieces += [head, text, rest]
    return "".join(pieces)


def embedded(document: dict[str, Any]) -> str:
    """The document as JSON for a script element: nothing in it can end the element."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
