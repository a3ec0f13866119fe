"""Requests from traffic and acceptance: arrival times, lengths, and which drafts would be accepted.

Arrivals, lengths, acceptance and acceptance rates have separate random generators from the seed. Another request rate
does not change lengths and acceptance, and more requests do not change the first ones.

Not modelled here: users who wait for an answer before the next request (`max_concurrency` limits admission instead),
ramps of the rate, and correlation between arrivals and lengths, except by replaying a trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import Request
from pdvsim.sim.limits import MAX_OUTPUT_TOKENS
from pdvsim.sim.workload import datasets
from pdvsim.sim.workload.acceptance import Streams
from pdvsim.sim.workload.datasets import Lengths, Trace
from pdvsim.sim.workload.options import TRACES, Acceptance, Traffic

CHUNK = 4096  # requests sampled together


def make_requests(traffic: Traffic, acceptance: Acceptance) -> list[Request]:
    """The requests in order of arrival, numbered from 0; the same for the same traffic, acceptance and seed."""
    return Workload(traffic, acceptance).all()


class Workload:
    """The same requests as an iterator, sampled in chunks: served ones can be dropped.

    Only a file of lengths and a replayed trace are held in memory.
    """

    def __init__(self, traffic: Traffic, acceptance: Acceptance, chunk: int = CHUNK) -> None:
        self.traffic, self.chunk = traffic, chunk
        seeds = np.random.SeedSequence(traffic.seed).spawn(5)
        self._arrivals, self._lengths, coins, rates, self._spreads = (np.random.default_rng(s) for s in seeds)
        self._streams = Streams(acceptance, coins, rates)
        trace = _trace(traffic)
        given = acceptance != Acceptance()  # an option overrides the column
        self._rates = None if trace is None or given else trace.acceptance
        replays = traffic.use_trace_timestamps
        self._replayed = _replayed(traffic, trace, self._lengths) if trace is not None and replays else None
        self._table, self._order = (None, None) if self._replayed is not None else _table(traffic, trace, self._lengths)

    def __len__(self) -> int:
        return self.traffic.num_prompts if self._replayed is None else len(self._replayed[0])

    def __iter__(self) -> Iterator[Request]:
        streams, id = deepcopy(self._streams), 0
        for arrival_s, (tokens, own) in zip(self.arrivals(), self._drawn(), strict=True):
            _check_tokens(int(tokens[:, 1].sum()))
            runs = streams.draw(tokens[:, 1], own)
            rows = zip(arrival_s.tolist(), tokens[:, 0].tolist(), tokens[:, 1].tolist(), runs, strict=True)
            for row in rows:
                yield Request(id, *row)
                id += 1

    def all(self) -> list[Request]:
        """All requests."""
        self.check_total()
        return list(self)

    def check_total(self) -> None:
        """Reject more output tokens than fit in memory."""
        _check_tokens(sum(int(tokens[:, 1].sum()) for tokens in self.lengths()))

    def largest(self) -> Request:
        """The first of the requests with the most tokens, arriving at time 0."""
        most, found, first = -1, (0, 0, 0), 0
        for tokens in self.lengths():
            total = tokens.sum(axis=1)
            at = int(total.argmax())
            if int(total[at]) > most:
                most, found = int(total[at]), (first + at, int(tokens[at, 0]), int(tokens[at, 1]))
            first += len(tokens)
        return Request(found[0], 0.0, found[1], found[2], b"")

    def arrivals(self) -> Iterator[NDArray[np.float64]]:
        """Arrival times, chunk by chunk."""
        if self._replayed is not None:
            yield from (self._replayed[0][part] for part in self._parts())
            return
        rng, reached = deepcopy(self._arrivals), 0.0
        for part in self._parts():
            arrival_s, reached = _arrivals(self.traffic, part.stop - part.start, rng, reached)
            yield arrival_s

    def lengths(self) -> Iterator[Lengths]:
        """Prompt and output tokens, chunk by chunk."""
        for tokens, _ in self._drawn():
            yield tokens

    def _drawn(self) -> Iterator[tuple[Lengths, NDArray[np.float32] | None]]:
        """Lengths and, if the file has them, acceptance rates, chunk by chunk."""
        rng, spreads = deepcopy(self._lengths), deepcopy(self._spreads)
        for part in self._parts():
            picked = None
            if self._replayed is not None:
                tokens, picked = self._replayed[1][part].copy(), self._replayed[2][part]
            elif self._table is not None and self._order is not None:
                picked = _picked(self._order, part, rng)
                tokens = self._table[picked]
            else:
                tokens = _made_up(self.traffic, part.stop - part.start, rng)
            yield _overridden(self.traffic, tokens, spreads), None if self._rates is None else self._rates[picked]

    def _parts(self) -> Iterator[slice]:
        for first in range(0, len(self), self.chunk):
            yield slice(first, min(first + self.chunk, len(self)))


def _arrivals(
    traffic: Traffic, count: int, rng: np.random.Generator, reached: float
) -> tuple[NDArray[np.float64], float]:
    """The next arrival times, and the sum of gaps, which was `reached` before.

    Gaps are Gamma-distributed with shape `burstiness` and mean 1/rate, as in `vllm bench serve`; all times are 0 at
    rate inf. As there, the first request arrives one gap after the start. vLLM then scales all times so that the last
    is num_prompts/rate. That is omitted, as early arrivals would depend on the number of requests.
    """
    if math.isinf(traffic.request_rate):
        return np.zeros(count), 0.0
    gaps = rng.standard_gamma(traffic.burstiness, size=count)
    gaps[0] += reached
    sums = np.cumsum(gaps)
    arrival_s: NDArray[np.float64] = sums / (traffic.request_rate * traffic.burstiness)
    return arrival_s, float(sums[-1])


def _trace(traffic: Traffic) -> Trace | None:
    """The requests of the file that are short enough, for data sets of requests."""
    if traffic.dataset_name not in TRACES:
        return None
    trace, fits = traffic.trace(), traffic.fitting()
    if fits.all():
        return trace
    if not fits.any():
        raise ValueError(
            f"{traffic.dataset_path}: all {len(fits)} requests have more than {traffic.longest_request} tokens: "
            "choose models with a longer context or raise --max-model-len"
        )
    rates = None if trace.acceptance is None else trace.acceptance[fits]
    return trace._replace(arrival_s=trace.arrival_s[fits], lengths=trace.lengths[fits], acceptance=rates)


def trace_rate(traffic: Traffic) -> float | None:
    """Mean request rate of the traffic's file; None without at least two arrival times."""
    trace = _trace(traffic)
    if trace is None or not trace.timed or not (span_s := float(np.ptp(trace.arrival_s))):
        return None
    return (len(trace.arrival_s) - 1) / span_s


def _replayed(
    traffic: Traffic, trace: Trace, rng: np.random.Generator
) -> tuple[NDArray[np.float64], Lengths, NDArray[np.int64]]:
    """The trace's requests by time, the first at 0, and their rows.

    Without a request rate they are the first `num_prompts` requests that are short enough. With a rate they start at a
    point that depends on the seed, wrap around after the trace's end with a mean gap, and are scaled to the rate.
    """
    if not trace.timed:
        raise ValueError(f"--use-trace-timestamps: {traffic.dataset_path} has no column of arrival times")
    rows, count = len(trace.arrival_s), traffic.num_prompts
    order = np.argsort(trace.arrival_s, kind="stable")
    if math.isinf(traffic.request_rate):
        if count > (rows := len(traffic.fitting())):
            raise ValueError(f"num-prompts is {count}, but {traffic.dataset_path} holds {rows} requests")
        order = order[:count]
        arrival_s = trace.arrival_s[order]
        return arrival_s - arrival_s[0], trace.lengths[order], order
    laps, at = np.divmod(rng.integers(rows) + np.arange(count + 1), rows)
    span_s = float(np.ptp(trace.arrival_s))
    times_s = trace.arrival_s[order[at]] + laps * (span_s * rows / max(1, rows - 1) or 1.0)
    times_s -= times_s[0]
    if not times_s[-1] > 0:
        raise ValueError(
            f"{traffic.dataset_path}: {count + 1} consecutive requests arrive at the same time and have no rate: "
            "raise --num-prompts, or leave out --use-trace-timestamps"
        )
    order = order[at[:-1]]
    return times_s[:-1] * (count / traffic.request_rate / times_s[-1]), trace.lengths[order], order


def _table(
    traffic: Traffic, trace: Trace | None, rng: np.random.Generator
) -> tuple[Lengths | None, NDArray[np.int64] | None]:
    """A file's rows and their shuffled order, at most as many as requested; None if lengths are not from a file."""
    count = traffic.num_prompts
    if trace is not None:
        return trace.lengths, rng.permutation(len(trace.lengths))[:count]
    if traffic.dataset_path is None:
        return None, None
    rows = datasets.read_sharegpt(traffic.dataset_path, traffic.tokenizer, count, rng, traffic.longest_request)
    return rows, np.arange(len(rows))


def _picked(order: NDArray[np.int64], part: slice, rng: np.random.Generator) -> NDArray[np.int64]:
    """The rows of some requests: in order and, as in vLLM, repeated if the file has too few."""
    first = order[part]
    return np.concatenate((first, order[rng.integers(len(order), size=part.stop - part.start - len(first))]))


def _made_up(traffic: Traffic, count: int, rng: np.random.Generator) -> Lengths:
    """The lengths of some requests, from a model."""
    return _uniform(traffic, count, rng) if traffic.dataset_name == "random" else datasets.sample_sharegpt(count, rng)


def _uniform(traffic: Traffic, count: int, rng: np.random.Generator) -> Lengths:
    """Integer lengths uniform in [floor(len*(1-ratio)), ceil(len*(1+ratio))], at least 1, as vLLM's random data set."""
    mean = np.array(traffic.fixed_lengths, dtype=np.float64)
    low = np.maximum(1, np.floor(mean * (1 - traffic.random_range_ratio)))
    high = np.ceil(mean * (1 + traffic.random_range_ratio))
    uniform = rng.random((count, len(mean)))
    lengths: Lengths = (low + np.floor(uniform * (high - low + 1))).astype(np.int64)
    return lengths


def _overridden(traffic: Traffic, tokens: Lengths, rng: np.random.Generator) -> Lengths:
    """Lengths with --input-len and --output-len instead of the data set's."""
    if traffic.dataset_name != "random" and traffic.fixed_lengths:
        given = [at for at, length in enumerate((traffic.input_len, traffic.output_len)) if length is not None]
        tokens[:, given] = _uniform(traffic, len(tokens), rng)
    return tokens


def _check_tokens(total: int) -> None:
    """Rejects traffic that does not fit in memory, before sampling."""
    if total > MAX_OUTPUT_TOKENS:
        raise ValueError(f"{total} output tokens in total are too many; at most {MAX_OUTPUT_TOKENS} are supported")
