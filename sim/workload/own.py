"""Files of requests: CSV or JSONL of arrivals, prompt and output tokens, vLLM's custom prompts, published traces.

A file may also hold responses of OpenAI's API, one per line, or be a result of `vllm bench serve --save-detailed`, of
which the texts are not read.

Columns are found by common names (`columns`), and the choice is reported. The requests of a session are a conversation
if the file also numbers its turns, with prompts that include the earlier ones; otherwise sessions are only counted.

Not modelled: which blocks of a Mooncake prompt hold earlier answers.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, chain
from os import stat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.limits import MAX_TOKENS
from pdvsim.sim.reading import error_text, quoted, read_json, shortened
from pdvsim.sim.workload import datasets
from pdvsim.sim.workload.columns import ColumnRole, columns_of, plain_name
from pdvsim.sim.workload.conversations import HASHED_TOKENS
from pdvsim.sim.workload.datasets import Trace, bad, json_lines, lines_of, opened

if TYPE_CHECKING:
    import pandas as pd

Value = Any  # a cell: text in CSV, text or a number in JSON

MARK = '"request_throughput"'  # a key of every result, but of no file of requests
LATEST = 1e19  # of a time in any unit
DETAILED = "a result of `vllm bench serve --save-result --save-detailed`"
CUSTOM_OUTPUT = 256  # output tokens if the file has none: vLLM's --custom-output-len


class PublishedTrace(NamedTuple):
    """A published trace: the columns that identify it, and how it is read."""

    columns: set[str]  # hash_ids, which may be missing, name the blocks of prompts
    only: tuple[str, str] | None = None  # rows with this value in this column
    unit: str | None = None  # of its times; None: as those of any file


PUBLISHED = {
    "azure": PublishedTrace({"timestamp", "contexttokens", "generatedtokens"}),
    "burstgpt": PublishedTrace({"timestamp", "model", "request_tokens", "response_tokens"}, ("Model", "GPT-4")),
    "mooncake": PublishedTrace({"timestamp", "input_length", "output_length", "hash_ids"}, unit="milliseconds"),
}
UNITS = {"seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}  # in a second
A_CLOCK_S = 1e8  # larger times are dates, not times since a start
SUFFIXES = {"s": "seconds", "sec": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
ACCEPTED = (
    "a CSV or JSONL file with columns like prompt_tokens and output_tokens, and arrival_s to replay it; "
    'JSONL of {"prompt": text} or of responses with their usage; or a result of vllm bench serve --save-detailed'
)


def kind_of(path: str, named: tuple[str, ...] = ()) -> str:
    """The data set that a file's head looks like: ShareGPT is an array, a published trace has its columns, else custom.

    A file whose columns are `named` is no published trace.
    """
    head = _head(path)
    if head.startswith("["):
        return "sharegpt"
    line = next(iter(head.splitlines()), "")
    keys = re.findall(r'"(\w+)"\s*:', line)
    if not head.startswith("{"):
        keys = next(csv.reader([line], delimiter=_delimiter(line)), [])
    names = set() if named else set(map(plain_name, keys))
    return next((kind for kind, published in PUBLISHED.items() if published.columns <= names), "custom")


def _head(path: str) -> str:
    with opened(path) as file:
        return file.read(1 << 16).lstrip()


def read_own(path: str, tokenizer: str | None = None, kind: str = "custom", named: tuple[str, ...] = ()) -> Trace:
    """The requests of a file, of a kind that is inferred or given; remembered while the file is unchanged.

    A ValueError of one line names a bad line and field. Of a published trace only times, lengths and hashes are read.
    A file whose columns are `named` is none. Rows without prompt or output, as those of failed requests, are counted
    and excluded.
    """
    version = 0, 0
    with suppress(OSError, ValueError):  # the reader reports the error
        version = stat(path).st_mtime_ns, stat(path).st_size
    return _read(path, tokenizer, kind, named, version)


@lru_cache(maxsize=4)
def _read(path: str, tokenizer: str | None, kind: str, named: tuple[str, ...], version: tuple[int, int]) -> Trace:
    inferred = kind == "custom"
    kind = kind_of(path, named) if inferred else kind
    published = PUBLISHED.get(kind)
    log = _log(path, kind, named)
    counted = "prompt_tokens" in log.columns
    if counted and tokenizer is not None:
        name = log.columns["prompt_tokens"]
        raise ValueError(f"--tokenizer has no effect here: {path} already has token counts ({name})")
    every = len(log.cells)
    prompt, output = (
        log.values(role, datasets.TOKENS_ACCEPTED, _is_tokens) if role in log.columns else np.full(every, otherwise)
        for role, otherwise in (("prompt_tokens", 1), ("output_tokens", CUSTOM_OUTPUT))
    )
    full = (prompt > 0) & (output > 0)
    if not full.any():
        raise bad(path, "", "holds no request with a prompt and an output", ACCEPTED)
    log, lengths = log._replace(cells=log.cells[full]), np.column_stack((prompt, output))[full].astype(np.int64)
    if not counted:
        log.values("prompt", "a text", np.array, lambda cell: isinstance(cell, str))
        lengths[:, 0] = np.maximum(1, datasets.token_counter(tokenizer)(list(log.cells["prompt"])))
    times_s, unit = log.times_s(published) if "arrival_s" in log.columns else (np.zeros(len(lengths)), "")
    arrival_s, rates, turns = _spread(times_s), None, None
    if "acceptance" in log.columns:
        rates = log.values("acceptance", "a share from 0 to 1", lambda rate: (rate >= 0) & (rate <= 1))
    if {"session", "turn"} <= log.columns.keys():
        turns = log.values("turn", "a whole number from 0", _is_tokens).astype(np.int64)
    taken = [f"{role} is {quoted(name)}" for role, name in log.columns.items() if name != role]
    taken = [f"{text} ({unit})" if text.startswith("arrival_s") else text for text in taken]
    notes = {
        ", ".join(taken): bool(taken),
        datasets.ESTIMATED: not counted and tokenizer is None,
        "times are whole seconds; requests of the same second are spread evenly over it": arrival_s is not times_s,
        f"{every - len(lengths)} of {every} rows have no prompt or no output and are excluded": len(lengths) < every,
    }
    recognised = (f"{path} has the columns of the {kind} trace, and is read as one",) if inferred else ()
    return Trace(
        arrival_s,
        lengths,
        acceptance=None if rates is None else rates.astype(np.float32),
        sessions=log.cells["session"].astype(str).factorize()[0] if "session" in log.columns else None,
        turns=turns,
        timed="arrival_s" in log.columns,
        hashes=log.hashes(lengths[:, 0]) if published and "hash_ids" in published.columns else None,
        notes=recognised if published else tuple(f"{path}: {note}" for note, true in notes.items() if true),
    )


def _log(path: str, kind: str, named: tuple[str, ...]) -> LogTable:
    """The rows of a file; a ValueError if it lacks a column that is needed."""
    import pandas as pd

    published, rows = PUBLISHED.get(kind), _rows(path, kind)
    first = next(rows, None)
    if first is None:
        raise bad(path, "", "holds no request", ACCEPTED)
    names = list(first[1])
    header = f"(columns: {shortened(', '.join(names))})"
    try:
        columns = columns_of(names, named)
    except KeyError as missing:
        raise bad(path, "", f"--columns names {missing.args[0]}, which is not there {header}") from None
    if published is not None:
        if lacking := published.columns.difference({"hash_ids"}, map(plain_name, names)):
            raise bad(path, "", f"has no column {min(lacking)}", f"the columns {', '.join(sorted(published.columns))}")
        columns = {role: columns[role] for role in ("arrival_s", "prompt_tokens", "output_tokens")}
    if "prompt_tokens" not in columns and "prompt" not in columns:
        raise bad(path, "", f"no prompt-length column found {header}. Name it with --columns prompt=NAME")
    if "prompt_tokens" in columns:
        columns.pop("prompt", None)
        if "output_tokens" not in columns:
            raise bad(path, "", f"no output-length column found {header}. Name it with --columns output=NAME")
    wanted = [*columns.values(), "hash_ids"]
    only, value = (published and published.only) or ("", None)
    chosen = ((line, row) for line, row in chain([first], rows) if not only or row.get(only) == value)
    cells = pd.DataFrame(
        ((line, *map(row.get, wanted)) for line, row in chosen), columns=["line", *columns, "hash_ids"], dtype=object
    )
    return LogTable(path, columns, cells.set_index("line"))


class LogTable(NamedTuple):
    """The cells of a file, by line and role."""

    path: str
    columns: dict[ColumnRole, str]
    cells: pd.DataFrame

    def values(
        self,
        role: str,
        accepted: str,
        good: Callable[[NDArray[Any]], NDArray[np.bool_]],
        read: Callable[[Value], Any] | None = None,
    ) -> NDArray[Any]:
        """A column, each cell as it is read: a number by default; a ValueError names the first one that is not good."""
        values = self.cells[role].map(read or number_of).to_numpy()
        if not (right := good(values)).all():
            line, cell = self.cells.index[at := int(right.argmin())], self.cells[role].iloc[at]
            name = self.columns.get(role, role)  # type: ignore[call-overload]
            raise bad(self.path, f"line {line}", f"{name} is {quoted(cell)}", accepted)
        return values

    def times_s(self, published: PublishedTrace | None) -> tuple[NDArray[np.float64], str]:
        """Arrival times in seconds, and the unit they were in."""
        name, first = self.columns["arrival_s"], self.cells["arrival_s"].iloc[0]
        dated = isinstance(first, str) and math.isnan(number_of(first))
        accepted = "a date such as 2023-11-16 18:17:03.97" if dated else "a number of seconds, or a date"
        read = datasets.moment_s if dated else number_of
        values = self.values("arrival_s", accepted, lambda times: np.abs(times) <= LATEST, read)
        if dated:
            return values, "dates"
        unit = SUFFIXES.get(plain_name(name).rpartition("_")[2]) or _unit(float(np.median(values)))
        unit = (published and published.unit) or unit
        return values / UNITS[unit], unit

    def hashes(self, prompts: NDArray[np.int64]) -> NDArray[np.object_] | None:
        """Numbers of all hashes so far: equal ones have equal prefixes, whatever the file holds. None: not given."""
        if self.cells["hash_ids"].isna().any():
            return None
        self.values("hash_ids", "a list of whole numbers below 2^32", np.array, _is_hashes)
        known: dict[tuple[int, int], int] = {}
        numbered = (
            accumulate(ids[: -(-prompt // HASHED_TOKENS)], lambda last, own: known.setdefault((last, own), len(known)),
                       initial=-1)
            for ids, prompt in zip(self.cells["hash_ids"], prompts.tolist(), strict=True)
        )  # fmt: skip
        return np.fromiter((tuple(own)[1:] for own in numbered), object, len(prompts))


def _is_tokens(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    whole: NDArray[np.bool_] = (values >= 0) & (values <= MAX_TOKENS) & (values % 1 == 0)
    return whole


def _is_hashes(ids: Value) -> bool:
    return type(ids) is list and len(ids) > 0 and all(type(one) is int and 0 <= one < 1 << 32 for one in ids)


def _spread(times_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Times in whole seconds, as OpenAI's `created`, spread evenly within each second; other times as they are.

    Otherwise they would be bursts that did not happen.
    """
    import pandas as pd

    second = pd.Series(times_s).groupby(times_s)
    counts = second.transform("size")
    if times_s.min() < A_CLOCK_S or (times_s % 1).any() or counts.max() == 1:
        return times_s
    spread: NDArray[np.float64] = times_s + (second.cumcount() / counts).to_numpy()
    return spread


def _rows(path: str, kind: str) -> Iterator[tuple[int, dict[str, Value]]]:
    """Line number and cells of each row."""
    head = _head(path)
    if kind != "mooncake" and MARK in head and head.startswith("{"):
        yield from bench_rows(path)
    elif kind == "mooncake" or head.startswith("{"):
        for line, row in json_lines(path, ACCEPTED):
            if not isinstance(row, dict):
                raise bad(path, f"line {line}", f"holds {quoted(row)}", ACCEPTED)
            if "usage" in row:  # a response without usage failed
                row = {"prompt_tokens": 0, "completion_tokens": 0, **row}
            for name in ("response", "body", "usage"):  # an answer, also inside a log or batch output
                if isinstance(inner := row.get(name), dict):
                    row = {**row, **inner} if name == "usage" else {**inner, **row}
            yield line, row
    else:
        yield from _csv_rows(path)


def _csv_rows(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    with opened(path) as file:
        lines = lines_of(file)
        first = next(lines, "")
        reader = csv.reader(chain([first], lines), delimiter=_delimiter(first), strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            for row in reader:
                if row and (width := len(row)) != len(header):
                    what = f"{width} fields, the header has {len(header)}"
                    raise bad(path, f"line {reader.line_num}", what, ACCEPTED)
                if row:
                    yield reader.line_num, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise bad(path, f"line {reader.line_num}", f"is not CSV ({error})", ACCEPTED) from None


def _delimiter(line: str) -> str:
    return max(",;\t", key=line.count)


def number_of(value: Value) -> float:
    """A finite number, also from text; nan otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _unit(typical: float) -> str:
    """The unit of times without one in their name: seconds, unless they would lie thousands of years ahead."""
    return next((unit for unit, most in (("seconds", 1e11), ("milliseconds", 1e14), ("microseconds", 1e17))
                 if typical < most), "nanoseconds")  # fmt: skip


def bench_document(path: str) -> dict[str, Any]:
    """A result of `vllm bench serve`, or of `realrun`; a ValueError of one line if it is not one."""
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise bad(path, "", error_text(error), DETAILED) from None
    if not isinstance(document, dict):
        raise bad(path, "", f"holds {quoted(document)}", DETAILED)
    return document


def bench_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and columns of each request of a detailed result.

    Arrival times are due times: vLLM's start_times minus queue_times, by which --max-concurrency may delay a request.
    Results of earlier versions lack both.
    """
    document = bench_document(path)
    columns = {"prompt_tokens": document.get("input_lens"), "output_tokens": document.get("output_lens")}
    if document.get("start_times"):
        columns["arrival_s"] = document["start_times"]
    for name, values in columns.items():
        if not isinstance(values, list) or len(values) != len(document["input_lens"]):
            raise bad(path, "", f"has no list of {name} for each request", DETAILED)
    queued = document.get("queue_times")
    for number, row in enumerate(zip(*columns.values(), strict=True)):
        request = dict(zip(columns, row, strict=True))
        due_s = number_of(request.get("arrival_s"))
        if isinstance(queued, list) and number < len(queued) and not math.isnan(due_s):
            request["arrival_s"] = due_s - number_of(queued[number])
        yield number, request
