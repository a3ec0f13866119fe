"""Communication in a forward: an all-reduce after every mixer and MLP of a tensor-parallel group, and the logits.

Data-parallel ranks gather the tokens of all before the experts of a layer, and reduce and scatter the results. Each
sends half as much as an all-reduce of the same size, so both are taken as one all-reduce: an assumption. Ranks on
several nodes do so within each node, and before that with their likes on the other nodes (`links.between_nodes`).

NVLink times are published measurements on NVLink 4 by number of GPUs and bytes; NVLink 5 is assumed to take as long,
as most messages are short. Other links follow NCCL's ring model: two steps for
each other GPU, each with a latency and its part of the bytes. Gathering logits sends half as much as an all-reduce of
the same size.

Not modelled: all-reduces that overlap with products or are fused with norms, an engine that leaves small ones to NCCL,
GPUs of a group that wait for the slowest, quantised ones, and steps within and between nodes that overlap.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate

import numpy as np

from pdvsim.sim.models.specs import ModelSpec
from pdvsim.sim.prices.forward import ForwardTerms, Knots
from pdvsim.sim.prices.links import ALL_REDUCES, LINKS, LinkSpec, between_nodes, gather_s, nodes_of
from pdvsim.sim.prices.transfer import TOKENS

BAR = 0.25  # share by which an all-reduce may be slower or faster: other published times are within it


def all_reduce_s(link: LinkSpec, gpus: int, size: float) -> float:
    """Seconds until every GPU of a group has the sum of `size` bytes of each."""
    if gpus == 1:
        return 0.0
    if link in (LINKS["nvlink4"], LINKS["nvlink5"]):
        known = min(gpus, 8)  # a larger group takes as long for the same bytes sent by each GPU
        size *= (1 - 1 / gpus) / (1 - 1 / known)
        at, micros = ALL_REDUCES["bytes"], list(accumulate(ALL_REDUCES[str(known)], max))  # more is never faster
        if size > at[-1]:
            return float(micros[-1] + (size - at[-1]) * (micros[-1] - micros[-2]) / (at[-1] - at[-2])) * 1e-6
        return float(np.interp(size, at, micros)) * 1e-6
    steps = 2 * (gpus - 1)
    return link.latency_s + (steps - 1) * link.hop_s + steps * size / gpus / link.bytes_per_s


def with_collectives(terms: ForwardTerms, spec: ModelSpec, link: LinkSpec, card: str) -> ForwardTerms:
    """A shard's forward with what it exchanges with the others of its group, and its rank with other ranks.

    The link is that of a node of such cards.
    """
    token_bytes, ranks = spec.hidden * spec.dtype_bytes, spec.data_ranks
    if spec.shards > 1:
        reduced = _knots(link, spec.shards, token_bytes, spec.all_reduces)
        gathered = _knots(link, spec.shards, spec.vocab * spec.shards * spec.dtype_bytes / 2, 1)
        terms = replace(terms, reduce_knots=reduced, gather_knots=gathered)
    if ranks > 1:
        nodes = nodes_of(card, ranks * spec.shards)
        exchanged = _knots(link, ranks // nodes, ranks * token_bytes, spec.expert_layers)
        if nodes > 1:
            port_bytes, port = ranks * token_bytes / (ranks // nodes), between_nodes(card)
            exchanged = tuple(
                (n, inside_s + spec.expert_layers * 2 * gather_s(port, nodes, n * port_bytes))
                for n, inside_s in exchanged
            )
        terms = replace(terms, exchange_knots=exchanged)
    return terms


@cache
def _knots(link: LinkSpec, gpus: int, token_bytes: float, times: int) -> Knots:
    return tuple((n, times * all_reduce_s(link, gpus, n * token_bytes)) for n in TOKENS)
