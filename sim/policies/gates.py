"""When an engine looks at prompts that have arrived: some look only every few steps, or wait for more of them.

SGLang's scheduler looks for new requests after a prefill, and otherwise after a number of decode steps
(--scheduler-recv-interval). TensorRT-LLM can hold prompts back while they fill less than a share of a forward
(batch_wait_max_tokens_ratio, batch_wait_timeout_iters) or, with data-parallel ranks, until every rank has one
(attention_dp_config: enable_balance). Prompts then share forwards, for a longer TTFT.

Not modelled: the first look of an idle SGLang, which takes a few milliseconds, and waits of TensorRT-LLM's prompts that
are cut, between their parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from pdvsim.sim.core import Request
from pdvsim.sim.machine.ranks import RankGroup
from pdvsim.sim.policies.options import Server


class Queued(Protocol):
    """What a gate sees of a policy."""

    settings: Server
    waiting: deque[Request]
    prefilling: list[Request]
    in_flight: int

    def admits(self) -> bool:
        """Return whether the first that waits may be let in."""


class PromptGate:
    """Whether waiting prompts may be prefilled in the next step."""

    def holds(self, policy: Queued, decoding: int, steps: int) -> bool:
        """Return whether some that wait must wait on; `decoding` requests decode, and `steps` decode steps are over."""
        raise NotImplementedError

    def prefilled(self, steps: int) -> None:
        """Note the end of a forward of prompts alone, after this number of decode steps."""


class EveryFewSteps(PromptGate):
    """New requests are seen after a prefill, and every `interval` decode steps."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._counted_from = 0  # decode steps before the last look
        self._last: Request | None = None  # that was seen; those before it were seen too

    def holds(self, policy: Queued, decoding: int, steps: int) -> bool:
        if not policy.waiting:
            return False
        passed = steps - self._counted_from
        self._counted_from = steps - passed % self.interval
        if not decoding or (passed and self._counted_from == steps):
            self._last = policy.waiting[-1]
            return False
        returned = policy.waiting[0].taken.admitted_s >= 0  # it was preempted
        return not returned and (self._last is None or self._last.taken.admitted_s >= 0)

    def prefilled(self, steps: int) -> None:
        self._counted_from = steps - self.interval


class UntilFull(PromptGate):
    """Prompts wait for up to `most_steps` steps while they and the rows fill less than a share of a forward."""

    def __init__(self, most_steps: int, share: float) -> None:
        self.most_steps, self.share = most_steps, share
        self._waited = 0

    def holds(self, policy: Queued, decoding: int, steps: int) -> bool:
        if not decoding or not policy.waiting:
            return False
        enough = self.share * policy.settings.max_num_batched_tokens
        if self._waited < self.most_steps and decoding + sum(one.to_read for one in policy.waiting) < enough:
            self._waited += 1
            return True
        self._waited = 0
        return False


class AllRanks(PromptGate):
    """One gate for all data-parallel ranks of a server: a prompt on one of them makes the step of all long.

    Prompts wait until every rank has one, and then for `gathering_steps` in which more may arrive. After
    `timeout_steps` in which some rank had none, ranks with prompts begin. No rank waits for one that does not
    decode.
    """

    def __init__(self, group: RankGroup, ranks: Sequence[Queued], timeout_steps: int, gathering_steps: int) -> None:
        self.group, self.ranks = group, ranks
        self.timeout_steps, self.gathering_steps = timeout_steps, gathering_steps
        self._waited = self._gathered = 0
        self._decided_in, self._held = -1, False

    def holds(self, policy: Queued, decoding: int, steps: int) -> bool:
        if self.group.steps != self._decided_in:  # the first to ask decides for all
            self._decided_in, self._held = self.group.steps, self._decided()
        return self._held and decoding > 0

    def _decided(self) -> bool:
        decoding = all(rank.in_flight for rank in self.ranks)
        if all(rank.prefilling or (rank.waiting and rank.admits()) for rank in self.ranks):
            self._waited = 0
            held = decoding and self._gathered < self.gathering_steps
            self._gathered = self._gathered + 1 if held else 0
            return held
        self._waited += 1
        if self._waited < self.timeout_steps and decoding:
            return True
        self._waited = 0
        return False


def gate_of(settings: Server) -> PromptGate | None:
    """The gate of a server without ranks; None: it looks in every step."""
    if settings.receive_interval > 1:
        return EveryFewSteps(settings.receive_interval)
    if settings.prompt_wait_steps and settings.prompt_wait_share:
        return UntilFull(settings.prompt_wait_steps, settings.prompt_wait_share)
    return None
