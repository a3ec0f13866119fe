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


@dataclass(frozen=True)
class TextTable:
    """Rows with the same keys. Printed, it fits the terminal; on a page it is complete."""

    rows: Sequence[Mapping[str, str]]
    spare: Sequence[str] = ()  # columns, and DETAIL, omitted on a narrow terminal, in this order
    notes: Sequence[str] = ()  # under it
    headings: Sequence[str] = ()  # one per row, shown above the first row that has it
    folded: int = 0  # rows at the end that a page shows on demand

    def __str__(self) -> str:
        lines = fitted_table(self.rows, self.spare, self.headings)
        without = lines[-1].startswith(LEFT_OUT) and DETAIL in lines[-1]
        return "\n".join([*lines, *(note for note in self.notes if not (without and note.startswith(BRACKETS)))])

    def html(self) -> str:
        """The table as HTML with its notes, numbers to the right; texts are escaped."""
        numbers = [name for name in self.rows[0] if all(_is_figure(row[name]) for row in self.rows)]
        left, right = ' style="text-align:left"', dict.fromkeys(numbers, ' style="text-align:right"')

        def line(kind: str, cells: Mapping[str, str]) -> str:
            texts = (f"{right.get(name, left)}>{html.escape(text)}" for name, text in cells.items())
            return f"<tr>{''.join(f'<{kind}{text}</{kind}>' for text in texts)}</tr>"

        head = line("th", {name: name for name in self.rows[0]})
        above = [
            f'<tr><th colspan="{len(self.rows[0])}"{left}>{html.escape(heading)}</th></tr>' if heading else ""
            for heading in _first_of_runs(self.headings or [""] * len(self.rows))
        ]
        lines = [over + line("td", row) for over, row in zip(above, self.rows, strict=True)]
        shown = len(lines) - self.folded

        def table(body: Sequence[str]) -> str:
            return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(body)}</tbody></table></div>'

        rest = f"<details><summary>{self.folded} more</summary>{table(lines[shown:])}</details>" if self.folded else ""
        notes = f'<p class="note">{"<br>".join(map(html.escape, self.notes))}</p>' if self.notes else ""
        return f"{table(lines[:shown])}{rest}{notes}"


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


def mean_of(value: Any, otherwise: float = math.nan) -> float:
    """A number, or the mean of an Interval; `otherwise` for nothing."""
    value = value.mean if isinstance(value, Interval) else value
    return otherwise if missing(value) else float(value)


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


def banded(values: Mapping[str, Any], key: str, decimals: int = 2) -> str:
    """A cell with its error: relative, or a range if forward times are predicted."""
    text, ends = cell(values.get(key), decimals), [values.get(f"{key}_{end}") for end in ("low", "high")]
    if not math.isnan(error := mean_of(values.get(f"{key}_error"))):
        return f"{text} (±{100 * error:.1f}%)"
    if any(missing(end) for end in ends):
        return text
    low, high = (cell(mean_of(end), decimals) for end in ends)
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


def fitted_table(rows: Sequence[Mapping[str, str]], spare: Iterable[str], headings: Sequence[str] = ()) -> list[str]:
    """Rows with the same keys as a grid that fits the terminal, and a line on omitted columns.

    Headings and long texts are folded first; then columns of `spare` are omitted, in order. `headings`, one per row,
    are printed above the first row that has them.
    """
    width, out = terminal_width(), list[str]()
    shown, top, body = rows, *_laid_out(rows, width)
    for name in spare:
        if len(top[-1]) <= width:
            break
        before = shown
        if name == DETAIL:
            shown = [{key: _plainer(value) for key, value in row.items()} for row in shown]
        else:
            shown = [{key: value for key, value in row.items() if key != name} for row in shown]
        out += [name] if shown != before else []
        top, body = _laid_out(shown, width)
    if len(top[-1]) > width:
        top, body = _laid_out(shown, width, 1, 1)
    for lines, heading in zip(body, _first_of_runs(headings), strict=False):
        if heading:
            lines.insert(0, heading)
    left_out = [f"{LEFT_OUT} {width} columns: {', '.join(out)}"] if out else []
    return [*top, *(line for lines in body for line in lines), *left_out]


def _first_of_runs(headings: Sequence[str]) -> list[str]:
    """The headings, each only where it differs from the one before."""
    return ["" if at and heading == headings[at - 1] else heading for at, heading in enumerate(headings)]


def terminal_width() -> int:
    """Columns of the terminal."""
    return get_terminal_size((UNKNOWN_WIDTH, 24)).columns


def _plainer(text: str) -> str:
    """A value without its interval, error range and minor decimals; a difference without the decimals."""
    if not _is_figure(text):
        return text
    if text[:1].isdigit():
        text = re.sub(r" ±[\d.]+| \([±\d][^)]*\)", "", text)
    most = r"\d{3,}\.\d+" if text[:1].isdigit() else r"\d{2,}\.\d+"
    return re.sub(most, lambda number: f"{float(number[0]):.0f}", text)


def folded(text: str, width: int) -> list[str]:
    """A text in lines of that width; words are never broken."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _heading_room(name: str, cells: int) -> int:
    """Width of a heading: that of its cells if it fits, else the least for two lines."""
    if len(name) <= cells:
        return cells
    word = max(map(len, re.split(" (?!%)", name)))  # "gain %" is one
    return next(width for width in range(word, len(name) + 1) if len(folded(name, width)) <= 2)


def rows_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same keys as one grid that fits the terminal, the keys as its header."""
    return "\n".join(fitted_table(rows, ()))


def missing(value: Any) -> bool:
    """Whether there is no value: None or nan."""
    value = value.mean if isinstance(value, Interval) else value
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_figure(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in "+-"


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as wide as its cells, numbers right-aligned."""
    top, body = _columns([[name, *column] for name, *column in zip(header, *rows, strict=True)])
    return "\n".join([*top, *(line for lines in body for line in lines)])


def _laid_out(
    rows: Sequence[Mapping[str, str]], width: int, long: int = LONG_TEXT, short: int = SHORT_TEXT
) -> tuple[list[str], list[list[str]]]:
    """The lines of the header and of each row, folded if they are wider than `width`.

    Columns wider than `long` are folded, the widest first, to at least `short`.
    """
    columns = [[name, *(row[name] for row in rows)] for name in rows[0]]
    top, body = _columns(columns)
    if len(top[-1]) <= width:
        return top, body
    widest = [max(map(len, cells)) for _, *cells in columns]
    rooms = [[_heading_room(name, room), room] for room, (name, *_) in zip(widest, columns, strict=True)]
    over = sum(max(room) for room in rooms) + 2 * len(rooms) - 2 - width
    for at in sorted(range(len(columns)), key=lambda at: -widest[at]):
        word = max(len(word) for text in columns[at] for word in text.split(" "))
        if over > 0 and widest[at] > max(long, word) and not all(map(_is_figure, columns[at][1:])):
            room = max(short, word, widest[at] - over)
            over -= max(rooms[at]) - room
            rooms[at] = [room, room]
    return _columns(columns, rooms)


def _columns(
    columns: Sequence[Sequence[str]], rooms: Sequence[Sequence[int]] = ()
) -> tuple[list[str], list[list[str]]]:
    """Columns, each a name and its cells, as the lines of the header and of each row.

    `rooms` are the maximum widths of name and cells; words are never broken.
    """
    right = [all(map(_is_figure, cells)) for _, *cells in columns]
    cut = [
        [folded(text, max(1, rooms[at][n > 0])) if rooms else [text] for n, text in enumerate(column)]
        for at, column in enumerate(columns)
    ]
    widths = [max(len(line) for cell in column for line in cell) for column in cut]
    blocks = []
    for n, row in enumerate(zip(*cut, strict=True)):
        height = max(map(len, row))
        padded = [[""] * (height - len(cell)) + cell if n == 0 else cell + [""] * (height - len(cell)) for cell in row]
        lines = zip(*padded, strict=True)
        aligned = ([t.rjust(w) if r else t.ljust(w) for t, w, r in zip(x, widths, right, strict=True)] for x in lines)
        blocks.append(["  ".join(line).rstrip() for line in aligned])
    return [*blocks[0], "-" * sum(widths, 2 * len(widths) - 2)], blocks[1:]
