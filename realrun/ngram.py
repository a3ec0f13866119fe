"""Drafts by n-gram: what followed the last tokens of a request where they stood before, in its prompt or its answer.

As vLLM's `ngram` method does it: of earlier places that end with the same tokens, at least LEAST of them, the one that
agrees over most tokens (up to MOST) is taken, of several the earliest. The search is one of bytes, over all tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

LEAST, MOST = 3, 5  # tokens that must agree, and that are compared; as SpecDecode-Bench had them
_TOKEN_BYTES = 4


class History:
    """The tokens of one request as the host keeps them."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._bytes = bytearray()
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._bytes) // _TOKEN_BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens were delivered."""
        self._bytes += array("i", tokens).tobytes()

    def begin_like(self, other: History, tokens: int) -> None:
        """The first tokens are those of another request."""
        self._bytes[: tokens * _TOKEN_BYTES] = other._bytes[: tokens * _TOKEN_BYTES]

    def drafts(self, k: int) -> list[int]:
        """The tokens that followed, up to k; none where the last LEAST tokens are new together."""
        held = self._bytes
        last = len(held) - LEAST * _TOKEN_BYTES
        if last <= 0:
            return []
        pattern, most, start = held[last:], 0, 0
        at = held.find(pattern, 0, -_TOKEN_BYTES)
        while at >= 0 and most < MOST:
            if at % _TOKEN_BYTES == 0:
                agreed, back = LEAST, _TOKEN_BYTES
                while (
                    agreed < MOST
                    and back <= at
                    and held[at - back : at - back + _TOKEN_BYTES] == held[last - back :][:_TOKEN_BYTES]
                ):
                    agreed, back = agreed + 1, back + _TOKEN_BYTES
                if agreed > most:
                    most, start = agreed, at + LEAST * _TOKEN_BYTES
            at = held.find(pattern, at + 1, -_TOKEN_BYTES)
        return array("i", held[start : start + k * _TOKEN_BYTES]).tolist() if most else []
