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
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, chain
from os import stat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.limits import MAX_TOKENS
from pdvsim.sim.reading import error_text, quoted, read_json, shortened
from pdvsim.sim.workload import datasets
from pdvsim.sim.workload.columns import ColumnRole, columns_of, plain_name
from pdvsim.sim.workload.conversations import HASHED_TOKENS
from pdvsim.sim.workload.datasets import ESTIMATED, TOKENS_ACCEPTED, Trace, bad, json_lines, opened, token_counter

Value = Any  # a cell: text in CSV, text or a number in JSON

MARK = '"request_throughput"'  # a key of every result, but of no file of requests
LATEST_S = 1e18
DETAILED = "a result of `vllm bench serve --save-result --save-detailed`"
CUSTOM_OUTPUT = 256  # output tokens if the file has none: vLLM's --custom-output-len

PUBLISHED = {  # columns that identify a published trace
    "azure": {"timestamp", "contexttokens", "generatedtokens"},
    "burstgpt": {"timestamp", "model", "request_tokens", "response_tokens"},  # of GPT-4's requests alone, as in vLLM
    "mooncake": {"timestamp", "input_length", "output_length", "hash_ids"},  # in milliseconds
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
    keys = set(re.findall(r'"(\w+)"\s*:', head)) if head.lstrip().startswith("{") else _header(head)
    return next((kind for kind, needed in PUBLISHED.items() if needed <= {plain_name(key) for key in keys}), "custom")


def is_array(path: str) -> bool:
    """Return whether a file is one JSON array, as ShareGPT is."""
    with opened(path) as file:
        return file.readline(1 << 16).lstrip().startswith("[")


def read_own(path: str, tokenizer: str | None = None, kind: str | None = None, named: tuple[str, ...] = ()) -> Trace:
    """The requests of a file, of a kind that is inferred or given; a ValueError of one line names a bad line and field.

    Of a published trace only times, lengths and hashes are read. A file whose columns are `named` is none.
    """
    inferred = kind is None
    kind = kind or ("custom" if named else kind_of(path))
    rows = _rows(path, kind)
    first = next(rows, None)
    if first is None:
        raise bad(path, "", "holds no request", ACCEPTED)
    header = f"(columns: {shortened(', '.join(first[1]))})"
    try:
        columns = columns_of(list(first[1]), named)
    except KeyError as missing:
        raise bad(path, "", f"--columns names {missing.args[0]}, which is not there {header}") from None
    if kind in PUBLISHED:
        if lacking := PUBLISHED[kind].difference({"hash_ids"}, map(plain_name, first[1])):
            raise bad(path, "", f"has no column {min(lacking)}", f"the columns {', '.join(sorted(PUBLISHED[kind]))}")
        columns = {role: columns[role] for role in ("arrival_s", "prompt_tokens", "output_tokens")}
    if "prompt_tokens" not in columns and "prompt" not in columns:
        raise bad(path, "", f"no prompt-length column found {header}. Name it with --columns prompt=NAME")
    if "prompt_tokens" in columns and "output_tokens" not in columns:
        raise bad(path, "", f"no output-length column found {header}. Name it with --columns output=NAME")
    counted = "prompt_tokens" in columns
    if counted:
        columns.pop("prompt", None)
    if counted and tokenizer is not None:
        raise ValueError(
            f"--tokenizer has no effect here: {path} already has token counts ({columns['prompt_tokens']})"
        )
    table = _Table(path, columns, kind)
    for line, row in chain([first], rows):
        table.add(line, row)
    trace = table.trace(tokenizer)
    if kind not in PUBLISHED:
        return trace
    notes = (f"{path} has the columns of the {kind} trace, and is read as one",) if inferred else ()
    return trace._replace(hashes=table.hashes(), notes=notes)


class _Table:
    """Collects the rows of a file."""

    def __init__(self, path: str, columns: dict[ColumnRole, str], kind: str) -> None:
        self.path, self.columns, self.kind = path, columns, kind
        self.times: list[Value] = []
        self.lengths: list[tuple[int, int]] = []
        self.acceptance: list[float] = []
        self.sessions: list[str] = []
        self.turns: list[int] = []
        self.prompts: list[str] = []
        self.lines: list[int] = []
        self.hash_ids: list[list[int]] = []
        self.empty = 0
        self.spread = False

    def add(self, line: int, row: dict[str, Value]) -> None:
        """Add a row; one without prompt or output is counted and excluded, as a failed request."""
        columns = self.columns
        if self.kind == "burstgpt" and row.get("Model") != "GPT-4":
            return
        prompt = self._tokens(line, row, "prompt_tokens") if "prompt_tokens" in columns else 1
        output = self._tokens(line, row, "output_tokens") if "output_tokens" in columns else CUSTOM_OUTPUT
        if not prompt or not output:
            self.empty += 1
            return
        if "prompt_tokens" not in columns:
            text = row.get(columns["prompt"])
            if not isinstance(text, str):
                raise bad(self.path, f"line {line}", f"{columns['prompt']} is {quoted(text)}", "a text")
            self.prompts.append(text)
        if "acceptance" in columns:
            rate = _number(row.get(columns["acceptance"]))
            if not 0 <= rate <= 1:
                value = quoted(row.get(columns["acceptance"]))
                raise bad(self.path, f"line {line}", f"{columns['acceptance']} is {value}", "a share from 0 to 1")
            self.acceptance.append(rate)
        if "session" in columns:
            self.sessions.append(str(row.get(columns["session"])))
        if "turn" in columns and "session" in columns:
            self.turns.append(self._tokens(line, row, "turn", "a whole number from 0"))
        if "arrival_s" in columns:
            self.times.append(row.get(columns["arrival_s"]))
        if self.kind == "mooncake" and "hash_ids" in row:
            ids = row["hash_ids"]
            if type(ids) is not list or not ids or any(type(one) is not int or not 0 <= one < 1 << 32 for one in ids):
                raise bad(self.path, f"line {line}", f"hash_ids is {quoted(ids)}", "a list of whole numbers below 2^32")
            self.hash_ids.append(ids[: -(-prompt // HASHED_TOKENS)])
        self.lengths.append((prompt, output))
        self.lines.append(line)

    def hashes(self) -> tuple[tuple[int, ...], ...] | None:
        """Numbers of all hashes so far: equal ones have equal prefixes, whatever the file holds. None: not given."""
        known: dict[tuple[int, int], int] = {}
        numbered = (
            accumulate(ids, lambda last, own: known.setdefault((last, own), len(known)), initial=-1)
            for ids in self.hash_ids
        )
        return tuple(tuple(own)[1:] for own in numbered) if len(self.hash_ids) == len(self.lengths) else None

    def _tokens(self, line: int, row: dict[str, Value], role: ColumnRole, accepted: str = TOKENS_ACCEPTED) -> int:
        value = row.get(self.columns[role])
        number = 0 if value is None and "usage" in row else _number(value)  # a response without usage failed
        if not (0 <= number <= MAX_TOKENS and number == int(number)):
            raise bad(self.path, f"line {line}", f"{self.columns[role]} is {quoted(value)}", accepted)
        return int(number)

    def trace(self, tokenizer: str | None) -> Trace:
        """The collected trace."""
        if not self.lengths:
            raise bad(self.path, "", "holds no request with a prompt and an output", ACCEPTED)
        lengths = np.array(self.lengths, dtype=np.int64)
        if self.prompts:
            lengths[:, 0] = np.maximum(1, token_counter(tokenizer)(self.prompts))
        unit, arrival_s = self._arrivals() if self.times else ("", np.zeros(len(lengths)))
        return Trace(
            arrival_s,
            lengths,
            acceptance=np.array(self.acceptance, dtype=np.float32) if self.acceptance else None,
            sessions=tuple(self.sessions) or None,
            turns=np.array(self.turns, dtype=np.int64) if self.turns else None,
            timed=bool(self.times),
            notes=self._notes(unit, tokenizer),
        )

    def _arrivals(self) -> tuple[str, NDArray[np.float64]]:
        """Arrival times in seconds, and the unit they were in."""
        name = self.columns["arrival_s"]
        dated = isinstance(self.times[0], str) and math.isnan(_number(self.times[0]))
        read = datasets.moment_s if dated else _number
        accepted = "a date such as 2023-11-16 18:17:03.97" if dated else "a number of seconds, or a date"
        values = np.empty(len(self.times))
        for at, time in enumerate(self.times):
            values[at] = read(time)
            if not abs(values[at]) <= 1e19:
                raise bad(self.path, f"line {self.lines[at]}", f"{name} is {quoted(time)}", accepted)
        if dated:
            return "dates", self._spread(values)
        unit = SUFFIXES.get(plain_name(name).rpartition("_")[2]) or _unit(float(np.median(values)))
        if self.kind == "mooncake":
            unit = "milliseconds"
        return unit, self._spread(values / UNITS[unit])

    def _spread(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Times in whole seconds, as OpenAI's `created`, spread evenly within each second.

        Otherwise they would be bursts that did not happen.
        """
        seconds, at, counts = np.unique(times_s, return_inverse=True, return_counts=True)
        if seconds[0] < A_CLOCK_S or (seconds % 1).any() or counts.max() == 1:
            return times_s
        self.spread = True
        order = np.argsort(at, kind="stable")
        place = np.empty(len(at))
        place[order] = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
        spread: NDArray[np.float64] = times_s + place / counts[at]
        return spread

    def _notes(self, unit: str, tokenizer: str | None) -> tuple[str, ...]:
        taken = [f"{role} is {quoted(name)}" for role, name in self.columns.items() if name != role]
        taken = [f"{text} ({unit})" if text.startswith("arrival_s") else text for text in taken]
        notes = [f"{self.path}: {', '.join(taken)}"] if taken else []
        if self.prompts and tokenizer is None:
            notes.append(f"{self.path}: {ESTIMATED}")
        if self.spread:
            notes.append(f"{self.path}: times are whole seconds; requests of the same second are spread evenly over it")
        if self.empty:
            rows = self.empty + len(self.lengths)
            notes.append(f"{self.path}: {self.empty} of {rows} rows have no prompt or no output and are excluded")
        return tuple(notes)


def _rows(path: str, kind: str) -> Iterator[tuple[int, dict[str, Value]]]:
    """Line number and cells of each row."""
    if kind == "mooncake":
        return _json_rows(path)
    with opened(path) as file:
        head = file.read(1 << 16).lstrip()
    if not head.startswith("{"):
        return _csv_rows(path)
    return bench_rows(path) if MARK in head else _json_rows(path)


def _json_rows(path: str) -> Iterator[tuple[int, dict[str, Value]]]:
    for line, row in json_lines(path, ACCEPTED):
        if not isinstance(row, dict):
            raise bad(path, f"line {line}", f"holds {quoted(row)}", ACCEPTED)
        yield line, _unpacked(row)


def _unpacked(row: dict[str, Value]) -> dict[str, Value]:
    """A row with the columns of its nested objects: the `usage` of a response, also inside a log or batch output."""
    for name in ("response", "body", "usage"):
        if isinstance(inner := row.get(name), dict):
            row = {**inner, **row}
    return row


def _csv_rows(path: str) -> Iterator[tuple[int, dict[str, Value]]]:
    rows = datasets.csv_rows(path, ACCEPTED, _delimiter)
    _, header = next(rows)
    for line, row in rows:
        yield line, dict(zip(header, row, strict=True))


def _header(line: str) -> list[str]:
    return next(csv.reader([line.strip()], delimiter=_delimiter(line)), [])


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
    for number, row in enumerate(zip(*columns.values(), strict=True)):
        request = dict(zip(columns, row, strict=True))
        if "arrival_s" in request and isinstance(queued, list) and number < len(queued):
            request["arrival_s"] = _difference(path, number, request["arrival_s"], queued[number])
        yield number, request


def _difference(path: str, number: int, start_s: Any, queued_s: Any) -> float:
    for name, value in (("start_times", start_s), ("queue_times", queued_s)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LATEST_S:
            raise bad(path, f"request {number}", f"{name} holds {quoted(value)}", "seconds")
    return float(start_s - queued_s)
