"""Drawing tokens and judging drafts, entirely on the device: greedy, or Leviathan's rejection rule at a temperature.

The rejection rule (Leviathan et al., 2023): accept draft x with probability min(1, p(x) / q(x)), p the target's and q
the drafter's distribution; at the first rejection draw from max(p - q, 0) normalised; after the last accepted draft
draw from p. The tokens then have exactly the target's distribution, whatever the drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdvsim.realrun.engine.batch import ForwardBatch
from pdvsim.realrun.engine.cache import Sequences
from pdvsim.realrun.engine.model import operations


def offered(batch: ForwardBatch, sequences: Sequences) -> Tensor:
    """The drafts a verify's rows carry: (rows, tokens_per_row - 1)."""
    slots = batch.row_slots.long()[:, None]
    column = torch.arange(batch.tokens_per_row - 1, device=sequences.device)
    return sequences.tokens[slots, sequences.length[slots] + column]


def leading(passed: Tensor) -> Tensor:
    """Return how many of each row's first columns are true before the first false one."""
    return passed.int().cumprod(1).sum(1, dtype=torch.int32)


class Sampler:
    """Greedy at temperature 0; otherwise sampling from softmax(logits / temperature) with its own random stream."""

    def __init__(self, temperature: float, device: torch.device, seed: int = 0) -> None:
        if temperature < 0:
            raise ValueError(f"temperature {temperature} is negative")
        self.temperature = temperature
        self.ops = operations(device)
        self.generator = torch.Generator(device=device).manual_seed(seed)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def draw(self, logits: Tensor) -> Tensor:
        """One token for each row of logits."""
        if self.greedy:
            ids: Tensor = self.ops.argmax(logits)
            return ids
        return self._pick(self._distribution(logits))

    def judge(
        self, batch: ForwardBatch, logits: Tensor, limits: Tensor, pins: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Return how many drafts of each row pass, and the token to append after each possible count.

        `logits` is (rows x tokens_per_row, vocab), or of those that the batch keeps. Only the entry of the count that
        `settle` will use is meaningful.
        """
        rows, width = batch.rows, batch.tokens_per_row
        if self.greedy:
            ids = self.draw(logits)
            choice = (ids if batch.places is None else ids[batch.places]).view(rows, width)
            return leading(choice[:, :-1] == offered(batch, sequences)), choice
        p = self._distribution(logits if batch.places is None else logits[batch.places]).view(rows, width, -1)
        if width == 1:
            return limits.new_zeros(rows), self._pick(p[:, 0])[:, None]
        if sequences.proposals is None:
            raise ValueError("sampled drafts need the drafter's logits, which were not kept")
        drafts = offered(batch, sequences).long()[..., None]
        q = self._distribution(sequences.proposals[batch.row_slots.long(), : width - 1])
        coins = torch.rand(rows, width - 1, device=p.device, generator=self.generator)
        passed = coins * q.gather(2, drafts)[..., 0] < p[:, :-1].gather(2, drafts)[..., 0]
        agreed = leading(passed)
        count = torch.where(pins >= 0, pins, agreed).minimum(limits).clamp(0, width - 1).long()
        index = count[:, None, None].expand(-1, 1, p.shape[2])
        p_next = p.gather(1, index)[:, 0]
        q_next = q.gather(1, index.clamp(max=width - 2))[:, 0]
        rest = (p_next - q_next).clamp(min=0.0)
        rejected = (count < limits)[:, None] & (rest.sum(1, keepdim=True) > 0)
        follow = self._pick(torch.where(rejected, rest, p_next))
        return agreed, follow[:, None].repeat(1, width)

    def _distribution(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.float() / self.temperature, dim=-1)

    def _pick(self, weights: Tensor) -> Tensor:
        # argmax(w / Exp(1)) draws from w / sum(w) without the host sync of torch.multinomial
        noise = torch.empty_like(weights).exponential_(generator=self.generator)
        return (weights / noise).argmax(-1).int()
