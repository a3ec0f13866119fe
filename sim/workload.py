"""Requests from traffic and acceptance: who asks what, when, and which drafts would be accepted.

Arrivals, lengths, coins and acceptance rates each have a generator of their own from the seed: another request rate
leaves lengths and coins as they were, and more requests leave the first ones as they were.

Not modelled here: users who wait for an answer before they ask again (`max_concurrency` closes the loop at the
server's door), ramps of the rate, and correlation between arrivals and lengths other than by replaying a trace.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim import datasets
from pdvsim.sim.acceptance import draw_streams
from pdvsim.sim.config import Acceptance, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.datasets import Lengths, Trace

READERS = {"azure": datasets.read_azure, "burstgpt": datasets.read_burstgpt, "mooncake": datasets.read_mooncake}
MAX_REQUESTS = 10_000_000
MAX_OUTPUT_TOKENS = 1 << 32  # over all requests: each holds a byte of memory


def make_requests(traffic: Traffic, acceptance: Acceptance) -> list[Request]:
    """The requests in order of arrival, numbered from 0; the same for the same traffic, acceptance and seed."""
    _check_size(traffic)
    streams = [np.random.default_rng(s) for s in np.random.SeedSequence(traffic.seed).spawn(4)]
    arrivals, lengths, coins, rates = streams
    trace = READERS[traffic.dataset_name](traffic.dataset_path or "") if traffic.dataset_name in READERS else None
    if trace is not None and traffic.use_trace_timestamps:
        arrival_s, tokens = _replayed(traffic, trace)
    else:
        arrival_s, tokens = _arrivals(traffic, arrivals), _lengths(traffic, trace, lengths)
    tokens = _overridden(traffic, tokens)
    runs, kept = draw_streams(acceptance, tokens[:, 1], coins, rates)
    rows = zip(arrival_s.tolist(), tokens[:, 0].tolist(), tokens[:, 1].tolist(), runs, kept, strict=True)
    return [Request(i, *row) for i, row in enumerate(rows)]


def _arrivals(traffic: Traffic, rng: np.random.Generator) -> NDArray[np.float64]:
    """Arrival times with Gamma gaps of shape `burstiness` and mean 1/rate, as in `vllm bench serve`; 0 at rate inf.

    As there, the first request comes one gap after the start. vLLM then stretches all times so that the last falls on
    num_prompts/rate; that would make early arrivals depend on how many follow, and is left out.
    """
    if math.isinf(traffic.request_rate):
        return np.zeros(traffic.num_prompts)
    gaps = rng.standard_gamma(traffic.burstiness, size=traffic.num_prompts)
    with np.errstate(all="ignore"):
        arrival_s: NDArray[np.float64] = np.cumsum(gaps) / np.float64(traffic.request_rate * traffic.burstiness)
    if not np.isfinite(arrival_s).all():
        raise ValueError(f"request-rate {traffic.request_rate} puts arrivals beyond what a float can hold")
    return arrival_s


def _replayed(traffic: Traffic, trace: Trace) -> tuple[NDArray[np.float64], Lengths]:
    """The trace's first `num_prompts` requests by time, the first of them at 0."""
    rows = len(trace.arrival_s)
    if traffic.num_prompts > rows:
        raise ValueError(
            f"num-prompts is {traffic.num_prompts}, but {traffic.dataset_path} holds {rows} requests to replay"
        )
    order = np.argsort(trace.arrival_s, kind="stable")[: traffic.num_prompts]
    arrival_s = trace.arrival_s[order]
    return arrival_s - arrival_s[0], trace.lengths[order]


def _lengths(traffic: Traffic, trace: Trace | None, rng: np.random.Generator) -> Lengths:
    """Prompt and output tokens: drawn, or a file's rows shuffled and, as in vLLM, drawn again where it has too few."""
    count = traffic.num_prompts
    if traffic.dataset_name == "random":
        return _uniform(traffic, rng)
    if trace is not None:
        rows = trace.lengths[rng.permutation(len(trace.lengths))[:count]]
    elif traffic.dataset_path is None:
        return datasets.sample_sharegpt(count, rng)
    elif traffic.tokenizer is None:
        raise ValueError("dataset sharegpt with --dataset-path needs --tokenizer, a local folder, to count tokens")
    else:
        rows = datasets.read_sharegpt(traffic.dataset_path, traffic.tokenizer, count, rng)
    again = rng.integers(len(rows), size=count - len(rows))
    return np.concatenate((rows, rows[again]))


def _uniform(traffic: Traffic, rng: np.random.Generator) -> Lengths:
    """Whole lengths uniform in [floor(len*(1-ratio)), ceil(len*(1+ratio))], at least 1, as vLLM's random data set."""
    mean = np.array([traffic.input_len or 1024, traffic.output_len or 128], dtype=np.float64)
    low = np.maximum(1, np.floor(mean * (1 - traffic.random_range_ratio)))
    high = np.ceil(mean * (1 + traffic.random_range_ratio))
    uniform = rng.random((traffic.num_prompts, 2))
    lengths: Lengths = (low + np.floor(uniform * (high - low + 1))).astype(np.int64)
    return lengths


def _overridden(traffic: Traffic, tokens: Lengths) -> Lengths:
    """Lengths with --input-len and --output-len in place of the data set's own."""
    if traffic.dataset_name != "random":
        for column, value in enumerate((traffic.input_len, traffic.output_len)):
            if value is not None:
                tokens[:, column] = value
    total = int(tokens[:, 1].sum())
    if total > MAX_OUTPUT_TOKENS:
        raise ValueError(f"{total} output tokens in all are too many to hold; at most {MAX_OUTPUT_TOKENS} are accepted")
    return tokens


def _check_size(traffic: Traffic) -> None:
    """Refuses numbers that no memory holds, before anything is drawn."""
    for name, value, most in (
        ("num-prompts", traffic.num_prompts, MAX_REQUESTS),
        ("input-len", traffic.input_len, datasets.MAX_TOKENS),
        ("output-len", traffic.output_len, datasets.MAX_TOKENS),
    ):
        if value is not None and value > most:
            raise ValueError(f"{name} must be at most {most}, got {value}")
