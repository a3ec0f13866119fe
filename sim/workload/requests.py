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
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain, count
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


class DrawnRequests(NamedTuple):
    """Some requests: lengths, and as far as there are any, rows of the file, conversations and their turns."""

    lengths: Lengths
    rows: NDArray[np.int64] | None
    sessions: NDArray[np.int64] | None
    turns: NDArray[np.int64] | None

    @property
    def starts(self) -> NDArray[np.int64]:
        """Places of the requests that wait for no answer."""
        return np.arange(len(self.lengths)) if self.turns is None else np.flatnonzero(self.turns == 0)


def make_requests(traffic: Traffic, acceptance: Acceptance) -> list[Request]:
    """The requests in order of arrival, numbered from 0; the same for the same traffic, acceptance and seed."""
    workload = Workload(traffic, acceptance)
    workload.check_total()
    return list(workload)


class Workload:
    """The requests as an iterator, sampled in chunks: served ones can be dropped.

    Only a file of lengths and a replayed trace are held in memory.
    """

    def __init__(self, traffic: Traffic, acceptance: Acceptance, chunk: int = CHUNK_REQUESTS) -> None:
        self.traffic, self.chunk = traffic, chunk
        self._single: list[DrawnRequests] | None = None
        seeds = np.random.SeedSequence(traffic.seed).spawn(7)
        rngs = [np.random.default_rng(s) for s in seeds]
        self._arrivals, self._lengths, coins, rates, self._spreads, self._prefixes, self._thinking = rngs
        self._streams = Streams(acceptance, coins, rates)
        trace = _trace(traffic, self._lengths)
        given = acceptance != Acceptance()  # an option overrides the column
        self._rates = None if trace is None or given else trace.acceptance
        self._hashes = None if trace is None else trace.hashes
        self._span = 1 + max(map(max, self._hashes)) if self._hashes is not None else 0
        self._talk = None if trace is None else trace.talk()
        _check_shared(traffic, trace)
        self._table = None if trace is None else trace.lengths
        self._replay = self._order = self._sessions = None
        if trace is not None and traffic.use_trace_timestamps:
            self._replay = _replayed(traffic, trace)
            self._order = self._replay.rows
            if self._talk is not None:
                self._sessions = self._talk.conversation[self._replay.rows] + len(self._talk.rows) * self._replay.laps
        elif self._talk is not None:
            order = self._lengths.permutation(len(self._talk.rows)).tolist()
            self._order, self._sessions = self._talk.ordered(order, traffic.num_prompts, self._lengths)
        elif trace is not None:
            in_order = traffic.dataset_name == "sharegpt"  # its file is read in random order
            order = np.arange(len(trace.lengths)) if in_order else self._lengths.permutation(len(trace.lengths))
            self._order = order[: traffic.num_prompts]
        self.shares = traffic.prefixes[0] > 0 or traffic.num_turns > 1 or (trace is not None and trace.shares)

    def __len__(self) -> int:
        return self.traffic.num_prompts if self._replay is None else len(self._replay.rows)

    def __iter__(self) -> Iterator[Request]:
        streams, prefixes, thinking = self._streams.again(), copied(self._prefixes), copied(self._thinking)
        arrivals = chain.from_iterable(part.tolist() for part in self.arrivals())
        (prefix_len, several), think_s, prefix = self.traffic.prefixes, self.traffic.think_time_s, 0
        replays, shares, numbers = self._replay is not None, self.shares, count()
        for chunk in self._drawn():
            columns = (
                [default] * len(chunk.lengths) if column is None else column.tolist()
                for column, default in ((chunk.sessions, -1), (chunk.turns, 0), (chunk.rows, -1))
            )
            lengths, prompts = chunk.lengths.tolist(), chunk.lengths[:, 0].tolist()
            drawn = DrawnStreams(self._runs(streams, chunk), prompts)
            for place, ((prompt, output), runs, session, turn, row) in enumerate(
                zip(lengths, drawn.runs, *columns, strict=True)
            ):
                later = turn > 0 and not replays
                arrival_s = 0.0 if later else next(arrivals)
                request = Request(next(numbers), arrival_s, prompt, output, runs, drawn=drawn, place=place)
                if shares:
                    if several > 1 and not later:
                        prefix = int(prefixes.integers(several))
                    request.session, request.turn = session, turn
                    request.chain = after_prefix(self._chain(request, row), prefix, prefix_len)
                    if later and think_s:
                        request.think_s = float(thinking.exponential(think_s))
                yield request

    def _chain(self, request: Request, row: int) -> Chain:
        """The texts of a request, without the prefix."""
        if self._hashes is not None:
            lap = request.id // len(self._hashes) if self._replay is None else int(self._replay.laps[request.id])
            return hashed_chain(self._hashes[row], lap * self._span, request.prompt_tokens, request.id)
        if request.session < 0:
            return ((ENDLESS, own_text(request.id)),)
        return session_chain(((ENDLESS, 0),) if self._talk is None else self._talk.origins[row], request.session)

    def _runs(self, streams: Streams, part: DrawnRequests) -> list[bytes]:
        outputs = part.lengths[:, 1]
        _check_tokens(int(outputs.sum()))
        return streams.draw(outputs, None if self._rates is None else self._rates[part.rows])

    def check_total(self) -> None:
        """Reject more output tokens than fit in memory."""
        _check_tokens(sum(int(tokens[:, 1].sum()) for tokens in self.lengths()))

    def largest(self) -> Request:
        """The first of the requests with the most tokens, arriving at time 0."""
        most = (
            (part.start + (at := int(tokens.sum(axis=1).argmax())), *tokens[at].tolist())
            for part, tokens in zip(self._parts(), self.lengths(), strict=True)
        )
        number, prompt, output = max(most, key=lambda one: one[1] + one[2])
        return Request(number, 0.0, prompt, output, b"", ((ENDLESS, 0),) if self.shares else ())

    def arrivals(self) -> Iterator[NDArray[np.float64]]:
        """Arrival times, chunk by chunk; of conversations that are not replayed, those of their first turns.

        Gaps are Gamma-distributed with shape `burstiness` and mean 1/rate, as in `vllm bench serve`; all times are 0
        at rate inf. As there, the first request arrives one gap after the start. vLLM then scales all times so that the
        last is num_prompts/rate. That is omitted, as early arrivals would depend on the number of requests.
        """
        if self._replay is not None:
            yield from (self._replay.arrival_s[part] for part in self._parts())
            return
        rng, rate, shape = copied(self._arrivals), self.traffic.request_rate / self.mean_turns, self.traffic.burstiness
        reached = np.zeros(1)
        for starts in self._starts():
            gaps = np.zeros(starts) if math.isinf(rate) else rng.standard_gamma(shape, size=starts)
            gaps[:1] += reached[-1]
            reached = np.cumsum(gaps) if starts else reached
            yield reached[:starts] / (rate * shape)

    def _starts(self) -> Iterator[int]:
        """Requests of each chunk that do not wait for an answer."""
        if self._talk is None and self.traffic.num_turns == 1:
            return (part.stop - part.start for part in self._parts())
        return (len(chunk.starts) for chunk in self._drawn())

    @property
    def starts(self) -> int:
        """Requests that begin a conversation or belong to none."""
        return sum(self._starts())

    @cached_property
    def mean_turns(self) -> float:
        """Turns of a conversation, without the last one, which may be cut short."""
        if self._talk is None and self.traffic.num_turns == 1:
            return 1.0
        parts = zip(self._parts(), self._drawn(), strict=True)
        starts = np.concatenate([part.start + chunk.starts for part, chunk in parts])
        return float(starts[-1]) / (len(starts) - 1) if len(starts) > 1 else 1.0

    def lengths(self) -> Iterator[Lengths]:
        """Prompt and output tokens, chunk by chunk."""
        return (part.lengths for part in self._drawn())

    def _drawn(self) -> Iterable[DrawnRequests]:
        """Lengths, rows of the file and conversations, chunk by chunk; a single chunk is kept."""
        if self._single is None and len(self) <= self.chunk:
            self._single = list(self._draw())
        return self._draw() if self._single is None else self._single

    def _draw(self) -> Iterator[DrawnRequests]:
        rng, spreads, traffic = copied(self._lengths), copied(self._spreads), self.traffic
        given = [at for at, length in enumerate((traffic.input_len, traffic.output_len)) if length is not None]
        grows = self._talk is None and traffic.num_turns > 1
        growth = Growth(traffic.num_turns, traffic.room) if grows else None
        for part in self._parts():
            rows = sessions = turns = None
            count = part.stop - part.start
            if self._order is not None and self._table is not None:
                rows = self._order[part]  # in order and, as in vLLM, repeated if the file has too few
                more = rng.integers(len(self._order), size=count - len(rows))
                rows = np.concatenate((rows, self._order[more]))
                tokens = self._table[rows]
            elif traffic.dataset_name in LENGTHS:
                tokens = _uniform(traffic, count, rng)
            else:
                tokens = datasets.sample_sharegpt(count, rng, max(2, min(traffic.room, datasets.SHAREGPT_TOKENS)))
            if given and traffic.dataset_name not in LENGTHS:
                tokens[:, given] = _uniform(traffic, count, spreads)
            if growth is not None:
                tokens, talk = growth.add(tokens)
                sessions, turns = talk.T
            elif self._talk is not None and self._sessions is not None:
                sessions, turns = self._sessions[part], self._talk.turn[rows]
            tokens[:, 0] += traffic.prefixes[0]
            yield DrawnRequests(tokens, rows, sessions, turns)

    def _parts(self) -> Iterator[slice]:
        for first in range(0, len(self), self.chunk):
            yield slice(first, min(first + self.chunk, len(self)))


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


def _check_tokens(total: int) -> None:
    """Rejects traffic that does not fit in memory, before sampling."""
    if total > MAX_OUTPUT_TOKENS:
        raise ValueError(f"{total} output tokens in total are too many; at most {MAX_OUTPUT_TOKENS} are supported")
