"""Tables as text that fits the terminal, and their cells.

An Interval prints as its mean and, from two replications on, the half-width of its confidence interval.
"""

from __future__ import annotations

import html
import math
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import Any

from pdvsim.bench.stats import Interval

UNKNOWN_WIDTH = 160  # columns, if the output is not a terminal
DETAIL = "±, brackets, decimals"  # dropped on a narrow terminal; differences keep their ±
LEFT_OUT = "left out to fit"
BRACKETS = "error range in brackets"  # a note that begins with this is dropped with them
LONG_TEXT, SHORT_TEXT = 24, 14  # columns of longer texts are folded first, to no less; the others if need be
TextRow = Mapping[str, str]


@dataclass(frozen=True)
class TextTable:
    """Rows with the same keys. Printed, it fits the terminal; on a page it is complete."""

    rows: Sequence[TextRow]
    spare: Sequence[str] = ()  # columns, and DETAIL, omitted on a narrow terminal, in this order
    notes: Sequence[str] = ()  # under it
    headings: Sequence[str] = ()  # one per row, shown above the first row that has it

    def __str__(self) -> str:
        lines = fitted_table(self.rows, self.spare, self.headings)
        without = lines[-1].startswith(LEFT_OUT) and DETAIL in lines[-1]
        return "\n".join([*lines, *(note for note in self.notes if not (without and note.startswith(BRACKETS)))])

    def html(self) -> str:
        """The table as HTML with its notes, numbers to the right; texts are escaped."""
        right = {name for name in self.rows[0] if all(_is_figure(row[name]) for row in self.rows)}

        def line(kind: str, cells: TextRow) -> str:
            side = {name: "right" if name in right else "left" for name in cells}
            shown = (f'<{kind} style="text-align:{side[n]}">{html.escape(t)}</{kind}>' for n, t in cells.items())
            return f"<tr>{''.join(shown)}</tr>"

        over = f'<tr><th colspan="{len(self.rows[0])}" style="text-align:left">{{}}</th></tr>'
        above = (over.format(html.escape(words)) if words else "" for words in _first_of_runs(self.headings, self.rows))
        lines = [words + line("td", row) for words, row in zip(above, self.rows, strict=True)]
        notes = f'<p class="note">{"<br>".join(map(html.escape, self.notes))}</p>' if self.notes else ""
        head, body = line("th", {name: name for name in self.rows[0]}), "".join(lines)
        return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>{notes}'


def continued(command: str) -> str:
    """A command within the terminal's width, its lines joined by backslashes: flags stay with their values."""
    words, lines = shlex.split(command), [""]
    if len(command) <= terminal_width() or shlex.join(words) != command:  # the second: more than words and quotes
        return command
    for at, word in enumerate(words):
        flag = word.startswith("-") and at + 1 < len(words) and not words[at + 1].startswith("-")
        room = len(shlex.quote(word)) + (1 + len(shlex.quote(words[at + 1])) if flag else 0)
        if lines[-1].strip() and len(lines[-1]) + 1 + room > terminal_width() - len(" \\"):
            lines.append("   ")
        lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join([lines[0].lstrip(), *lines[1:]])


# cells ---------------------------------------------------------------------------------------------------------------


def mean_of(value: Any, otherwise: float = math.nan) -> float:
    """A number, or the mean of an Interval; `otherwise` for nothing."""
    return otherwise if missing(value) else float(value.mean if isinstance(value, Interval) else value)


def missing(value: Any) -> bool:
    """Whether there is no value: None or nan."""
    value = value.mean if isinstance(value, Interval) else value
    return value is None or (isinstance(value, float) and math.isnan(value))


def cell(value: Any, decimals: int = 2, scale: float = 1.0, sign: str = "") -> str:
    """A number, an Interval, or a dash for nothing."""
    if missing(value):
        return "-"
    if isinstance(value, Interval):
        mean = cell(value.mean, decimals, scale, sign)
        sure = not value.half_width > 1e-9 * abs(value.mean)  # one run, or equal in all
        return mean if sure else f"{mean} ±{value.half_width * scale:.{decimals}f}"
    text = f"{value * scale:{sign}.{decimals}f}"
    return text if float(text) else text.replace("-", "")  # no minus zero


def percent_cell(value: float | None, sign: str = "") -> str:
    """A share in percent, or a dash for nothing."""
    return cell(value) if missing(value) else f"{cell(value, 1, 100, sign)}%"


def banded(values: Mapping[str, Any], key: str, decimals: int = 2, scale: float = 1.0) -> str:
    """A cell with its error: relative, or a range if forward times are predicted."""
    text, ends = cell(values.get(key), decimals, scale), [values.get(f"{key}_{end}") for end in ("low", "high")]
    if not math.isnan(error := mean_of(values.get(f"{key}_error"))):
        return f"{text} (±{100 * error:.1f}%)"
    if any(missing(end) for end in ends):
        return text
    low, high = (cell(mean_of(end), decimals, scale) for end in ends)
    return f"{text} ({low} to {high})"


def span_text(counts: Iterable[int]) -> str:
    """The least and the largest of some numbers: 5, or 5 to 10."""
    known = sorted(counts)
    return " to ".join(dict.fromkeys(map(str, (known[0], known[-1]))))


def load_name(kind: str) -> str:
    """A kind of load as a heading."""
    return {"concurrency": "concurrency", "request_rate": "rate req/s"}.get(kind, kind)


def load_text(load: float) -> str:
    """A load as a number; a trace has none."""
    return "trace" if math.isnan(load) else f"{load:g}"


# layout --------------------------------------------------------------------------------------------------------------


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as wide as its cells, numbers right-aligned."""
    return "\n".join(_lines(header, rows, [""] * len(rows)))


def fitted_table(rows: Sequence[TextRow], spare: Iterable[str], headings: Sequence[str] = ()) -> list[str]:
    """Rows with the same keys as a grid that fits the terminal, and a line on omitted columns.

    Headings and long texts are folded first; then columns of `spare` are omitted, in order. `headings`, one per row,
    are printed above the first row that has them.
    """
    width, out = terminal_width(), list[str]()
    above = _first_of_runs(headings, rows)
    lines = _laid_out(rows, width, above)
    for name in spare:
        if not _wide(lines, width):
            break
        before = rows
        rows = [{k: _plainer(v) if name == DETAIL else v for k, v in row.items() if k != name} for row in rows]
        out += [name] if rows != before else []
        lines = _laid_out(rows, width, above)
    if _wide(lines, width):
        lines = _laid_out(rows, width, above, 1, 1)
    return [*lines, *([f"{LEFT_OUT} {width} columns: {', '.join(out)}"] if out else [])]


def terminal_width() -> int:
    """Columns of the terminal."""
    return get_terminal_size((UNKNOWN_WIDTH, 24)).columns


def folded(text: str, width: int) -> list[str]:
    """A text in lines of that width; words are never broken."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _first_of_runs(headings: Sequence[str], rows: Sequence[TextRow]) -> list[str]:
    """The headings of rows, each only where it differs from the one before."""
    headings = headings or [""] * len(rows)
    return ["" if at and heading == headings[at - 1] else heading for at, heading in enumerate(headings)]


def _wide(lines: Sequence[str], width: int) -> bool:
    return next(len(line) for line in lines if set(line) == {"-"}) > width


def _plainer(text: str) -> str:
    """A value without its interval, error range and minor decimals; a difference without the decimals."""
    if not _is_figure(text):
        return text
    most = r"\d{2,}\.\d+"
    if text[:1].isdigit():
        text, most = re.sub(r" ±[\d.]+| \([±\d][^)]*\)", "", text), r"\d{3,}\.\d+"
    return re.sub(most, lambda number: f"{float(number[0]):.0f}", text)


def _is_figure(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in "+-"


def _laid_out(
    rows: Sequence[TextRow], width: int, above: Sequence[str], long: int = LONG_TEXT, short: int = SHORT_TEXT
) -> list[str]:
    """The lines of a table, folded if they are wider than `width`.

    Headings are folded to two lines, and columns wider than `long`, the widest first, to at least `short`.
    """
    names, cells = [*rows[0]], [[*row.values()] for row in rows]
    if not _wide(lines := _lines(names, cells, above), width):
        return lines
    columns = list(zip(*cells, strict=True))
    widest = [max(map(len, column)) for column in columns]
    words = [max(map(len, re.split(" (?!%)", name))) for name in names]  # "gain %" is one
    heads = [
        len(name) if len(name) <= room else next(w for w in range(word, len(name) + 1) if len(folded(name, w)) <= 2)
        for name, word, room in zip(names, words, widest, strict=True)
    ]
    over = sum(map(max, heads, widest)) + 2 * len(names) - 2 - width
    rooms = widest[:]
    for at in sorted(range(len(columns)), key=lambda at: -widest[at]):
        word = max(len(word) for text in (names[at], *columns[at]) for word in text.split(" "))
        if over > 0 and widest[at] > max(long, word) and not all(map(_is_figure, columns[at])):
            room = max(short, word, widest[at] - over)
            over -= max(heads[at], rooms[at]) - room
            heads[at] = rooms[at] = room
    return _lines(_folded_each(names, heads), [_folded_each(row, rooms) for row in cells], above)


def _folded_each(texts: Iterable[str], rooms: Iterable[int]) -> list[str]:
    return ["\n".join(folded(text, max(room, 1))) for text, room in zip(texts, rooms, strict=True)]


def _lines(names: Sequence[str], rows: Sequence[Sequence[str]], above: Sequence[str]) -> list[str]:
    """Names and cells, which may have several lines, as columns; numbers to the right, names at the bottom."""
    columns = [[name, *column] for name, *column in zip(names, *rows, strict=True)]
    right = [all(map(_is_figure, cells)) for _, *cells in columns]
    widths = [max(len(line) for text in column for line in text.split("\n")) for column in columns]

    def block(row: Sequence[str], bottom: bool) -> list[str]:
        cells = [text.split("\n") for text in row]
        height = max(map(len, cells))
        padded = [[""] * (height - len(c)) + c if bottom else c + [""] * (height - len(c)) for c in cells]
        sides = ((t.rjust(w) if r else t.ljust(w) for t, w, r in zip(line, widths, right, strict=True))
                 for line in zip(*padded, strict=True))  # fmt: skip
        return ["  ".join(side).rstrip() for side in sides]

    body = [
        line for words, row in zip(above, rows, strict=True) for line in ([words] if words else []) + block(row, False)
    ]
    return [*block(names, True), "-" * sum(widths, 2 * len(widths) - 2), *body]
