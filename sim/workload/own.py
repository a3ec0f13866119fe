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
from pdvsim.sim.workload.datasets import ESTIMATED, TOKENS_ACCEPTED, Trace, bad, json_lines, opened, token_counter

if TYPE_CHECKING:
    import pandas as pd

Value = Any  # a cell: text in CSV, text or a number in JSON

MARK = '"request_throughput"'  # a key of every result, but of no file of requests
LATEST = 1e19  # of a time in any unit
DETAILED = "a result of `vllm bench serve --save-result --save-detailed`"
CUSTOM_OUTPUT = 256  # output tokens if the file has none: vLLM's --custom-output-len


class PublishedTrace(NamedTuple):
    """A published trace: the columns that identify it, and how it is read."""

    columns: set[str]
    only: tuple[str, str] | None = None  # rows with this value in this column
    unit: str | None = None  # of its times; None: as those of any file
    hashed: bool = False  # its hash_ids, which may be missing, name the blocks of prompts


PUBLISHED = {
    "azure": PublishedTrace({"timestamp", "contexttokens", "generatedtokens"}),
    "burstgpt": PublishedTrace({"timestamp", "model", "request_tokens", "response_tokens"}, ("Model", "GPT-4")),
    "mooncake": PublishedTrace(
        {"timestamp", "input_length", "output_length", "hash_ids"}, unit="milliseconds", hashed=True
    ),
}
UNITS = {"seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}  # in a second
A_CLOCK_S = 1e8  # larger times are dates, not times since a start
SUFFIXES = {"s": "seconds", "sec": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
ACCEPTED = (
    "a CSV or JSONL file with columns like prompt_tokens and output_tokens, and arrival_s to replay it; "
    'JSONL of {"prompt": text} or of responses with their usage; or a result of vllm bench serve --save-detailed'
)


class TraceFile(NamedTuple):
    """A file of requests and how to read it; another one once the file has changed."""

    name: str
    path: str
    tokenizer: str | None
    columns: tuple[str, ...]
    version: tuple[int, int]


def trace_file(name: str, path: str, tokenizer: str | None = None, columns: tuple[str, ...] = ()) -> TraceFile:
    """The file as it is now."""
    try:
        status = stat(path)
        version = status.st_mtime_ns, status.st_size
    except (OSError, ValueError):
        version = 0, 0  # the reader reports the error
    return TraceFile(name, path, tokenizer, columns, version)


@lru_cache(maxsize=4)
def read_trace(file: TraceFile) -> Trace:
    """The requests of a file, cached while it is unchanged."""
    return read_own(file.path, file.tokenizer, None if file.name == "custom" else file.name, file.columns)


def read_requests(name: str, path: str, tokenizer: str | None = None, columns: tuple[str, ...] = ()) -> Trace:
    """The requests of a trace."""
    return read_trace(trace_file(name, path, tokenizer, columns))


def fitting(trace: Trace, longest: int | None, prompt: int | None, output: int | None) -> NDArray[np.bool_]:
    """A mask of the requests with at most `longest` tokens; `prompt` and `output` override their lengths.

    If both are given all requests have the same length, and none is excluded.
    """
    if longest is None or (prompt is not None and output is not None):
        return np.ones(len(trace.lengths), dtype=np.bool_)
    own = trace.lengths[:, [prompt is None, output is None]].sum(axis=1)
    fits: NDArray[np.bool_] = own + (prompt or 0) + (output or 0) <= longest
    return fits


def kind_of(path: str) -> str:
    """The published trace that a file's columns match, or custom."""
    with opened(path) as file:
        head = file.readline(1 << 16)
    if head.lstrip().startswith("{"):
        keys = re.findall(r'"(\w+)"\s*:', head)
    else:
        keys = next(csv.reader([head.strip()], delimiter=_delimiter(head)), [])
    names = set(map(plain_name, keys))
    return next((kind for kind, published in PUBLISHED.items() if published.columns <= names), "custom")


def is_array(path: str) -> bool:
    """Return whether a file is one JSON array, as ShareGPT is."""
    with opened(path) as file:
        return file.readline(1 << 16).lstrip().startswith("[")


def read_own(path: str, tokenizer: str | None = None, kind: str | None = None, named: tuple[str, ...] = ()) -> Trace:
    """The requests of a file, of a kind that is inferred or given; a ValueError of one line names a bad line and field.

    Of a published trace only times, lengths and hashes are read. A file whose columns are `named` is none. Rows without
    prompt or output, as those of failed requests, are counted and excluded.
    """
    inferred = kind is None
    kind = kind or ("custom" if named else kind_of(path))
    published = PUBLISHED.get(kind)
    log = _log(path, kind, named)
    counted = "prompt_tokens" in log.columns
    if counted and tokenizer is not None:
        name = log.columns["prompt_tokens"]
        raise ValueError(f"--tokenizer has no effect here: {path} already has token counts ({name})")
    every = len(log.cells)
    prompt = log.values("prompt_tokens", TOKENS_ACCEPTED, _is_tokens) if counted else np.ones(every)
    has_output = "output_tokens" in log.columns
    output = log.values("output_tokens", TOKENS_ACCEPTED, _is_tokens) if has_output else np.full(every, CUSTOM_OUTPUT)
    full = (prompt > 0) & (output > 0)
    if not full.any():
        raise bad(path, "", "holds no request with a prompt and an output", ACCEPTED)
    log, lengths = log._replace(cells=log.cells[full]), np.column_stack((prompt, output))[full].astype(np.int64)
    if not counted:
        log.values("prompt", "a text", np.array, lambda cell: isinstance(cell, str))
        lengths[:, 0] = np.maximum(1, token_counter(tokenizer)(list(log.cells["prompt"])))
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
        ESTIMATED: not counted and tokenizer is None,
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
        hashes=log.hashes(lengths[:, 0]) if published and published.hashed else None,
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
        values = self.cells[role].map(read or _number).to_numpy()
        if not (right := good(values)).all():
            line, cell = self.cells.index[at := int(right.argmin())], self.cells[role].iloc[at]
            name = self.columns.get(role, role)  # type: ignore[call-overload]
            raise bad(self.path, f"line {line}", f"{name} is {quoted(cell)}", accepted)
        return values

    def times_s(self, published: PublishedTrace | None) -> tuple[NDArray[np.float64], str]:
        """Arrival times in seconds, and the unit they were in."""
        name, first = self.columns["arrival_s"], self.cells["arrival_s"].iloc[0]
        dated = isinstance(first, str) and math.isnan(_number(first))
        accepted = "a date such as 2023-11-16 18:17:03.97" if dated else "a number of seconds, or a date"
        read = datasets.moment_s if dated else _number
        values = self.values("arrival_s", accepted, lambda times: np.abs(times) <= LATEST, read)
        if dated:
            return values, "dates"
        unit = SUFFIXES.get(plain_name(name).rpartition("_")[2]) or _unit(float(np.median(values)))
        unit = (published and published.unit) or unit
        return values / UNITS[unit], unit

    def hashes(self, prompts: NDArray[np.int64]) -> tuple[tuple[int, ...], ...] | None:
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
        return tuple(tuple(own)[1:] for own in numbered)


def _is_tokens(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    whole: NDArray[np.bool_] = (values >= 0) & (values <= MAX_TOKENS) & (values % 1 == 0)
    return whole


def _is_hashes(ids: Value) -> bool:
    return type(ids) is list and len(ids) > 0 and all(type(one) is int and 0 <= one < 1 << 32 for one in ids)


def _spread(times_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Times in whole seconds, as OpenAI's `created`, spread evenly within each second; other times as they are.

    Otherwise they would be bursts that did not happen.
    """
    seconds, at, counts = np.unique(times_s, return_inverse=True, return_counts=True)
    if seconds[0] < A_CLOCK_S or (seconds % 1).any() or counts.max() == 1:
        return times_s
    order = np.argsort(at, kind="stable")
    place = np.empty(len(at))
    place[order] = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
    spread: NDArray[np.float64] = times_s + place / counts[at]
    return spread


def _rows(path: str, kind: str) -> Iterator[tuple[int, dict[str, Value]]]:
    """Line number and cells of each row."""
    with opened(path) as file:
        head = file.read(1 << 16).lstrip()
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
        rows = datasets.csv_rows(path, ACCEPTED, _delimiter)
        _, header = next(rows)
        for line, cells in rows:
            yield line, dict(zip(header, cells, strict=True))


def _delimiter(line: str) -> str:
    return max(",;\t", key=line.count)


def _number(value: Value) -> float:
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
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; expected a result of `vllm bench serve`") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error_text(error)}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: not a result of `vllm bench serve`: expected a JSON object")
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
    queued = [_number(one) for one in queued] if isinstance(queued, list) else []
    for number, row in enumerate(zip(*columns.values(), strict=True)):
        request = dict(zip(columns, row, strict=True))
        if number < len(queued) and not math.isnan(_number(request.get("arrival_s"))):
            request["arrival_s"] = _number(request["arrival_s"]) - queued[number]
        yield number, request
