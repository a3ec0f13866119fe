"""Requests from traffic and acceptance: arrival times, lengths, and which drafts would be accepted.

Arrivals, lengths, acceptance and acceptance rates have separate random generators from the seed. Another request rate
does not change lengths and acceptance, and more requests do not change the first ones.

The turns of a conversation follow each other in the iterator; a later turn has no arrival time of its own, or that of
a replayed trace, and is sent when the one before is answered. Conversations start at the request rate over their mean
number of turns.

Not modelled here: users that wait for an answer before the next request (`max_concurrency` limits admission instead),
except in conversations; ramps of the rate; and correlation between arrivals and lengths, except by replaying a trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import ENDLESS, Chain, DrawnStreams, Request
from pdvsim.sim.limits import MAX_OUTPUT_TOKENS
from pdvsim.sim.workload import datasets
from pdvsim.sim.workload.acceptance import Streams, copied
from pdvsim.sim.workload.conversations import Growth, after_prefix, hashed_chain, own_text, session_chain
from pdvsim.sim.workload.datasets import Lengths, Trace
from pdvsim.sim.workload.options import BY_SEED, LENGTHS, PEAK, TRACES, Acceptance, Traffic

CHUNK_REQUESTS = 4096
BLOCKS = 20  # that a log of one window is cut into, for other seeds


class Replay(NamedTuple):
    """Requests of a trace by time: seconds from the first, rows, and how often the trace had been sent before."""

    arrival_s: NDArray[np.float64]
    rows: NDArray[np.int64]
    laps: NDArray[np.int64]


def make_requests(traffic: Traffic, acceptance: Acceptance) -> list[Request]:
    """The requests in order of arrival, numbered from 0; the same for the same traffic, acceptance and seed."""
    workload = Workload(traffic, acceptance)
    workload.check_total()
    return list(workload)


class Workload:
    """The requests as an iterator. Their acceptance is sampled in chunks, so that served ones can be dropped."""

    def __init__(self, traffic: Traffic, acceptance: Acceptance, chunk: int = CHUNK_REQUESTS) -> None:
        self.traffic, self.chunk = traffic, chunk
        seeds = np.random.SeedSequence(traffic.seed).spawn(7)
        arrivals, lengths, coins, rates, spreads, self._prefixes, self._thinking = map(np.random.default_rng, seeds)
        self._streams = Streams(acceptance, coins, rates)
        trace = _trace(traffic, lengths)
        given = acceptance != Acceptance()  # an option overrides the column
        self._rates = None if trace is None or given else trace.acceptance
        self._hashes = None if trace is None else trace.hashes
        self._span = 1 + max(map(max, self._hashes)) if self._hashes is not None else 0
        self._talk = None if trace is None else trace.talk()
        _check_shared(traffic, trace)
        self.shares = traffic.prefixes[0] > 0 or traffic.num_turns > 1 or (trace is not None and trace.shares)
        self._replay = _replayed(traffic, trace) if trace is not None and traffic.use_trace_timestamps else None
        self._rows = self._sessions = self._turns = None  # of the file, and conversations, as far as there are any
        if trace is not None:
            self._rows, self._sessions = self._chosen(trace, lengths)
        self.lengths = self._drawn(trace, lengths, spreads)  # prompt and output tokens of each request
        if self._talk is not None and self._rows is not None:
            self._turns = self._talk.turn[self._rows]
        elif traffic.num_turns > 1:
            self.lengths, talk = Growth(traffic.num_turns, traffic.room).add(self.lengths)
            self._sessions, self._turns = talk.T
        self.lengths[:, 0] += traffic.prefixes[0]
        starts = np.arange(len(self.lengths)) if self._turns is None else np.flatnonzero(self._turns == 0)
        # turns of a conversation, without the last one, which may be cut short
        self.mean_turns = float(starts[-1]) / (len(starts) - 1) if len(starts) > 1 else 1.0
        self.arrival_s = self._arrivals(len(starts), arrivals)

    def _chosen(self, trace: Trace, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """The row of each request in the file, and its conversation.

        In order and, as in vLLM, repeated at random if the file has too few.
        """
        traffic, talk, replay, sessions = self.traffic, self._talk, self._replay, None
        if replay is not None:
            order = replay.rows
            sessions = None if talk is None else talk.conversation[order] + len(talk.rows) * replay.laps
        elif talk is not None:
            order, sessions = talk.ordered(rng.permutation(len(talk.rows)).tolist(), traffic.num_prompts, rng)
        else:
            in_order = traffic.dataset_name == "sharegpt"  # its file is read in random order
            order = np.arange(len(trace.lengths)) if in_order else rng.permutation(len(trace.lengths))
        rows = order if replay is not None else order[: traffic.num_prompts]
        if (lacking := 0 if replay is not None else traffic.num_prompts - len(rows)) > 0:
            rows = np.concatenate((rows, order[rng.integers(len(order), size=lacking)]))
        return rows, sessions

    def _drawn(self, trace: Trace | None, rng: np.random.Generator, spreads: np.random.Generator) -> Lengths:
        """Prompt and output tokens of each request, or that its turn adds to its conversation."""
        traffic = self.traffic
        if traffic.dataset_name in LENGTHS:
            return _uniform(traffic, traffic.num_prompts, rng)
        if trace is not None:
            tokens = trace.lengths[self._rows]
        else:
            most = max(2, min(traffic.room, datasets.SHAREGPT_TOKENS))
            tokens = datasets.sample_sharegpt(traffic.num_prompts, rng, most)
        if given := [at for at, length in enumerate((traffic.input_len, traffic.output_len)) if length is not None]:
            tokens[:, given] = _uniform(traffic, len(tokens), spreads)
        return tokens

    def _arrivals(self, starts: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Arrival times of the requests that wait for no answer: all of a replay, and first turns otherwise.

        Gaps are Gamma-distributed with shape `burstiness` and mean 1/rate, as in `vllm bench serve`; all times are 0
        at rate inf. As there, the first request arrives one gap after the start. vLLM then scales all times so that the
        last is num_prompts/rate. That is omitted, as early arrivals would depend on the number of requests.
        """
        if self._replay is not None:
            return self._replay.arrival_s
        rate, shape = self.traffic.request_rate / self.mean_turns, self.traffic.burstiness
        if math.isinf(rate):
            return np.zeros(starts)
        return rng.standard_gamma(shape, size=starts).cumsum() / (rate * shape)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Request]:
        streams, prefixes, thinking = self._streams.again(), copied(self._prefixes), copied(self._thinking)
        arrivals, (prefix_len, several), prefix = iter(self.arrival_s.tolist()), self.traffic.prefixes, 0
        columns = ((self._sessions, -1), (self._turns, 0), (self._rows, -1))
        for first in range(0, len(self), self.chunk):
            part = slice(first, first + self.chunk)
            lengths = self.lengths[part]
            rates = None if self._rates is None or self._rows is None else self._rates[self._rows[part]]
            drawn = DrawnStreams(streams.draw(lengths[:, 1], rates), lengths[:, 0].tolist())
            rows = zip(
                lengths.tolist(), drawn.runs,
                *([otherwise] * len(lengths) if column is None else column[part].tolist()
                  for column, otherwise in columns),
                strict=True,
            )  # fmt: skip
            for place, ((prompt, output), runs, session, turn, row) in enumerate(rows):
                later = turn > 0 and self._replay is None
                arrival_s = 0.0 if later else next(arrivals)
                request = Request(first + place, arrival_s, prompt, output, runs, drawn=drawn, place=place)
                if self.shares:
                    if several > 1 and not later:
                        prefix = int(prefixes.integers(several))
                    request.session, request.turn = session, turn
                    request.chain = after_prefix(self._chain(request, row), prefix, prefix_len)
                    if later and self.traffic.think_time_s:
                        request.think_s = float(thinking.exponential(self.traffic.think_time_s))
                yield request

    def _chain(self, request: Request, row: int) -> Chain:
        """The texts of a request, without the prefix."""
        if self._hashes is not None:
            lap = request.id // len(self._hashes) if self._replay is None else int(self._replay.laps[request.id])
            return hashed_chain(self._hashes[row], lap * self._span, request.prompt_tokens, request.id)
        if request.session < 0:
            return ((ENDLESS, own_text(request.id)),)
        return session_chain(((ENDLESS, 0),) if self._talk is None else self._talk.origins[row], request.session)

    def check_total(self) -> None:
        """Reject more output tokens than fit in memory, before sampling their acceptance."""
        if (total := int(self.lengths[:, 1].sum())) > MAX_OUTPUT_TOKENS:
            raise ValueError(f"{total} output tokens in total are too many; at most {MAX_OUTPUT_TOKENS} are supported")

    def largest(self) -> Request:
        """The first of the requests with the most tokens, arriving at time 0."""
        number = int(self.lengths.sum(axis=1).argmax())
        prompt, output = self.lengths[number].tolist()
        return Request(number, 0.0, prompt, output, b"", ((ENDLESS, 0),) if self.shares else ())


def _trace(traffic: Traffic, rng: np.random.Generator) -> Trace | None:
    """The requests of the file that are short enough, for data sets of requests and ShareGPT's conversations."""
    if traffic.dataset_name == "sharegpt" and traffic.dataset_path is not None:
        wanted, turns = traffic.num_prompts, traffic.num_turns
        return datasets.read_sharegpt(traffic.dataset_path, traffic.tokenizer, wanted, rng, traffic.room, turns)
    if traffic.dataset_name not in TRACES:
        return None
    trace, fitting = traffic.trace(), traffic.windows().whole
    if not len(fitting):
        raise ValueError(
            f"{traffic.dataset_path}: all {len(trace.lengths)} requests have more than {traffic.longest_request} "
            "tokens: choose models with a longer context or raise --max-model-len"
        )
    if traffic.use_trace_timestamps:
        return trace.only(traffic.replayed().rows)
    return trace if len(fitting) == len(trace.lengths) else trace.only(np.sort(fitting.rows))


def trace_rate(traffic: Traffic) -> float | None:
    """Mean request rate of the traffic's file, of its busiest window if seeds use several; None without one."""
    if traffic.dataset_name not in TRACES or not traffic.trace().timed:
        return None
    return replace(traffic, window=PEAK if traffic.window == BY_SEED else traffic.window).replayed().request_rate


def _check_shared(traffic: Traffic, trace: Trace | None) -> None:
    """Reject prefixes, turns and lengths that would replace those of a file."""
    if trace is None or not trace.shares:
        return
    flags = {
        "--num-turns": traffic.num_turns > 1 and traffic.dataset_name in TRACES,
        "--num-prefixes": traffic.prefixes[1] > 1,
        "--prefix-len": traffic.prefixes[0] > 0 and trace.hashes is not None,
        "--input-len and --output-len": bool(traffic.fixed_lengths) and trace.turns is not None,
    }
    if wrong := [flag for flag, given in flags.items() if given]:
        raise ValueError(f"{traffic.dataset_path} has shared prefixes of its own: leave out {wrong[0]}")


def _replayed(traffic: Traffic, trace: Trace) -> Replay:
    """The requests of the window by time, the first at 0: all of them, or the first `num_prompts`.

    With a rate they are scaled to it, and sent again after a mean gap if there are fewer than `num_prompts`.
    """
    if not trace.timed:
        raise ValueError(f"--use-trace-timestamps: {traffic.dataset_path} has no column of arrival times")
    rows, count = len(trace.arrival_s), traffic.num_prompts  # by arrival
    if math.isinf(traffic.request_rate):
        if count > (whole := len(traffic.trace().lengths)):
            raise ValueError(f"num-prompts is {count}, but {traffic.dataset_path} holds {whole} requests")
        order = np.arange(min(rows, count))
        return Replay(trace.arrival_s[order] - trace.arrival_s[0], order, np.zeros(len(order), dtype=np.int64))
    laps, order = np.divmod(np.arange(count + 1), rows)
    span_s = float(np.ptp(trace.arrival_s))
    if resamples(traffic) and traffic.seed and span_s:
        times_s, order = _other_days(trace.arrival_s, count + 1, np.random.default_rng(traffic.seed))
        laps = np.zeros_like(order)
    else:
        times_s = trace.arrival_s[order] + laps * (span_s * rows / max(1, rows - 1) or 1.0)
    times_s -= times_s[0]
    if not times_s[-1] > 0:
        raise ValueError(
            f"{traffic.dataset_path}: {count + 1} consecutive requests arrive at the same time and have no rate: "
            "raise --num-prompts, or leave out --use-trace-timestamps"
        )
    return Replay(times_s[:-1] * (count / traffic.request_rate / times_s[-1]), order[:-1], laps[:-1])


def resamples(traffic: Traffic) -> bool:
    """Whether seeds after 0 replay a log's blocks in another order: one window, nothing shared."""
    if not (traffic.use_trace_timestamps and traffic.window == BY_SEED) or traffic.converses:
        return False
    return traffic.trace().hashes is None and len(traffic.windows().parts) == 1


def _other_days(
    arrival_s: NDArray[np.float64], count: int, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Times and rows of other days of the same process: blocks of the log of equal length in time, drawn at random."""
    length_s = float(np.ptp(arrival_s)) / BLOCKS
    at_s = arrival_s - arrival_s[0]
    block = np.minimum((at_s / length_s).astype(np.int64), BLOCKS - 1)
    rows = [np.flatnonzero(block == number) for number in range(BLOCKS)]
    drawn, found = list[int](), 0
    while found < count:
        drawn.append(int(rng.integers(BLOCKS)))
        found += len(rows[drawn[-1]])
    times_s = [at_s[rows[number]] + (place - number) * length_s for place, number in enumerate(drawn)]
    return np.concatenate(times_s)[:count], np.concatenate([rows[number] for number in drawn])[:count]


def _uniform(traffic: Traffic, count: int, rng: np.random.Generator) -> Lengths:
    """Integer lengths uniform in [floor(len*(1-ratio)), ceil(len*(1+ratio))], at least 1, as vLLM's random data set."""
    mean = np.array(traffic.fixed_lengths, dtype=np.float64)
    low = np.maximum(1, np.floor(mean * (1 - traffic.random_range_ratio)))
    high = np.ceil(mean * (1 + traffic.random_range_ratio))
    uniform = rng.random((count, len(mean)))
    lengths: Lengths = (low + np.floor(uniform * (high - low + 1))).astype(np.int64)
    return lengths
