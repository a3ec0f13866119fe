"""Launches of data-parallel ranks, whose experts are shared: attention of each rank, then the experts of all.

Every rank has its own requests, attention and dense layers. The experts of a layer take the tokens of all ranks
together, so a forward takes as long as the rank with the most to do outside the experts, and then the experts and the
exchange of tokens. What one rank costs (`price`) assumes that the others have as much to do: planners ask for that.
`together` takes the ranks as they are.

Not modelled: the exchange of one half of a batch during the products of another, rearranging experts, and the
forwards that a rank without requests makes in order to step along: they are shorter than the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from pdvsim.sim.hardware.attention import Prompts
from pdvsim.sim.hardware.costs import AffineCost, CostModel, Price, Routed
from pdvsim.sim.hardware.forward import ForwardTerms
from pdvsim.sim.hardware.terms import ExpertReads
from pdvsim.sim.specs import ModelSpec


class SpreadCosts(CostModel):
    """What launches of one model cost on a rank of several that share its experts."""

    def __init__(self, spec: ModelSpec, terms: ForwardTerms) -> None:
        super().__init__(spec, terms)
        assert spec.experts is not None
        self.experts = spec.experts
        none_taken = replace(spec, experts=replace(spec.experts, per_token=0))
        overhead = replace(terms.overhead, least_s=0.0)  # it is that of a forward with its experts
        self._own = CostModel(none_taken, replace(terms, experts=ExpertReads(), overhead=overhead))
        self._expert_flops = 2.0 * spec.experts.per_token * spec.expert_params / spec.experts.ranks

    @property
    def own(self) -> CostModel:
        """All but the experts."""
        return self._own

    def price(
        self, rows: int, tokens: int = 1, steps: int = 1, context: float = 0, prompts: Prompts = (),
        first_tokens: int = 0, packed: int = 0,
    ) -> AffineCost:  # fmt: skip
        """`CostModel.price` of a rank where all ranks do the same."""
        key = (rows, tokens, steps, packed, self.is_past_window(rows, context))
        if not prompts and key in self._costs:
            return self._costs[key]
        own = self._own.price(rows, tokens, steps, context, prompts, first_tokens, packed)
        shared = self.shared([self.routed(rows, tokens, steps, prompts, packed)] * self.spec.data_ranks)
        cost = own._replace(
            seconds_0=max(own.seconds_0 + shared.seconds, self.terms.overhead.least_s if prompts else 0.0),
            bytes_0=own.bytes_0 + shared.bytes,
            flops_0=own.flops_0 + shared.flops,
        )
        if not prompts:
            self._costs[key] = cost
        return cost

    def routed(
        self, rows: int, tokens: int = 1, steps: int = 1, prompts: Prompts = (), packed: int = 0
    ) -> list[Routed]:
        """The first forward of a launch has more tokens per row, and prompts."""
        independent = self.experts.independent
        each = packed / rows if packed else float(tokens)
        first = Routed(
            (packed or rows * tokens) + sum([count for _, count in prompts]),
            rows * independent(each) + sum([independent(count) for _, count in prompts]),
        )
        return [first, *[Routed(rows, rows)] * (steps - 1)]

    def shared(self, ranks: Sequence[Sequence[Routed]]) -> Price:
        """The experts take the tokens of all ranks together."""
        seconds = moved = flops = 0.0
        for at in range(max(map(len, ranks), default=0)):
            sent = [rank[at] for rank in ranks if at < len(rank)]
            tokens = sum([one.tokens for one in sent])
            read = self.experts.read(sum([one.independent for one in sent]))
            seconds += self.terms.spread.seconds(tokens, max([one.tokens for one in sent]))
            seconds += self.terms.experts.seconds(read)
            moved += self._expert_bytes * read
            flops += self._expert_flops * tokens
        return Price(seconds, moved, flops, 0.0)


@lru_cache(maxsize=64)
def spread_costs(spec: ModelSpec, terms: ForwardTerms) -> SpreadCosts:
    """The cost model of one rank's launches; runs share the prices that it has worked out."""
    return SpreadCosts(spec, terms)


def together(own: Sequence[Price], shared: Price, least_s: float = 0.0) -> list[Price]:
    """Prices of the launches of all ranks: the longest, with the experts' part, and at least `least_s`."""
    seconds = max(max([price.seconds for price in own]) + shared.seconds, least_s)
    return [Price(seconds, price.bytes + shared.bytes, price.flops + shared.flops, price.cache_bytes) for price in own]
