"""Prompts of data-parallel ranks that begin together, as in TensorRT-LLM with `attention_dp_config: enable_balance`.

A prompt on one rank makes the step of all ranks long. So a rank that decodes holds its prompts back until every rank
has one, and then for some further steps in which more may arrive (`batching_wait_iters`). After so many steps in which
some rank had none (`timeout_iters`) whoever has prompts begins. Ranks agree on it before every step.

Not modelled: a rank whose last request ended in the step before does not wait, where in TensorRT-LLM none would.
"""

from __future__ import annotations

from typing import Protocol

from pdvsim.sim.machine.batch import Batch


class Rank(Protocol):
    """What is asked of a rank."""

    running: Batch

    def has_prompt(self) -> bool:
        """Whether it could prefill now."""


class PromptGate:
    """Tells all ranks of a server alike whether prompts may begin in the next step."""

    def __init__(self, timeout_steps: int, gathering_steps: int) -> None:
        self.ranks: list[Rank] = []
        self._timeout_steps = timeout_steps
        self._gathering_steps = gathering_steps
        self._waited = self._gathered = 0
        self._open: bool | None = None  # None: not decided for the next step

    def opens(self) -> bool:
        """Whether prompts may begin in the next step."""
        if self._open is None:
            self._open = self._decide()
        return self._open

    def step_begins(self) -> None:
        """From now on it is asked about the step after this one."""
        self._open = None

    def _decide(self) -> bool:
        decoding = all(rank.running for rank in self.ranks)
        if all(rank.has_prompt() for rank in self.ranks):
            self._waited = 0
            if decoding and self._gathered < self._gathering_steps:
                self._gathered += 1
                return False
            self._gathered = 0
            return True
        self._waited += 1
        if self._waited >= self._timeout_steps or not decoding:
            self._waited = 0
            return True
        return False
