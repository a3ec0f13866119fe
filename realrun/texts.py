"""The tokens of prompts: random, and equal where requests have a text in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import Request


def prompts(requests: Sequence[Request], vocab: int, seed: int) -> dict[int, NDArray[np.int32]]:
    """Random prompts. Those of a conversation lack the answers."""
    lengths = [request.prompt_tokens for request in requests]
    values = np.random.default_rng([seed, 11]).integers(0, vocab, sum(lengths), dtype=np.int32)
    ends = np.cumsum(lengths).tolist()
    for request, last in zip(requests, ends, strict=True):
        start, first = 0, last - request.prompt_tokens
        for end, text in request.chain:
            end = min(end, request.prompt_tokens)
            if end > start:
                tokens = np.random.default_rng([seed, 12, text]).integers(0, vocab, end - start, dtype=np.int32)
                values[first + start : first + end], start = tokens, end
    return {r.id: values[end - r.prompt_tokens : end] for r, end in zip(requests, ends, strict=True)}


def next_turns(requests: Sequence[Request]) -> dict[int, Request]:
    """The next turn of each request's conversation, where there is one."""
    last: dict[int, int] = {}
    next_turn: dict[int, Request] = {}
    for request in requests:
        if request.session in last:
            next_turn[last[request.session]] = request
        if request.session >= 0:
            last[request.session] = request.id
    return next_turn


def repeated(request: Request, turn: Request) -> int:
    """Return how many tokens of a request and its answer the next turn's prompt begins with."""
    same = 0
    for (end, text), (other_end, other) in zip(request.chain, turn.chain, strict=False):
        if text != other:
            break
        same = min(end, other_end)
    return min(same, request.prompt_tokens + request.output_tokens, turn.prompt_tokens)
