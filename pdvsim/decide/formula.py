"""Draft lengths by formula, from the planner's latency model and the means of the traffic, without simulation.

A round of draft length k for n rows takes T(n, k) and yields g(k) tokens per row. In a closed loop n is the
concurrency; at a request rate n follows from Little's law. A new request waits half a round on average. Prompts take
their share of the GPU. With a separate draft lane, every other new request arrives while the others are verified and is
drafted alone. The formula selects the draft lengths to simulate; `pdvsim draft-table` also uses it between the
simulated batch sizes.

Cached prefixes are not prefilled. Requests beyond the KV cache wait. Not modelled: evictions, other queueing, the
spread of lengths, and slowdown by co-running lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.decide.edge import first_where
from pdvsim.sim.assembly import ServerParts, reuse_of
from pdvsim.sim.config import Acceptance, Experiment, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.machine.kv import held_tokens, states_tokens, windows_of
from pdvsim.sim.machine.prefix import BLOCK, PrefixBlocks
from pdvsim.sim.policies.planner import Planner
from pdvsim.sim.workload.acceptance import mean_round, mean_tokens
from pdvsim.sim.workload.requests import make_requests

SAMPLED_REQUESTS = 256
JOINING_ROUNDS = 0.5  # mean wait of a new request
RATES = tuple(i / 50 for i in range(51))  # acceptance rates tested


class Predicted(NamedTuple):
    """One draft length at the experiment's load."""

    k: int
    rows: float  # decoding concurrently; above the batch limit if it cannot keep up
    seconds_per_token: float  # of one request
    tokens_per_s: float
    keeps_up: bool

    @property
    def row_s(self) -> float:
        """Time per token of a row that decodes, without the wait for a place in the batch."""
        return self.rows / self.tokens_per_s

    @property
    def cost_s(self) -> float:
        """What is compared: the time per token of a request, or of the server if it cannot keep up."""
        return self.seconds_per_token if self.keeps_up else 1 / self.tokens_per_s


@dataclass(frozen=True)
class Formula:
    """The rounds of one experiment by formula."""

    experiment: Experiment

    @cached_property
    def planner(self) -> Planner:
        """Latencies of both models, for any draft length."""
        server = replace(self.experiment.server, controller="fixed", num_speculative_tokens=1)
        drafting = replace(self.experiment, server=server)
        return ServerParts(drafting).planner

    @cached_property
    def requests(self) -> list[Request]:
        """A sample of the traffic, without arrival times."""
        traffic = self.experiment.traffic
        few = min(SAMPLED_REQUESTS, traffic.num_prompts)
        return _sample(replace(traffic, num_prompts=few), self.experiment.acceptance)

    @cached_property
    def output_tokens(self) -> float:
        return float(np.mean([request.output_tokens for request in self.requests]))

    @cached_property
    def context(self) -> float:
        """Mean cached tokens per row while it decodes."""
        lengths = [(r.output_tokens, r.prompt_tokens + r.output_tokens / 2) for r in self.requests]
        return sum(n * at for n, at in lengths) / sum(n for n, _ in lengths)

    @cached_property
    def _runs(self) -> NDArray[np.uint8]:
        """Consecutive draft tokens that would be accepted, at every position of every output."""
        return np.concatenate([np.frombuffer(r.accept_runs, np.uint8) for r in self.requests])

    def tokens_per_round(self, k: int) -> float:
        """Mean tokens per row from a round of draft length k, expected or measured."""
        given = self.experiment.acceptance
        if given.acceptance_model is not None:
            return _measured(tuple(r.accept_runs for r in self.requests), k)[0]
        if given.acceptance_trace is not None:
            return 1.0 + float(np.minimum(self._runs, k).mean())
        return mean_tokens(given, k)

    def rounds(self, k: int) -> float:
        """Mean rounds of an output. The first token comes from the prefill; the last round may have a surplus."""
        if self.experiment.acceptance.acceptance_model is not None:
            return max(1.0, _measured(tuple(r.accept_runs for r in self.requests), k)[1])
        gains = 1.0 + np.minimum(self._runs, k)
        lost = (float((gains**2).mean() / gains.mean()) - 1) / 2  # renewal theory: mean overshoot of a long output
        return max(1.0, (self.output_tokens - 1 + lost) / self.tokens_per_round(k))

    @cached_property
    def acceptance(self) -> float:
        """Chance that a first draft is accepted."""
        return self.tokens_per_round(1) - 1.0

    def round_s(self, rows: int, k: int) -> float:
        """Duration of a round of `rows`, with the drafter's catch-up and hand-overs."""
        return self.planner.full_round_s(rows, int(rows * self.context), k, self.acceptance)

    @cached_property
    def prompt(self) -> tuple[int, int]:
        """A prompt of mean length: tokens of it that are cached, and tokens to prefill."""
        tokens = int(np.mean([request.prompt_tokens for request in self.requests]))
        cached = min(int(self.cached_tokens), tokens - 1)
        return cached, tokens - cached

    @cached_property
    def cached_tokens(self) -> float:
        """Mean prompt tokens that the prefix cache has, if nothing is evicted."""
        reuse, seen = reuse_of(self.experiment, self.experiment.pair.target), PrefixBlocks()
        if reuse is None or not self.experiment.traffic.shares:
            return 0.0
        sent = ((r.chain, r.prompt_tokens, r.output_tokens - 1 if reuse.answers else 0) for r in self.requests)
        cached = (seen.sent(chain, prompt, prompt + more) for chain, prompt, more in sent)
        return float(np.mean([reuse.usable_tokens(tokens // BLOCK) for tokens in cached]))

    def prompt_s(self, k: int) -> float:
        """Prefill of one prompt, by both models if anything is drafted."""
        models, prompts = self.planner.models, [self.prompt]
        target_s = models["target"].price(0, prompts=prompts, first_tokens=1).seconds_0
        return target_s + models["draft"].price(0, prompts=prompts).seconds_0 if k else target_s

    @cached_property
    def prefill(self) -> Formula | None:
        """The engines that prefill, where the server is disaggregated."""
        return None if self.experiment.sides is None else Formula(self.experiment.sides.prefill)

    def prefill_busy(self, k: int, rate: float) -> float:
        """Share of their time in which the engines that prefill are busy at a request rate; 0 where there are none."""
        if self.prefill is None:
            return 0.0
        hardware = self.experiment.hardware
        ranks = hardware.prefill_data_parallel_size or hardware.data_parallel_size
        engines = hardware.replicas * hardware.groups()[0] * ranks
        return rate / engines * self.prefill.prompt_s(k if self.prefill.experiment.speculates else 0)

    def answer_s(self, k: int) -> float:
        """Time of a mean answer of a disaggregated server, with the wait for its prefill as of M/D/1."""
        predicted, rate = self.at(k), self.experiment.traffic.request_rate
        if self.prefill is None or rate == float("inf"):
            return predicted.seconds_per_token * self.output_tokens
        busy = min(self.prefill_busy(k, rate), 0.999)
        prompt_s = self.prefill.prompt_s(k if self.prefill.experiment.speculates else 0)
        return prompt_s * (1 + busy / (1 - busy) / 2) + predicted.seconds_per_token * self.output_tokens

    def newcomer_s(self, k: int) -> float:
        """GPU time of a new request in addition to its rounds: its prefill and, if so, its own draft."""
        if self.prefill is not None:
            recomputed = k and not self.prefill.experiment.speculates and "draft" in self.planner.models
            return self.planner.models["draft"].price(0, prompts=[self.prompt]).seconds_0 if recomputed else 0.0
        if not (self.planner.lanes and k):
            return self.prompt_s(k)
        return self.prompt_s(k) + self.planner.models["draft"].price(1, 1, k, self.context).seconds(self.context) / 2

    def fits(self, k: int) -> int:
        """Approximate rows that fit in a server's KV cache; without drafts the drafter uses none of it."""
        models = (self.experiment.pair.target, *([self.experiment.pair.draft] if k else []))
        held = held_tokens(self.context, windows_of(models)) + states_tokens(models, 1 + k)
        return max(1, int(self._capacities[k > 0] / held))

    @cached_property
    def _capacities(self) -> tuple[int, int]:
        """KV cache capacity in tokens, without and with a drafter."""
        servers = (replace(self.experiment.server, controller="fixed", num_speculative_tokens=k) for k in (0, 1))
        placed = [replace(self.experiment, server=server) for server in servers]
        plain, drafting = (ServerParts(one).kv_capacity for one in placed)
        return plain, drafting

    def loops(self, k: int, concurrency: Iterable[int]) -> list[tuple[int, float]]:
        """For each closed loop on one server: rows decoding, and tokens per second."""
        most = min(self.experiment.server.max_num_seqs, self.fits(k))
        rounds, joining_s = self.rounds(k) + JOINING_ROUNDS, self.newcomer_s(k)
        batches = [max(1, min(clients, most)) for clients in concurrency]
        whole_s = [rounds * self.round_s(rows, k) + rows * joining_s for rows in batches]
        return [(rows, rows * self.output_tokens / s) for rows, s in zip(batches, whole_s, strict=True)]

    def at(self, k: int) -> Predicted:
        """Prediction for one draft length at the experiment's load."""
        traffic, most = self.experiment.traffic, min(self.experiment.server.max_num_seqs, self.fits(k))
        servers = self.experiment.batches
        if traffic.request_rate == float("inf") or traffic.max_concurrency is not None:
            concurrency = -(-(traffic.max_concurrency or traffic.num_prompts) // servers)
            [(rows, speed)] = self.loops(k, [concurrency])
            if busy := self.prefill_busy(k, servers * speed / self.output_tokens):
                speed /= max(1.0, busy)
            return Predicted(k, rows, concurrency / speed, servers * speed, True)  # rows that do not fit wait
        rounds, joining_s = self.rounds(k) + JOINING_ROUNDS, self.newcomer_s(k)
        rate = traffic.request_rate / servers
        gpu_share_left = 1 - rate * joining_s
        rows, need = 1, float("inf")
        while gpu_share_left > 0 and rows <= most:
            need = rate * rounds * self.round_s(rows, k) / gpu_share_left
            if need <= rows:
                break
            rows = max(rows + 1, min(int(need) + 1, rows + max(1, rows // 8)))
        keeps_up = gpu_share_left > 0 and need <= min(rows, most) and self.prefill_busy(k, traffic.request_rate) < 1
        rows = min(rows, most)
        pace_s = self.round_s(rows, k) * rounds / self.output_tokens / max(gpu_share_left, 1e-3)
        return Predicted(k, need if keeps_up else rows, pace_s, servers * rows / pace_s, keeps_up)

    def ranked(self, lengths: Iterable[int]) -> list[Predicted]:
        """Draft lengths, most promising first: those that keep up by time per token, the others by throughput."""
        return sorted(map(self.at, lengths), key=lambda p: (not p.keeps_up, p.cost_s))

    def likely(self, lengths: Iterable[int], within: float) -> list[int]:
        """Draft lengths, most promising first, that this error of the formula leaves."""
        best, *others = self.ranked(lengths)
        alike = (p for p in others if p.keeps_up == best.keeps_up and p.cost_s <= (1 + within) * best.cost_s)
        return [best.k, *(p.k for p in alike)]


@lru_cache(maxsize=64)
def _sample(traffic: Traffic, acceptance: Acceptance) -> list[Request]:
    """Requests that all formulas of the same traffic share; none changes them."""
    return make_requests(traffic, acceptance)


@lru_cache(maxsize=256)
def _measured(runs: tuple[bytes, ...], k: int) -> tuple[float, float]:
    return mean_round(runs, k)


def break_even_rate(experiment: Experiment, lengths: Sequence[int]) -> float | None:
    """The lowest acceptance rate, in steps, at which the formula ranks a draft length above none; None: at no rate."""

    def drafts(rate: float) -> bool:
        at = replace(experiment, acceptance=Acceptance(rate))
        return Formula(at).ranked([0, *lengths])[0].k > 0

    return first_where(RATES, drafts)
