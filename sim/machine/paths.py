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


class RequestPath(NamedTuple):
    """The rounds of a request to its end."""

    gains: bytes  # of each round
    contexts: NDArray[np.int64]  # cached tokens before each round, and after the last
    lags: NDArray[np.uint8]  # what the drafter has yet to read after each but the last


@lru_cache(maxsize=4096)  # a search serves the same requests again and again
def _path(runs: bytes, k: int, at: int, end: int, context: int, rereads: bool) -> RequestPath:
    """The rounds of k draft tokens from token `at` on."""
    gains = b"\1" * (end - at)
    if k:
        rounds, runs = [], runs.translate(gains_by_run(k))
        while at < end:
            gained = runs[at]
            rounds.append(gained)
            at += gained
        gains = bytes(rounds)
    contexts = np.frombuffer(b"\0" + gains, np.uint8).astype(np.int64)  # summing bytes takes four times as long
    contexts[0] = context
    contexts.cumsum(out=contexts)
    return RequestPath(gains, contexts, np.frombuffer(gains[:-1].translate(lags_by_gain(k, rereads)), np.uint8))


class PathsTogether:
    """The paths of requests that were drawn together, each from its second token on: the first comes with the prompt.

    A token leads to the one that the round from there ends before. All requests go from token to token together, and
    visited tokens are the rounds.
    """

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
        self._contexts = rounds + np.repeat(before, np.diff(lasts, prepend=-1))
        self._held = kv.all_blocks(self._contexts, k + 1)
        self._gains, self._ends = gains.tobytes(), [-1, *lasts.tolist()]
        self._lags = np.frombuffer(self._gains.translate(lags_by_gain(k, rereads)), np.uint8)

    def __getitem__(self, place: int) -> tuple[RequestPath, NDArray[np.int64]]:
        first, last = self._ends[place] + 1, self._ends[place + 1]
        path = RequestPath(self._gains[first:last], self._contexts[first : last + 1], self._lags[first : last - 1])
        return path, self._held[first:last]


def path_of(row: Request, k: int, rereads: bool, kv: KvCache) -> tuple[RequestPath, NDArray[np.int64]]:
    """The rounds of k draft tokens that a request has yet to go through, and what it holds of the KV cache in each."""
    drawn, runs, at, end, context = row.drawn, row.accept_runs, row.state.emitted, row.output_tokens, row.state.context
    if (
        not k or at != 1 or drawn is None or len(drawn.runs) < TOGETHER
        or drawn.runs[row.place] is not runs or len(runs) != end
        or not drawn.prompt_tokens[row.place] == row.prompt_tokens == context
    ):  # fmt: skip
        path = _path(runs, k, at, end, context, rereads)
        return path, kv.all_blocks(path.contexts[:-1], k + 1)
    key = (k, rereads, kv.room)
    paths = drawn.rounds.get(key)
    if paths is None:
        paths = drawn.rounds[key] = PathsTogether(drawn, k, rereads, kv)
    together: PathsTogether = paths
    return together[row.place]
