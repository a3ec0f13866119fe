"""Conversations and shared prefixes: what each request has in common with others, without any tokens.

A prompt is a chain of texts (`core.Chain`). Requests with the same prefix have its text in common. The turns of a
conversation have all earlier prompts and answers in common: each sends the earlier prompts and answers again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import ENDLESS, Chain

TURNS = 1 << 16  # more than a conversation has
HASHED_TOKENS = 512  # that one of Mooncake's hashes stands for

Origins = tuple[tuple[int, int], ...]  # texts of a turn, as (end, turn that they were first sent in)


def own_text(number: int) -> int:
    """The number of a text that belongs to one request or turn."""
    return 2 * number + 1


def common_text(number: int) -> int:
    """The number of a text that any request may have."""
    return 2 * number


class Growth:
    """Lengths of conversations, turn after turn: every prompt begins with all earlier prompts and answers.

    A conversation ends after `turns` turns, or before a turn that would exceed `longest` tokens.
    """

    def __init__(self, turns: int, longest: float) -> None:
        self.turns, self.longest = turns, longest
        self.session, self.turn, self.tokens = -1, turns, 0

    def add(self, new: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return prompts and outputs of the next turns from their new tokens, with conversation and turn."""
        rows = []
        for prompt, output in new.tolist():
            if self.turn == self.turns or self.tokens + prompt + output > self.longest:
                self.session, self.turn, self.tokens = self.session + 1, 0, 0
            rows.append((self.tokens + prompt, output, self.session, self.turn))
            self.tokens += prompt + output
            self.turn += 1
        table = np.array(rows, dtype=np.int64)
        return table[:, :2], table[:, 2:]


def origins_of(lengths: Sequence[tuple[int, int]]) -> list[Origins]:
    """The texts of each turn of a recorded conversation, from its prompts and outputs.

    A prompt that has room for the last prompt and answer repeats both. One that is shorter, but not shorter than the
    last prompt, repeats that without the answer; one that is shorter still is taken as a new start.
    """
    origins: list[Origins] = []
    texts: Origins = ((ENDLESS, 0),)
    last_prompt, last_total = 0, 0
    for turn, (prompt, output) in enumerate(lengths):
        if turn and prompt < last_total:
            shared = last_prompt if prompt >= last_prompt else 0
            whole = tuple(text for text in texts if text[0] <= shared)
            cut = tuple((shared, first) for end, first in texts[len(whole) : len(whole) + 1] if shared)
            texts = (*whole, *cut, (ENDLESS, turn))
        origins.append(texts)
        last_prompt, last_total = prompt, prompt + output
    return origins


class Recorded(NamedTuple):
    """The conversations of a file: the rows of each in the order of its turns, and the same by row."""

    rows: list[list[int]]
    conversation: NDArray[np.int64]
    turn: NDArray[np.int64]
    origins: list[Origins]

    def ordered(self, order: Sequence[int], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Rows and conversation numbers of `count` requests: conversations in `order`, and then any, as new ones."""
        requests: list[tuple[int, int]] = []
        session = 0
        while len(requests) < count:
            at = order[session] if session < len(order) else int(rng.integers(len(self.rows)))
            requests += [(row, session) for row in self.rows[at]]
            session += 1
        return np.array(requests[:count], dtype=np.int64).T


def recorded(sessions: NDArray[np.int64], turns: NDArray[np.int64], lengths: NDArray[np.int64]) -> Recorded:
    """The conversations of a file, from the session and turn of each row."""
    _, first, session = np.unique(sessions, return_index=True, return_inverse=True)
    conversation = np.argsort(np.argsort(first))[session]  # in the order in which they begin
    order = np.lexsort((turns, conversation))
    rows = [own.tolist() for own in np.split(order, np.flatnonzero(np.diff(conversation[order])) + 1)]
    turn = np.zeros(len(conversation), dtype=np.int64)
    origins: list[Origins] = [()] * len(conversation)
    for own_rows in rows:
        turn[own_rows] = np.arange(len(own_rows))
        for row, texts in zip(own_rows, origins_of([tuple(lengths[row].tolist()) for row in own_rows]), strict=True):
            origins[row] = texts
    return Recorded(rows, conversation, turn, origins)


def session_chain(origins: Origins, session: int) -> Chain:
    """The chain of a turn."""
    return tuple((end, own_text(session * TURNS + turn)) for end, turn in origins)


def hashed_chain(hashes: Sequence[int], past: int, prompt_tokens: int, number: int) -> Chain:
    """The chain of a request with Mooncake's hashes; the answer is its own.

    A trace that is sent again is taken to have other texts: `past` is added to its hashes.
    """
    ends = range(HASHED_TOKENS, HASHED_TOKENS * (len(hashes) + 1), HASHED_TOKENS)
    named = zip(ends, hashes, strict=True)
    texts = [(min(end, prompt_tokens), common_text(name + past)) for end, name in named]
    return (*texts, (ENDLESS, own_text(number)))


def after_prefix(chain: Chain, prefix: int, tokens: int) -> Chain:
    """The chain after a prefix of `tokens` tokens."""
    if not tokens:
        return chain
    moved = tuple((end if end == ENDLESS else end + tokens, text) for end, text in chain)
    return ((tokens, common_text(prefix)), *moved)
