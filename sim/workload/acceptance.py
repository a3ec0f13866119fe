"""Acceptance: which draft tokens the target would accept, sampled per request before the run.

One uniform number u[p] is sampled for each output position p of each request. With an acceptance rate alpha, the draft
at p is accepted if u[p] < alpha, in any round. So all architectures and draft lengths use the same random numbers, and
a higher alpha never turns an acceptance into a rejection.

Acceptance may also be sampled from models of recorded EAGLE-3, n-gram and suffix drafts, by data set and drafter. A
request belongs to one class, easy or hard to draft, for its whole output. A run of accepted drafts starts after a
rejection. Its length depends on the class and on whether the last run was empty, so that long runs are clustered. A
round may also start inside a run, if an earlier draft was shorter: its acceptance is sampled given the rest of the run.
Classes have equally many tokens, not requests. So the mean over a run's tokens is the recorded one for any output
lengths.

Not modelled: tokens themselves; acceptance that falls with the distance from the last verified token, or changes along
a request (except with `synthetic_acceptance_rates`, a measured model or a recorded trace); trees of drafts. Of measured
models: that an output becomes easier to draft as it grows (n-gram finds more to copy), except by its class; that
classes differ between long and short outputs; runs beyond LONGEST, which were not recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cache, lru_cache
from importlib.resources import files
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import Request
from pdvsim.sim.limits import MAX_DRAFT
from pdvsim.sim.reading import quoted
from pdvsim.sim.workload.datasets import bad, json_lines
from pdvsim.sim.workload.options import Acceptance

Uniforms = NDArray[np.float32]
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

FIRST_ROUND = 1  # output position of the first round: the prefill emits position 0
LONGEST_RUN = 255  # a run is stored as a byte; no draft is longer
_WORD = 2**64 - 1
RATE_QUANTILES = 64  # of a Beta distribution of rates
LONGEST = 20  # longest recorded run of accepted drafts
BLOCK = 1 << 18  # positions sampled together: many for numpy, few for the CPU cache


def expected_tokens(alpha: float, k: int) -> float:
    """Mean tokens of a round of draft length `k`: (1 - alpha^(k+1)) / (1 - alpha), or k+1 at 1 (Leviathan, eq. 1)."""
    return sum([alpha**i for i in range(k + 1)])  # the same, without division by zero at 1


@cache
def mean_tokens(acceptance: Acceptance, k: int) -> float:
    """Mean tokens of a round of draft length `k`, by the rates of an acceptance: of requests, or by position."""
    if acceptance.synthetic_acceptance_rates:
        return 1.0 + sum(acceptance.synthetic_acceptance_rates[:k])
    rate, concentration = acceptance.acceptance_rate, acceptance.acceptance_concentration
    rates = [rate]
    if concentration is not None and 0 < rate < 1:
        from scipy.special import betaincinv

        middles = (np.arange(RATE_QUANTILES) + 0.5) / RATE_QUANTILES
        rates = betaincinv(rate * concentration, (1 - rate) * concentration, middles).tolist()
    # requests with fewer tokens per round take more rounds, hence a harmonic mean
    return len(rates) / sum(1 / expected_tokens(rate, k) for rate in rates)


def dropped_tokens(alpha: float, k: int) -> float:
    """Mean surplus tokens of a request's last round, for outputs much longer than a round.

    By renewal theory E[X (X - 1)] / (2 E[X]), with X the tokens of a round.
    """
    return sum([i * alpha**i for i in range(1, k + 1)]) / expected_tokens(alpha, k)


def mean_round(runs: Sequence[bytes], k: int) -> tuple[float, float]:
    """Mean tokens of a round of draft length `k`, and mean rounds of an output, by stepping through the outputs."""
    gained = bytes(min(run, k) + 1 for run in range(256))
    tokens = rounds = 0
    for one in runs:
        gains, at, end = one.translate(gained), FIRST_ROUND, len(one)
        while at < end:
            at += gains[at]
            rounds += 1
        tokens += at - FIRST_ROUND if end > FIRST_ROUND else 0
    return tokens / max(1, rounds), rounds / len(runs)


def guessed_rate(alpha: float, k: int, fan: int, exponent: float) -> float:
    """Share of verdicts on `k` drafts that drafting ahead guesses right; see `was_guessed`."""
    if not fan:
        return alpha ** (k + 1)
    all_accepted = alpha**k * (alpha + (1 - alpha) * _coverage(fan - 1, exponent))
    return all_accepted + (1 - alpha**k) * _coverage(fan, exponent)


def was_guessed(request: Request, accepted: int, fan: int, exponent: float) -> bool:
    """Return whether drafting ahead guessed a verdict right; called before the verdict is recorded.

    After drafts that were all accepted, the drafter's likeliest token is the target's if the position is accepted.
    Otherwise the target's token is one of the drafter's next n, without the rejected one, with probability
    1 - (1 + n)^-exponent: misses fall as a power of the fan (arXiv 2603.03251), with a separate random number.
    """
    position = request.state.emitted
    if accepted == request.state.k and request.accept_runs[position] > accepted:
        return True
    others = fan - (accepted == request.state.k)
    return others > 0 and uniform(request, position + accepted) < _coverage(others, exponent)


def _coverage(tokens: int, exponent: float) -> float:
    return float(1 - (1 + tokens) ** -exponent)


def uniform(request: Request, position: int) -> float:
    """A uniform number that depends only on request and position (splitmix64)."""
    state = int.from_bytes(request.accept_runs[:8], "little") ^ request.id * 0x9E3779B97F4A7C15
    state = (state + (position + 1) * 0xD1B54A32D192ED03) & _WORD
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _WORD
    return float((state ^ state >> 31) / 2**64)


def copied(rng: np.random.Generator) -> np.random.Generator:
    """A generator that draws the same from here on; several times as fast as `deepcopy`."""
    same = np.random.default_rng(0)
    same.bit_generator.state = rng.bit_generator.state
    return same


def _blocks(output_tokens: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of requests with about BLOCK positions each."""
    ends = np.cumsum(output_tokens + MAX_DRAFT)
    first = 0
    while first < len(ends):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + BLOCK, side="right")))
        yield first, last
        first = last


def _runs(uniforms: Uniforms, rates: Uniforms | np.float32, ends: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The number of consecutive accepted positions from each on; no run crosses the end of its request."""
    rejected = uniforms >= rates
    # The last position of the tail: a draft from the last output position can be MAX_DRAFT long without reaching it.
    rejected[ends - 1] = True
    at = np.flatnonzero(rejected).astype(np.int32)  # half the memory traffic of int64
    run = np.repeat(at, np.diff(at, prepend=np.int32(-1)))  # the next rejection; the position is subtracted below
    run -= np.arange(len(uniforms), dtype=np.int32)
    return np.minimum(run, LONGEST_RUN, out=run).astype(np.uint8)


class Streams:
    """Samples the streams of requests in order, in chunks of any size; more requests do not change the first ones."""

    def __init__(self, acceptance: Acceptance, coins: np.random.Generator, rates: np.random.Generator) -> None:
        self._acceptance, self._coins, self._rates = acceptance, coins, rates
        self._drawn = 0
        trace = acceptance.acceptance_trace
        self._lines = None if trace is None else read_trace(trace)

    def again(self) -> Streams:
        """Return the same streams from here on, drawn independently of these."""
        same = copy(self)
        same._coins, same._rates = copied(self._coins), copied(self._rates)
        return same

    def draw(self, output_tokens: NDArray[np.int64], own: Uniforms | None = None) -> list[bytes]:
        """`accept_runs` of each of the next requests; `own` are per-request rates that replace the acceptance's."""
        if self._lines is not None:
            first = self._drawn % len(self._lines)
            self._drawn += len(output_tokens)
            lines = self._lines[first:] + self._lines[:first]
            return replay(lines, max(1, *map(max, lines)), output_tokens)
        acceptance = self._acceptance
        base = self._base_rates(len(output_tokens)) if own is None else own
        runs: list[bytes] = []
        for first, last in _blocks(output_tokens):
            # MAX_DRAFT positions beyond an output: otherwise drafts near its end would be accepted less often
            spans = output_tokens[first:last] + MAX_DRAFT
            ends = np.cumsum(spans)
            uniforms = self._coins.random(int(ends[-1]), dtype=np.float32)
            if acceptance.acceptance_model is not None:
                flat = draw_runs(measured(acceptance.acceptance_model), uniforms, ends - spans, ends, base[first:last])
            elif acceptance.synthetic_acceptance_rates:
                rates = acceptance.synthetic_acceptance_rates[:LONGEST_RUN]
                flat = np.sum([uniforms < np.float32(rate) for rate in rates], axis=0, dtype=np.uint8)
            elif acceptance.acceptance_concentration is None and own is None:
                flat = _runs(uniforms, np.float32(acceptance.acceptance_rate), ends)
            else:
                flat = _runs(uniforms, np.repeat(base[first:last], spans), ends)
            data = flat.tobytes()
            runs += [data[a:b] for a, b in zip((ends - spans).tolist(), (ends - MAX_DRAFT).tolist(), strict=True)]
        return runs

    def _base_rates(self, count: int) -> Uniforms:
        """Each request's rate: one for all, or Beta-distributed with the given mean and concentration.

        For a measured model it is the share of requests that are harder to draft.
        """
        if self._acceptance.acceptance_model is not None:
            return self._rates.random(count, dtype=np.float32)
        mean, concentration = self._acceptance.acceptance_rate, self._acceptance.acceptance_concentration
        # A Beta distribution needs positive shapes; with mean 0 or 1 every sample is the mean.
        if concentration is None or min(mean * concentration, (1 - mean) * concentration) <= 0:
            return np.full(count, mean, dtype=np.float32)
        return self._rates.beta(mean * concentration, (1 - mean) * concentration, size=count).astype(np.float32)


def read_trace(path: str) -> list[list[int]]:
    """Recorded rounds: one JSON list of accepted counts per line; the largest is the recorded draft length.

    Or vLLM responses, one per line, of a server with --per-request-spec-decode-metrics detailed.
    """
    accepted = f"one JSON list of accepted counts from 0 to {LONGEST_RUN} on each line, e.g. [4, 0, 2]"
    lines = []
    for number, counts in json_lines(path, accepted):
        if isinstance(counts, dict):
            for key in ("metrics", "speculative_decoding", "per_step_accepted"):
                counts = counts.get(key) if isinstance(counts, dict) else None
        if type(counts) is not list or not counts:
            raise bad(path, f"line {number}", "holds no list of counts", accepted)
        for at, count in enumerate(counts):
            if type(count) is not int or not 0 <= count <= LONGEST_RUN:
                raise bad(path, f"line {number}", f"item {at} is {quoted(count)}", accepted)
        lines.append(counts)
    if not lines:
        raise bad(path, "", "holds no round", accepted)
    return lines


def replay(lines: list[list[int]], k: int, output_tokens: NDArray[np.int64]) -> list[bytes]:
    """Runs such that rounds of draft length `k` from FIRST_ROUND on accept a line's counts in order.

    Request i uses line i; lines and the counts of a line repeat when they run out. A count below `k` is that many
    accepted positions and a rejected one. A count of `k` is k accepted positions and the bonus token's, which counts as
    accepted, so that longer drafts than the recorded ones continue through it.
    """
    cycles = [_cycle(counts, k) for counts in lines]
    runs = []
    for i, tokens in enumerate(output_tokens.tolist()):
        cycle = cycles[i % len(cycles)]
        drafted = max(0, tokens - FIRST_ROUND)
        runs.append(bytes(min(tokens, FIRST_ROUND)) + (cycle * (drafted // len(cycle) + 1))[:drafted])
    return runs


def _cycle(counts: list[int], k: int) -> bytes:
    """The runs of one line's repeated counts, over one period."""
    coins = [c for count in counts for c in ([1] * count + [0] if count < k else [1] * (k + 1))]
    if all(coins):
        return bytes([LONGEST_RUN]) * len(coins)
    runs = []
    run = coins.index(0)  # accepted positions at the start of the next period
    for coin in reversed(coins):
        run = run + 1 if coin else 0
        runs.append(min(run, LONGEST_RUN))
    return bytes(reversed(runs))


class MeasuredModel(NamedTuple):
    """Cumulative shares, flat: row i starts at i, so that one search serves all rows."""

    classes: int
    starts: Floats  # rows by class and by whether the last run was empty
    inside: Floats  # rows by class and rest of the run
    tokens_per_round: tuple[float, ...]  # of the recording, for draft lengths 1, 2, …
    drafted: Counts  # drafts by accepted tokens and length, where lengths differ; else empty


@lru_cache(maxsize=16)
def measured(name: str) -> MeasuredModel:
    """The included model of a name, e.g. sharegpt-eagle3."""
    text = (files("pdvsim.sim.workload") / "data" / "acceptance.json").read_text(encoding="utf-8")
    model = json.loads(text)["models"][name]
    starts, inside = (_cumulative([row for one in model[part] for row in one]) for part in ("starts", "inside"))
    drafted = _table(model.get("drafted", []))
    return MeasuredModel(len(model["starts"]), starts, inside, tuple(model["tokens_per_round"]), drafted)


def _table(rows: list[list[int]]) -> Counts:
    """Rows of unlike lengths, filled up with zeros."""
    return np.array([*zip_longest(*rows, fillvalue=0)], dtype=np.int64).T


def _cumulative(rows: list[list[int]]) -> Floats:
    table = _table([*rows, [0] * (LONGEST + 1)])[:-1]
    ends = np.cumsum(table, axis=1) / table.sum(axis=1, keepdims=True)
    flat: Floats = (ends + np.arange(len(rows))[:, None]).ravel()
    return flat


def _run_lengths(cumulative: Floats, row: NDArray[np.int64], uniforms: Uniforms) -> NDArray[np.int64]:
    """The run length of each uniform number in its row."""
    at = np.searchsorted(cumulative, uniforms + row, side="right")
    run: NDArray[np.int64] = np.minimum(at - row * (LONGEST + 1), LONGEST)
    return run


def draw_runs(
    model: MeasuredModel, uniforms: Uniforms, starts: NDArray[np.int64], ends: NDArray[np.int64], shares: Uniforms
) -> NDArray[np.uint8]:
    """The number of consecutive accepted drafts from each position on; requests are concatenated.

    One uniform number per position decides; `shares` in [0, 1) determine the class of each request.
    """
    kind = (shares * model.classes).astype(np.int64)
    runs = np.zeros(len(uniforms), dtype=np.int64)
    begins = np.zeros(len(uniforms), dtype=bool)
    at, before, request = starts.copy(), np.zeros_like(starts), np.arange(len(starts))
    while len(at):  # one run of every request per step
        run = _run_lengths(model.starts, 2 * kind[request] + (before > 0), uniforms[at])
        runs[at] = run
        begins[at] = True
        at, before = at + run + 1, run
        going = at < ends[request]
        if not going.all():
            at, before, request = at[going], before[going], request[going]
    inner = np.flatnonzero(~begins)
    start = np.maximum.accumulate(np.where(begins, np.arange(len(runs)), 0))[inner]
    left = start + runs[start] - inner
    decides = inner
    if len(model.drafted):  # a draft that reaches beyond its run does so where the next run is long
        decides = np.minimum(start + runs[start] + 1, np.repeat(ends, ends - starts)[inner] - 1)
    runs[inner] = _run_lengths(model.inside, LONGEST * np.repeat(kind, ends - starts)[inner] + left, uniforms[decides])
    return runs.astype(np.uint8)
