"""A benchmark of a server: the load that it had, to be simulated, and what was measured of it.

Read are results of `vllm bench serve` and `sglang.bench_serving`.

With --save-detailed the lengths, and from vLLM's start_times on the arrivals, are those of the benchmark. Without, all
requests have the mean lengths, and arrivals are drawn. What the result says of drafts is taken from it: their length,
and how often they were accepted at each position.

Not modelled: the client, the network and tokenisation, which are in what was measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.bench.join import Joined
from pdvsim.bench.stats import resampled, resamples
from pdvsim.calibration.validate.served import MOST_MS
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Scoring, Server, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.limits import MAX_REQUESTS
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.reading import quoted
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.acceptance import Streams
from pdvsim.sim.workload.datasets import Lengths
from pdvsim.sim.workload.own import bench_document, read_own
from pdvsim.sim.workload.requests import Workload

METRIC = re.compile(
    r"(request|output|total_token)_throughput|"
    r"(?P<mark>mean|median|p(?P<percentile>\d+(\.\d+)?))_(?P<family>ttft|tpot|itl|e2el)_ms"
)
Floats = NDArray[np.float64]
INTERVAL = (0.025, 0.975)
LEAST_BEYOND = 5  # values above a percentile, for its interval
MODEL_NAMES = ("model_id", "model")  # of vLLM and SGLang
MOST_OVER = 1.1  # that the parts of a result may be over the whole: a last chunk, an end seen late


@dataclass(frozen=True)
class TokenTimes:
    """When the tokens of each request of a benchmark came."""

    first_s: Floats  # after it was sent
    gaps_s: list[Floats]
    sent_s: Floats | None = None  # None: not in the result

    def tokens_s(self, sent_s: Floats) -> list[Floats]:
        """The times of all tokens of each request, by the clock of when they were sent."""
        starts = zip(sent_s, self.first_s, self.gaps_s, strict=True)
        return [sent + np.cumsum([first, *gaps]) for sent, first, gaps in starts]

    def samples(self, outputs: NDArray[np.int64]) -> dict[str, tuple[Floats, NDArray[np.int64]]]:
        """Milliseconds of each family of metrics, and the request of each; TPOT of outputs of several tokens."""
        requests, sizes = np.arange(len(outputs)), [len(gaps) for gaps in self.gaps_s]
        decode_s = np.array([gaps.sum() for gaps in self.gaps_s])
        several = outputs > 1
        timed = {
            "ttft": (self.first_s, requests),
            "tpot": (decode_s[several] / (outputs[several] - 1), requests[several]),
            "itl": (np.concatenate([*self.gaps_s, np.zeros(0)]), np.repeat(requests, sizes)),
            "e2el": (self.first_s + decode_s, requests),
        }
        return {family: (1e3 * seconds, of) for family, (seconds, of) in timed.items()}


@dataclass(frozen=True)
class BenchedLoad:
    """The requests of a benchmark, the drafts of its server, and what was measured."""

    traffic: Traffic  # how they were sent; its lengths are the means
    lengths: Lengths
    arrival_s: Floats
    k: int  # draft length; 0: none
    accepted: tuple[float, ...]  # share of drafts at each position; none where the result does not say
    measured: dict[str, float]
    notes: tuple[str, ...]  # how the load was taken from the result
    model: str | None = None  # that was served, as the result names it
    times: TokenTimes | None = None  # None: the result has no details

    def experiment(
        self, arch: Arch, acceptance: Acceptance, server: Server, hardware: Hardware, k: int | None
    ) -> Experiment:
        """The same load on a simulated server; draft length and acceptance are the benchmark's where not given."""
        k = self.k if k is None else k
        if k and acceptance == Acceptance():
            if not self.accepted:
                raise ValueError("the result does not say how often drafts were accepted: give --acceptance-rate")
            acceptance = Acceptance(synthetic_acceptance_rates=self.accepted[:k])
        names = (METRIC.fullmatch(name) for name in self.measured)
        percentiles = {float(name["percentile"]) for name in names if name and name["percentile"]}
        return applicable(
            Experiment(
                arch,
                self.traffic,
                acceptance,
                replace(server, num_speculative_tokens=k),
                hardware.serving([arch]),
                scoring=Scoring(metric_percentiles=tuple(sorted(percentiles))),
            )
        )

    def requests(self, acceptance: Acceptance) -> list[Request]:
        """The requests as they were sent."""
        coins, rates = (np.random.default_rng(seed) for seed in np.random.SeedSequence(self.traffic.seed).spawn(2))
        runs = Streams(acceptance, coins, rates).draw(self.lengths[:, 1])
        rows = zip(self.arrival_s.tolist(), *self.lengths.T.tolist(), runs, strict=True)
        return [Request(number, *row) for number, row in enumerate(rows)]

    def predicted(self, experiment: Experiment) -> Joined[BenchedLoad]:
        """The benchmark with its load simulated."""
        return self.joined(summarise(simulate(experiment, requests=self.requests(experiment.acceptance))))

    def joined(self, predicted: Mapping[str, Any]) -> Joined[BenchedLoad]:
        """The benchmark with what is predicted of it."""
        return Joined(self, self.measured, {name: predicted[name] for name in self.measured if name in predicted})


def check_drafter(pair: str, server: Server) -> None:
    """Refuse a target alone for a benchmark with drafts: another drafter costs and gains something else."""
    if ":" not in pair and server.drafter == Server.drafter:
        raise ValueError(
            f"the benchmark has drafts: name what drafted for {pair}, with --pair draft:target or --drafter eagle3"
        )


def read_load(path: str) -> BenchedLoad:
    """The load of a result; a ValueError of one line where it is none."""
    document = bench_document(path)
    measured = _metrics(path, document)
    if "output_throughput" not in measured:
        raise ValueError(f"{path}: no result of `vllm bench serve`: it has no output_throughput")
    rate, limit = math.inf, document.get("max_concurrency")
    if document.get("request_rate") not in ("inf", math.inf, None):  # the last but one as SGLang writes it
        rate = _number(path, document, "request_rate", "requests per second, or inf")
    burstiness = _number(path, {"burstiness": 1.0} | document, "burstiness", "a number above 0")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"{path}: max_concurrency is {quoted(limit)}; accepted: a whole number from 1 on")
    paced = math.isfinite(rate) or "ramp_up_strategy" in document
    if document.get("input_lens"):
        trace = read_own(path)
        lengths, notes = trace.lengths, list(trace.notes)
        sent_s = trace.arrival_s - trace.arrival_s.min() if trace.timed else None
    else:
        lengths, sent_s, notes = _mean_lengths(path, document), None, ["no --save-detailed: mean lengths for all"]
    prompt, output = (max(1, round(float(mean))) for mean in lengths.mean(axis=0))
    traffic = Traffic(
        "random", num_prompts=len(lengths), request_rate=rate, burstiness=burstiness, max_concurrency=limit,
        input_len=prompt, output_len=output,
    )  # fmt: skip
    if limit is not None and not paced and "queue_times" not in document:
        sent_s = np.zeros(len(lengths))  # a request is sent as another is answered: here, as soon as that is
    if sent_s is None:
        if "ramp_up_strategy" in document:
            raise ValueError(f"{path}: a ramp of the rate without start_times: bench with --save-detailed")
        sent_s = Workload(traffic, Acceptance()).arrival_s
        notes += ["no start_times: arrivals drawn at the same rate"] if paced else []
    k, accepted = drafts_of(path, document)
    model = next((document[name] for name in MODEL_NAMES if isinstance(document.get(name), str)), None)
    times = _token_times(path, document, len(lengths))
    return BenchedLoad(traffic, lengths, sent_s, k, accepted, measured, tuple(notes), model, times)


def _metrics(path: str, document: Mapping[str, Any]) -> dict[str, float]:
    """The metrics above 0; a ValueError where a time is longer than the benchmark or than anyone waits."""
    lasted_s = document["duration"] if _positive(document.get("duration")) else MOST_MS / 1e3
    numbers = {name: value for name, value in document.items() if METRIC.fullmatch(name) and _number_above_0(value)}
    for name, value in numbers.items():
        if name.endswith("_ms") and value > MOST_OVER * 1e3 * lasted_s:
            raise ValueError(f"{path}: {name} is {value:.3g} ms, in a benchmark of {lasted_s:.3g} s")
    return {name: value for name, value in numbers.items() if _positive(value)}


def _token_times(path: str, document: Mapping[str, Any], requests: int) -> TokenTimes | None:
    """Return when the tokens of each request came; None where the result does not say so of every request."""
    itls = document.get("itls")
    if not isinstance(itls, list) or len(itls) != requests:
        return None
    try:
        gaps = [np.array(gaps, dtype=np.float64) for gaps in itls]
        _consistent(path, document, gaps)
        first_s, sent_s = (_column(document.get(name), requests) for name in ("ttfts", "start_times"))
    except (TypeError, OverflowError):
        return None
    if first_s is None or not all(np.isfinite(each).all() for each in gaps):
        return None
    return TokenTimes(first_s, gaps, sent_s)


def _column(values: Any, requests: int) -> Floats | None:
    """A finite number of each request; None where the result has none."""
    column = np.array(values, dtype=np.float64) if isinstance(values, list) and len(values) == requests else None
    return column if column is not None and column.ndim == 1 and np.isfinite(column).all() else None


def _consistent(path: str, document: Mapping[str, Any], gaps: Sequence[Floats]) -> None:
    """Refuse times between tokens that contradict the duration of the benchmark or the lengths of its outputs."""
    if any(gap.ndim != 1 for gap in gaps):
        raise TypeError
    longest_s, duration_s = max((float(gap.sum()) for gap in gaps), default=0.0), document.get("duration")
    if _positive(duration_s) and longest_s > MOST_OVER * float(duration_s or 0):
        raise ValueError(
            f"{path}: itls of one request sum to {longest_s:.3g} s, in a benchmark of {duration_s:.3g} s; "
            "they must be in seconds"
        )
    outputs, steps = document.get("output_lens"), sum(len(gap) + 1 for gap in gaps if gap.size)
    if isinstance(outputs, list) and steps > MOST_OVER * sum(outputs):
        raise ValueError(f"{path}: itls has {steps} tokens, output_lens {sum(outputs)}")


def _number(path: str, document: Mapping[str, Any], name: str, accepted: str) -> float:
    """A number above 0 of a result; `accepted` says so."""
    if not _positive(value := document[name]):
        raise ValueError(f"{path}: {name} is {quoted(value)}; accepted: {accepted}")
    return float(value)


def _mean_lengths(path: str, document: Mapping[str, Any]) -> Lengths:
    """The mean lengths for as many requests as were completed."""
    most = {"completed": MAX_REQUESTS, "total_input_tokens": 10**15, "total_output_tokens": 10**15}
    for name, limit in most.items():
        if type(document.get(name)) is not int or not 1 <= document[name] <= limit:
            raise ValueError(f"{path}: {name} is {quoted(document.get(name))}; accepted: a whole number from 1 on")
    completed, *tokens = (document[name] for name in most)
    means = [max(1, round(total / completed)) for total in tokens]
    return np.tile(np.array(means, dtype=np.int64), (completed, 1))


def drafts_of(path: str, document: Mapping[str, Any]) -> tuple[int, tuple[float, ...]]:
    """Draft length, and the share of drafts accepted at each position."""
    rates = document.get("spec_decode_per_position_acceptance_rates") or []
    if not isinstance(rates, list) or not all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in rates):
        raise ValueError(f"{path}: spec_decode_per_position_acceptance_rates must be shares from 0 to 1")
    rounds, drafted = (document.get(f"spec_decode_{name}", 0) for name in ("num_drafts", "draft_tokens"))
    k = round(drafted / rounds) if _positive(drafted) and _positive(rounds) else len(rates)
    return k, tuple(float(rate) for rate in np.minimum.accumulate(rates)) if rates else ()


def _positive(value: Any) -> bool:
    return _number_above_0(value) and 1e-9 <= value <= 1e15


def _number_above_0(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


# two results ---------------------------------------------------------------------------------------------------------


def intervals(first: BenchedLoad, second: BenchedLoad) -> dict[str, tuple[float, float]]:
    """95% intervals of the second's metrics over the first's, less one, where both have times of each request.

    Requests are resampled, the same ones of both where both sent the same lengths. Throughputs have no interval: they
    are one figure of a whole run. Nor has a percentile with few values above it.
    """
    if first.times is None or second.times is None:
        return {}
    rng, loads = np.random.default_rng(0), (first, second)
    counts = [resamples(rng, len(load.lengths)) for load in loads]
    if np.array_equal(first.lengths, second.lengths):
        counts[1] = counts[0]
    samples = [load.times.samples(load.lengths[:, 1]) for load in loads if load.times is not None]
    found = {}
    for name in first.measured.keys() & second.measured.keys():
        metric = METRIC.fullmatch(name)
        if metric is None or metric["mark"] is None:
            continue
        share = 0.5 if metric["mark"] == "median" else float(metric["percentile"] or "nan") / 100
        fewest = min(len(of[metric["family"]][0]) for of in samples)
        if fewest * (1 - share) < LEAST_BEYOND or not fewest:  # a mean has no share
            continue
        before, after = (
            resampled(*of[metric["family"]], each, share) for of, each in zip(samples, counts, strict=True)
        )
        low, high = np.nanquantile(after / before - 1, INTERVAL)
        found[name] = (float(low), float(high))
    return found
