"""Suffix decoding: drafts of what most often followed the last tokens of a request, in its text or in other answers.

As ArcticInference has it, which vLLM's `suffix` method calls (arXiv 2411.04975): two trees count all stretches of up to
`max_tree_depth` tokens, one of the request's prompt and answer, one of all answers. Each length of the match with the
last tokens proposes the most frequent path, as long as the match times `max_spec_factor`, and while its estimated
probability is at least `min_token_prob`. The proposal with the most expected tokens is the draft.

Of equally frequent tokens the first to become so is taken. Not modelled: eviction of answers from the cache, which vLLM
does beyond 10,000 requests, and trees of drafts, which vLLM does not use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Annotated

from pdvsim.sim.limits import MAX_REQUESTS, Range, Share, check_ranges

ROOT, NONE = 0, -1


@dataclass(frozen=True)
class SuffixOptions:
    """Suffix decoding, by vLLM's names and with its defaults."""

    suffix_decoding_max_tree_depth: Annotated[int, Range(2, 256)] = 24
    """Most tokens of a match and its draft together."""
    suffix_decoding_max_cached_requests: Annotated[int, Range(0, MAX_REQUESTS)] = 10_000
    """Requests whose answers are kept for others to match; 0: none are."""
    suffix_decoding_max_spec_factor: Annotated[float, Range(0, 64)] = 1.0
    """Draft tokens per token of the match."""
    suffix_decoding_min_token_prob: Share = 0.1
    """Least estimated probability of a draft token."""

    def __post_init__(self) -> None:
        check_ranges(self)


class SuffixTree:
    """Counts of all stretches of up to `depth` tokens of several sequences, with the likeliest token after each."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._children: dict[tuple[int, int], int] = {}  # by node and token
        self._counts, self._tokens, self._likeliest = [0], [NONE], [NONE]
        self._ends: dict[int, deque[int]] = {}  # by sequence, the nodes of the stretches that end with its last token

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """Append tokens to a sequence."""
        counts, likeliest, children = self._counts, self._likeliest, self._children
        ends = self._ends.setdefault(sequence, deque(maxlen=self._depth))
        for token in tokens:
            counts[ROOT] += 1
            ends.append(ROOT)  # the longest stretch is dropped where there are `depth`
            for at, node in enumerate(ends):
                child = children.get((node, token))
                if child is None:
                    child = children[node, token] = len(counts)
                    counts.append(0)
                    likeliest.append(NONE)
                    self._tokens.append(token)
                counts[child] += 1
                if likeliest[node] == NONE or counts[child] > counts[likeliest[node]]:
                    likeliest[node] = child
                ends[at] = child

    def draft(self, context: Sequence[int], k: int, options: SuffixOptions) -> tuple[float, list[int]]:
        """Expected tokens and tokens of the best draft of up to k; `context` are the last tokens."""
        best: tuple[float, list[int]] = 0.0, []
        for match in range(1, min(len(context), self._depth)):
            # of no node: NONE has no children
            node = reduce(lambda at, token: self._children.get((at, token), NONE), context[-match:], ROOT)
            if node == NONE:
                break
            path = self._path(
                node,
                min(k, int(match * options.suffix_decoding_max_spec_factor + 1e-6)),
                options.suffix_decoding_min_token_prob,
            )
            if path[0] >= best[0]:
                best = path
        return best

    def _path(self, node: int, most: int, least: float) -> tuple[float, list[int]]:
        """The likeliest tokens after a node: how many are expected to be right, and which they are."""
        chance, expected, tokens = 1.0, 0.0, list[int]()
        while len(tokens) < most and (child := self._likeliest[node]) != NONE:
            chance *= self._counts[child] / self._counts[node]
            if chance < least:
                break
            tokens.append(self._tokens[child])
            expected += chance
            node = child
        return expected, tokens


class SuffixCache:
    """The answers of all requests, and the requests that are being answered."""

    def __init__(self, options: SuffixOptions | None = None) -> None:
        self._options = options or SuffixOptions()
        self._answers = SuffixTree(self._options.suffix_decoding_max_tree_depth)
        self._own: dict[int, SuffixTree] = {}
        self._last: dict[int, deque[int]] = {}

    def start(self, request: int, prompt: Sequence[int]) -> None:
        """Begin a request with its prompt."""
        depth = self._options.suffix_decoding_max_tree_depth
        self._own[request], self._last[request] = SuffixTree(depth), deque(prompt, maxlen=depth)
        self._own[request].extend(request, prompt)

    def extend(self, request: int, tokens: Sequence[int]) -> None:
        """Append tokens to its answer."""
        self._own[request].extend(request, tokens)
        self._last[request].extend(tokens)
        if self._options.suffix_decoding_max_cached_requests:
            self._answers.extend(request, tokens)

    def drafts(self, request: int, k: int) -> list[int]:
        """The draft of up to k tokens for its next round; empty where nothing matches."""
        context = list(self._last[request])
        own, cached = (tree.draft(context, k, self._options) for tree in (self._own[request], self._answers))
        return own[1] if own[0] >= cached[0] else cached[1]

    def stop(self, request: int) -> None:
        """The answer is complete; it stays in the cache."""
        del self._own[request], self._last[request]
