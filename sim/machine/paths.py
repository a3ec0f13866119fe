"""The rounds of a request to its end, whose verdicts were drawn before the run.

Requests that were drawn together have theirs worked out together, which takes a fraction of the time.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import DrawnStreams, Request
from pdvsim.sim.machine.kv import KvCache

TOGETHER = 256  # requests, from which on working out all of them pays
STRIDE = 16  # rounds between two looks for requests that are through


@cache
def gains_by_run(k: int) -> bytes:
    """Tokens that a round of k drafts gains, by how many would be accepted: these, and one of the target's."""
    return bytes(min(run, k) + 1 for run in range(256))


@cache
def lags_by_gain(k: int, rereads: bool) -> bytes:
    """Return the drafter's lag in tokens after a round of k draft tokens, by the round's gain."""
    return bytes(max(gained - 1, 0) if rereads else gained > k for gained in range(256))


class PathTable:
    """The rounds of some requests to their ends, one request after the other, with one more entry after each."""

    __slots__ = ("contexts", "gains", "held", "lags")

    def __init__(self, gains: bytes, contexts: NDArray[np.int64], k: int, rereads: bool, kv: KvCache) -> None:
        self.gains = gains  # of each round
        self.contexts = contexts  # cached tokens before each round, and after the last
        # of the drafter, after each; without drafts no forward of it reads them
        self.lags = np.frombuffer(gains.translate(lags_by_gain(k, rereads)) if k else b"", np.uint8)
        self.held = kv.all_blocks(contexts, k + 1)  # of the KV cache, in each


class RequestPath(NamedTuple):
    """The rounds of one request: from the first to before the last of these entries."""

    paths: PathTable
    first: int
    last: int


@lru_cache(maxsize=4096)  # a search serves the same requests again and again
def _rounds(runs: bytes, k: int, at: int, end: int, context: int) -> tuple[bytes, NDArray[np.int64]]:
    """Gains and contexts of the rounds of k draft tokens from token `at` on."""
    rounds, runs = [], runs.translate(gains_by_run(k))
    while at < end:
        gained = runs[at]
        rounds.append(gained)
        at += gained
    gains = bytes(rounds)
    contexts = np.frombuffer(b"\0" + gains, np.uint8).astype(np.int64)  # summing bytes takes four times as long
    contexts[0] = context
    return gains, contexts.cumsum(out=contexts)


class PathsTogether(PathTable):
    """The paths of requests that were drawn together, each from its second token on: the first comes with the prompt.

    A token leads to the one that the round from there ends before. All requests go from token to token together, and
    visited tokens are the rounds.
    """

    __slots__ = ("ends",)

    def __init__(self, drawn: DrawnStreams, k: int, rereads: bool, kv: KvCache) -> None:
        runs = drawn.runs
        gains = np.frombuffer(b"".join(runs).translate(gains_by_run(k)) + b"\0", np.uint8)
        counts = np.array([len(one) for one in runs], np.int32)
        ends = counts.cumsum(dtype=np.int32)
        starts = ends - counts  # no round begins there, so that it serves as the end of the request before
        following = np.arange(len(gains), dtype=np.int32)
        following += gains
        np.minimum(following[:-1], np.repeat(ends, counts), out=following[:-1])
        following[starts] = starts
        visited = np.zeros(len(gains), bool)
        visited[ends] = True
        at = starts + 1
        while len(at):
            for _ in range(STRIDE):
                visited[at] = True
                at = following[at]
            at = at[following[at] != at]
        rounds = np.flatnonzero(visited)
        gains, lasts = gains[rounds], np.searchsorted(rounds, ends)
        rounds[lasts] = rounds[lasts - 1] + gains[lasts - 1]  # the last round may go beyond the end
        before = np.array(drawn.prompt_tokens) - (starts + 1)
        contexts = rounds + np.repeat(before, np.diff(lasts, prepend=-1))
        super().__init__(gains.tobytes(), contexts, k, rereads, kv)
        self.ends = [-1, *lasts.tolist()]  # the entries after the last round of each request


def path_of(row: Request, k: int, rereads: bool, kv: KvCache) -> RequestPath:
    """The rounds of k draft tokens that a request has yet to go through."""
    drawn, runs, at, end, context = row.drawn, row.accept_runs, row.state.emitted, row.output_tokens, row.state.context
    if not k:
        plain = PathTable(b"\1" * (end - at), np.arange(context, context + end - at + 1), k, rereads, kv)
        return RequestPath(plain, 0, end - at)
    if (
        at != 1 or drawn is None or len(drawn.runs) < TOGETHER
        or drawn.runs[row.place] is not runs or len(runs) != end
        or not drawn.prompt_tokens[row.place] == row.prompt_tokens == context
    ):  # fmt: skip
        gains, contexts = _rounds(runs, k, at, end, context)
        return RequestPath(PathTable(gains, contexts, k, rereads, kv), 0, len(gains))
    key = (k, rereads, kv.room)
    paths = drawn.rounds.get(key)
    if paths is None:
        paths = drawn.rounds[key] = PathsTogether(drawn, k, rereads, kv)
    return RequestPath(paths, paths.ends[row.place] + 1, paths.ends[row.place + 1])
