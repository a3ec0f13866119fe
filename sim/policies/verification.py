"""Adaptive verification: of drafts of k tokens, each step verifies the most promising ones of the whole batch.

As in vLLM (`enable_adaptive_verification`; pull requests 47808 and 52228): a slot is a (request, position) of the
drafts. Its score is the chance that it is accepted, the product of its request's acceptance estimates up to it. Slots
are admitted in order of score until a budget, the one with the most expected tokens per second by a table of step
costs. A request's scores fall along its draft, so what is admitted of it is a prefix.

The table is vLLM's: a step of T tokens costs what T tokens of min(T, max_num_seqs) requests cost, each with a context
of 8,192 tokens (`VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN`). So below `max_num_seqs` tokens a further draft token
is charged as a further request, with its context; beyond that, as one without any.

Not modelled: vLLM's estimates from the draft's logits or a confidence head. Here a request's estimate comes from its
verdicts; `confidence_noise` adds a signal of each token, for studies. Nor that vLLM's budget is from the step before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import Chunk, Request
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.policies.controllers import AcceptanceEstimate, Controller
from pdvsim.sim.policies.options import Server
from pdvsim.sim.policies.planner import StepCosts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def best_budget(scores: Floats, sure: int, costs_s: Floats) -> int:
    """Return how many slots to verify, of scores in falling order, with `sure` tokens besides: most tokens per second.

    `costs_s[b]` is the cost of a step that verifies b slots.
    """
    tokens = sure + np.concatenate(([0.0], np.cumsum(scores)))
    return int(np.argmax(tokens / costs_s))


def widths(scores: Floats, budget: int) -> Ints:
    """Slots of each row among the `budget` best; `scores` is (rows, k) and does not rise along a row."""
    rows, k = scores.shape
    best = np.argsort(-scores, axis=None, kind="stable")[:budget]  # of equal scores the earlier positions first
    return np.bincount(best // k, minlength=rows)


class AdaptiveVerification(Controller):
    """Always drafts k tokens, and verifies as many as pay."""

    learns = True
    sums_suffice = False  # needs each row's verdict
    selects = True
    PRIOR_VERDICTS = 4.0  # that the mean of all requests is worth, as a prior of each
    BLIND_STEPS = 64  # without a verdict on any draft, after which every row has one verified: slots teach if verified

    def __init__(self, settings: Server, costs: StepCosts) -> None:
        super().__init__(settings)
        self.costs = costs
        self.noise = settings.confidence_noise
        self._signals = np.random.default_rng(0)
        self._mean = AcceptanceEstimate()
        self._verdicts: dict[int, tuple[int, int]] = {}  # of each request: accepted, and judged
        self._blind_steps = 0

    @property
    def acceptance(self) -> float:
        return self._mean.rate

    def observe(self, rows: Batch, verdict: Sequence[int], now_s: float) -> None:
        accepted = refused = 0
        for row, passed in zip(rows, verdict, strict=True):
            if k := row.state.k:
                before, judged = self._verdicts.get(row.id, (0, 0))
                self._verdicts[row.id] = before + passed, judged + passed + (passed < k)
                accepted += passed
                refused += passed < k
        if accepted + refused:
            self._mean.observe(accepted, refused)

    def finished(self, rows: Sequence[Request]) -> None:
        for row in rows:
            self._verdicts.pop(row.id, None)

    def select(self, rows: Batch, chunks: Sequence[Chunk]) -> None:
        """Set how many of each row's drafts the next verify takes; its forward carries `chunks` too."""
        drafted = np.array([row.state.k for row in rows])
        scores = np.cumprod(self.estimates(rows, int(drafted.max())), axis=1, dtype=np.float64)
        scores[np.arange(scores.shape[1]) >= drafted[:, None]] = -1.0
        ordered = -np.sort(-scores[scores >= 0])
        prompt_tokens = sum([chunk.tokens for chunk in chunks])
        first_tokens = sum([chunk.start + chunk.tokens >= chunk.request.to_read for chunk in chunks])
        costs_s = self.costs.seconds(len(rows), rows.context, len(rows) + prompt_tokens, len(ordered))
        taken = widths(scores, best_budget(ordered, len(rows) + first_tokens, costs_s))
        self._blind_steps = 0 if taken.any() else self._blind_steps + 1
        if self._blind_steps > self.BLIND_STEPS:
            taken, self._blind_steps = np.minimum(drafted, 1), 0
        for row, k, width in zip(rows, drafted.tolist(), taken.tolist(), strict=True):
            row.state.k, row.state.left_out = width, k - width

    def estimates(self, rows: Batch, k: int) -> Floats:
        """The chance of each draft token to be accepted if those before it are, (rows, k).

        Mean of a Beta posterior of the request's verdicts; with a signal, given that as well.
        """
        prior = self.PRIOR_VERDICTS
        verdicts = [self._verdicts.get(row.id, (0, 0)) for row in rows]
        rates = np.array([(prior * self._mean.rate + accepted) / (prior + judged) for accepted, judged in verdicts])
        chances = np.repeat(rates[:, None], k, axis=1)
        if self.noise is None:
            return chances
        runs = np.array([row.accept_runs[row.state.emitted] for row in rows])[:, None]
        place = np.arange(k)
        if not self.noise:
            return np.where(place < runs, 1.0, 0.0)
        signals = (place < runs) + self._signals.normal(0.0, self.noise, chances.shape)
        odds = chances / np.maximum(1 - chances, 1e-9) * np.exp((signals - 0.5) / self.noise**2)
        return np.where(place <= runs, odds / (1 + odds), chances)  # of what follows a refused token nothing is known
