"""Results of `vllm bench serve`: the document, and with --save-detailed the requests that were sent.

Texts are not read. A failed request has no output tokens and is excluded, as in any other file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdvsim.sim.reading import quoted, read_json, said
from pdvsim.sim.workload.datasets import bad

MARK = '"request_throughput"'  # a key of every result, but of no file of requests
LATEST_S = 1e18
DETAILED = "a result of `vllm bench serve --save-result --save-detailed`"


def bench_document(path: str) -> dict[str, Any]:
    """A result of `vllm bench serve`, or of `realrun`; a ValueError of one line if it is not one."""
    try:
        document = read_json(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; expected a result of `vllm bench serve`") from None
    except ValueError as error:
        raise ValueError(f"{path}: {said(error)}") from None
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
