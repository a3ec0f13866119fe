"""Prompts of data-parallel ranks that begin together, as in TensorRT-LLM with `attention_dp_config: enable_balance`.

A prompt on one rank makes the step of all ranks long. So a rank that decodes holds its prompts back until every rank
has one, and then for some further steps in which more may arrive (`batching_wait_iters`). After so many steps in which
some rank had none (`timeout_iters`) whoever has prompts begins. Ranks agree on it before every step.

Not modelled: a rank whose last request ends in the step before is not waited for by itself alone, in TensorRT-LLM by
all.
"""

from __future__ import annotations

from typing import Protocol

from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.machine.ranks import RankGroup
from pdvsim.sim.policies.options import Server


class Rank(Protocol):
    """What is asked of a rank."""

    running: Batch

    def has_prompt(self) -> bool:
        """Whether it could prefill now."""


class PromptGate:
    """Says to all ranks of a server alike whether prompts may begin in the next step."""

    def __init__(self, group: RankGroup, settings: Server) -> None:
        self.ranks: list[Rank] = []
        self._group = group
        self._timeout = settings.attention_dp_timeout_iters or 0
        self._gathering = settings.attention_dp_batching_wait_iters
        self._waited = self._gathered = 0  # steps
        self._step = -1  # that was decided last
        self._open = True

    def opens(self) -> bool:
        """Whether prompts may begin in the step after the last one that began."""
        if self._step != self._group.steps:
            self._step = self._group.steps
            self._open = self._decide()
        return self._open

    def _decide(self) -> bool:
        decoding = all(rank.running for rank in self.ranks)
        if all(rank.has_prompt() for rank in self.ranks):
            self._waited = 0
            if decoding and self._gathered < self._gathering:
                self._gathered += 1
                return False
            self._gathered = 0
            return True
        self._waited += 1
        if self._waited >= self._timeout or not decoding:
            self._waited = 0
            return True
        return False
