"""Predicted cost of a batch by the calibrated latency model, for controllers and `adaptive`.

Not accounted for: the power limit. Times are those of a cool GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import Request, Role
from pdvsim.sim.prices.contention import Sharing
from pdvsim.sim.prices.costs import CostModel, Load
from pdvsim.sim.prices.host import HostCost
from pdvsim.sim.prices.links import Fabric, draft_bytes, verdict_bytes
from pdvsim.sim.workload.lookup import Lookup


class RemoteDrafter(NamedTuple):
    """What it costs that drafter and target are on different GPUs: transfers that meet no other."""

    fabric: Fabric
    drafters: int = 1  # GPUs among which the rows of a draft are divided

    def drafts_s(self, rows: int, k: int) -> float:
        """Seconds of drafts on their way to the target."""
        return self.fabric.alone_s(draft_bytes(rows * k))

    def verdicts_s(self, rows: int) -> float:
        """Seconds of verdicts on their way back."""
        return self.fabric.alone_s(verdict_bytes(rows))


class Planner:
    """Predicts solo and overlapped times of a batch, on one GPU or with drafter and target apart."""

    PREFILL_ROUNDS = 1.5  # that a prompt takes on a stream of its own
    MOST_PROMPTS = 6.0  # of a forward, on average: more of them cost no less each

    def __init__(
        self,
        models: dict[Role, CostModel],
        sharing: Sharing,
        peak: tuple[float, float],
        host: HostCost,
        lanes: bool = False,
        remote: RemoteDrafter | None = None,
        lookup: Lookup | None = None,
        packs: bool = True,
        carries: bool = False,
    ) -> None:
        self.models = models
        self.sharing = sharing
        self.peak = peak
        self._host = host
        self.handoff_s = host.handoff_s
        self.remote = remote
        self.looks_up = "draft" in models and models["draft"].spec.on_host
        self.packs = packs  # rows of a verify with drafts of unlike length
        self.lookup = lookup or Lookup()  # how often and how long drafts are that are looked up
        self.carries = carries  # prompts in the forwards of a round
        self._read: dict[tuple[Role, int, int, int, int], float] = {}
        self.lanes = lanes  # drafts and verifies have a lane each, and hand over to each other

    def decode_s(self, rows: int, context: int) -> float:
        """Seconds of one plain token for each row."""
        return self.round_s(rows, context, 0)

    def round_s(self, rows: int, context: int, k: int, rate: float = 1.0) -> float:
        """Draft and verify one after the other; with k=0 one plain token for each row.

        `rate` is the chance that a first draft is accepted, by which a search finds drafts.
        """
        draft = self._draft_s(rows, 1, k, context) if k else 0.0
        verify = self._verify_s(rows, context, k, rate)
        moving = self.remote.drafts_s(rows, k) + self.remote.verdicts_s(rows) if self.remote and k else 0.0
        return draft + verify + moving + self._host_s(rows)

    def lag_s(self, rows: Sequence[Request]) -> float:
        """Return the seconds in which the drafter catches up on what was decoded without it."""
        drafter = self.models["draft"]
        lagging = any(row.state.drafter_lag >= drafter.widest for row in rows)
        return drafter.catch_up_cost(rows).seconds_0 if lagging else 0.0

    def caught_up_s(self, rows: int, context: int, k: int, rate: float) -> float:
        """A round of `rows` with what the drafter must catch up on after the last."""
        return self.round_s(rows, context, k, rate) + (self._catch_up_s(rows, context, k, rate) if k else 0.0)

    def full_round_s(
        self, rows: int, context: int, k: int, rate: float, joining: float = 0.0, prompt_tokens: float = 0.0
    ) -> float:
        """Duration of a round of `rows`, with catch-up, hand-overs between lanes, and requests that join.

        `joining` is their mean number in a round, with prompts of `prompt_tokens`.
        """
        whole = self.caught_up_s(rows, context, k, rate)
        if self.lanes:
            if k and rows > 1 and not self.gathers(rows, context, k):
                whole = 2 * self.overlapped_s(rows // 2, context // 2, k, rate)
            elif k:
                whole += 2 * self.handoff_s + self._host_s(rows) + self._joining_s(rows, context, k, rate, joining)
            else:
                whole += 2 * self.handoff_s
        return whole + self.prefill_s(rows, k, joining, prompt_tokens)

    def prefill_s(self, rows: int, k: int, joining: float, prompt_tokens: float) -> float:
        """Time that the prefills of joining requests add to a round: on the target and, with drafts, on the drafter.

        They arrive independently, and those of one round are prefilled in one forward; on a separate stream, those of
        `PREFILL_ROUNDS`. Lanes share the GPU, so a prompt there is assumed to delay the round by its time alone.
        """
        tokens = round(prompt_tokens)
        if not tokens or not joining:
            return 0.0
        together = min(joining * (1.0 if self.carries else self.PREFILL_ROUNDS), self.MOST_PROMPTS)
        chance, seconds = exp(-together), 0.0
        decoding_rows = rows if self.carries else 0
        for count in range(1, int(together + 4 * sqrt(together)) + 2):
            chance *= together / count
            seconds += chance * self._read_s("target", decoding_rows, k, count, tokens)
            if k:
                seconds += chance * self._read_s("draft", 0, k, count, tokens)
        return seconds * joining / together

    def _read_s(self, role: Role, rows: int, k: int, count: int, tokens: int) -> float:
        """Seconds that prompts of this size take, or add to a forward of `rows`."""
        key = (role, rows, k if rows else 0, count, tokens)
        seconds = self._read.get(key)
        if seconds is None:
            model, first_tokens = self.models[role], count if role == "target" else 0
            without_s = model.price(rows, k + 1).seconds_0 if rows else 0.0
            with_prompts = model.price(rows, k + 1, prompts=[(0, tokens)] * count, first_tokens=first_tokens)
            seconds = with_prompts.seconds_0 - without_s
            self._read[key] = seconds
        return seconds

    def gathers(self, rows: int, context: int, k: int) -> bool:
        """Return whether verifying all rows in one batch is faster than two half batches that overlap with drafts."""
        half = max(1, rows // 2)
        return rows / self.round_s(rows, context, k) > half / self.overlapped_s(half, context // 2, k)

    def _joining_s(self, rows: int, context: int, k: int, rate: float, joining: float) -> float:
        """Return how long a verify that gathers all rows waits for the drafts of newly prefilled requests.

        They join at any time of a round. During the draft of the others their draft follows it. During the verify it
        starts immediately, and the others wait for the rest of it.
        """
        alone_s = self._draft_s(1, 1, k, context // rows) + self._host_s(1) + 2 * self.handoff_s
        draft_s, verify_s = self._draft_s(rows, 1, k, context), self._verify_s(rows, context, k, rate)
        left_s = alone_s - verify_s / 2 if alone_s > verify_s else alone_s**2 / (2 * verify_s)
        waiting_s = (draft_s * alone_s + verify_s * left_s) / (draft_s + verify_s)
        return (1 - exp(-joining)) * waiting_s

    def _catch_up_s(self, rows: int, context: int, k: int, rate: float) -> float:
        """Return the mean time in which the first forward of a draft reads more than each row's newest token.

        A row whose drafts were all accepted has the drafter read the last of them; a head reads all accepted ones.
        """
        heads = self.models["draft"].widest > 2
        drafts_s = [self._draft_s(rows, tokens, k, context) for tokens in range(1, (k if heads else 1) + 2)]
        seconds = 0.0
        for at, (less_s, more_s) in enumerate(pairwise(drafts_s), 1):
            accepted = at if heads else k
            seconds += (more_s - less_s) * (1 - (1 - rate**accepted) ** rows)  # some row has so many tokens accepted
        return seconds

    def overlapped_s(self, rows: int, context: int, k: int, rate: float = 1.0) -> float:
        """Time until the draft of one batch and the concurrent verify of another of the same size are done.

        With k=0 nothing is drafted, and they are verified in turn.
        """
        if not k:
            return self.round_s(rows, context, 0) + 2 * self.handoff_s
        drafter, target = self.models["draft"], self.models["target"]
        if self.looks_up:
            hidden_s = max(self._draft_s(rows, 1, k, context), self._verify_s(rows, context, k, rate))
            return hidden_s + 2 * (self._host_s(rows) + self.handoff_s)
        if self.remote:
            drafted = self.remote.verdicts_s(rows) + self._draft_s(rows, 1, k, context)
            verified = self.remote.drafts_s(rows, k) + target.price(rows, k + 1, 1, context).seconds(context)
            return max(drafted, verified) + 2 * (self._host_s(rows) + self.handoff_s)
        draft = self._demand(2, drafter, rows, 1, k, context)
        verify = self._demand(1, target, rows, k + 1, 1, context)
        self.sharing.solve([draft, verify])
        first, second = sorted((draft, verify), key=lambda d: d.solo_s / d.rate if d.rate > 0 else float("inf"))
        together = first.solo_s / first.rate
        alone = max(0.0, second.solo_s - together * second.rate)
        return together + alone + 2 * (self._host_s(rows) + self.handoff_s)

    def ahead_s(self, rows: int, context: int, k: int, branches: float, hits: float) -> float:
        """Seconds of a round of `rows` of which a share `hits` was drafted ahead, in `branches` each.

        Rows that were not now lag, so that with several rows the target reads its weights for both parts.
        """
        target = self.models["target"]

        def verify(share: float) -> float:
            cached = int(context * share)
            return target.price(max(1, round(rows * share)), k + 1, 1, cached).seconds(cached)

        ahead = self._draft_s(round(rows * branches), 1, k + 1, round(context * branches))
        # on one GPU both draw on the same memory: taken as one after the other
        hidden_s = max(verify(1), ahead) if self.remote else verify(1) + ahead
        path = hidden_s + (1 - hits) * self._draft_s(rows, 1, k, context)
        parts = verify(hits) + verify(1 - hits) if rows > 1 and hits < 1 else verify(1)
        moving = self.remote.drafts_s(rows, k) + self.remote.verdicts_s(rows) if self.remote else 0.0
        return max(path, parts) + moving + 2 * (self._host_s(rows) + self.handoff_s)

    def _host_s(self, rows: int) -> float:
        """The host's part in one launch of `rows`."""
        return self._host.launch_s + self._host.completed_s(rows)

    def forward_s(self, rows: int, tokens: int, context: int, packed: int = 0) -> float:
        """Seconds of a target forward over `rows` of up to this width, `packed` tokens in all."""
        return self.models["target"].price(rows, tokens, 1, context, packed=packed).seconds(context)

    def _verify_s(self, rows: int, context: int, k: int, rate: float) -> float:
        """Seconds of a verify of `rows`; of drafts that are looked up, with those found."""
        target = self.models["target"]
        if not self.looks_up or not k:
            return target.price(rows, k + 1, 1, context).seconds(context)
        drafted, length = self.lookup.share(rate), self.lookup.mean_length(rate, k)
        missed = (1 - drafted) ** rows  # chance that no row has a draft: then it is a plain forward
        plain_s = target.price(rows, 1, 1, context).seconds(context)
        if missed == 1:
            return plain_s
        packed = round(rows * (1 + drafted / (1 - missed) * length)) if self.packs else 0
        wide_s = target.price(rows, k + 1, 1, context, packed=packed).seconds(context)
        return missed * plain_s + (1 - missed) * wide_s

    def _draft_s(self, rows: int, tokens: int, steps: int, context: int) -> float:
        """Steps of the drafter over `rows`, on as many GPUs as it has."""
        gpus = self.remote.drafters if self.remote else 1
        cached = context // gpus
        return self.models["draft"].price(-(-rows // gpus), tokens, steps, cached).seconds(cached)

    def _demand(self, priority: int, model: CostModel, rows: int, tokens: int, steps: int, context: int) -> Load:
        price = model.price(rows, tokens, steps, context).at(context)
        load = Load(priority=priority, solo_s=price.seconds)
        model.demand(load, self.peak, price.bytes, price.flops, rows, tokens, steps)
        return load


class StepCosts:
    """Costs of a step that drafts k tokens per row and verifies some of them, by the number of its tokens.

    As vLLM has them: T tokens of min(T, `most_rows`) requests, each with a context of `context_len` tokens. With
    `context_len` 0: of the requests at hand and their context.
    """

    def __init__(self, planner: Planner, k: int, most_rows: int, context_len: int) -> None:
        self.planner, self.k = planner, k
        self.most_rows, self.context_len = most_rows, context_len
        self._verify_s = np.zeros(0)  # by tokens, at the fixed context
        self._lines: dict[tuple[int, int, int], NDArray[np.float64]] = {}  # at the rows' own: seconds, and per token

    def seconds(self, rows: int, context: int, tokens: int, slots: int) -> NDArray[np.float64]:
        """Return the seconds of a step of `rows` with `tokens` other tokens, by 0 to `slots` verified drafts.

        It never falls: a step that is faster with more tokens is an accident of its kernels.
        """
        planner = self.planner
        if not self.context_len:
            draft_s = planner.round_s(rows, context, self.k) - planner.forward_s(rows, self.k + 1, context)
            verify_s = self._at_hand(rows, tokens, slots) @ np.array([1.0, context])
            return draft_s + np.maximum.accumulate(verify_s)
        if len(self._verify_s) <= tokens + slots:
            known = range(len(self._verify_s), 2 * (tokens + slots) + 1)
            costs_s = [self._profiled_s(count) for count in known]
            self._verify_s = np.maximum.accumulate(np.concatenate((self._verify_s, costs_s)))
        drafter = planner.models["draft"]
        held = rows * self.context_len
        return drafter.price(rows, 1, self.k, held).seconds(held) + self._verify_s[tokens : tokens + slots + 1]

    def _profiled_s(self, tokens: int) -> float:
        """Seconds of a forward of this size as vLLM times it at its start."""
        rows = max(1, min(tokens, self.most_rows))
        return self.planner.forward_s(rows, -(-tokens // rows), rows * self.context_len, packed=tokens)

    def _at_hand(self, rows: int, tokens: int, slots: int) -> NDArray[np.float64]:
        lines = self._lines.get((rows, tokens, slots))
        if lines is None:
            target, width = self.planner.models["target"], self.k + 1
            costs = [target.price(rows, 1, packed=tokens)]
            costs += [target.price(rows, width, packed=tokens + count) for count in range(1, slots + 1)]
            lines = np.array([(cost.seconds_0, cost.seconds_1) for cost in costs])
            if tokens == rows:  # a memory of steps without prompts, which recur
                self._lines[rows, tokens, slots] = lines
        return lines
