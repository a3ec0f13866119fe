"""What to measure of one model: forwards over rows x tokens x context, prompts and chunks, mixed forwards, drafts.

The full product would take too long, so every (rows, tokens) meets two contexts and every context many rows. Points are
ordered so that a budget may cut anywhere: the ones every fit needs first, then the rest with all kinds interleaved.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

PointKind = Literal["decode", "verify", "draft", "prefill", "mixed", "read"]
Unevenness = Literal["even", "chat", "tailed"]

KINDS: tuple[PointKind, ...] = ("decode", "verify", "draft", "prefill", "mixed", "read")
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 128)
LARGE_ROWS = (192, 256)
BETWEEN_BUCKETS = (3, 12, 20, 40, 56, 100)  # padded up by the engine: the stairs
TOKENS = (1, 2, 3, 5, 7, 9)
CONTEXTS = (128, 512, 1500, 3000)
PROMPTS = (32, 64, 128, 256, 512, 1024, 2048)
LONG_CONTEXT = 8000
# (tokens, start); far after a start, attention separates from the layers
CHUNKS = (
    (256, 512), (256, 1500), (512, 1024), (256, 4000), (256, 7700), (512, 3000), (1024, 3000), (1024, 7000),
    (2048, 4000),
)  # fmt: skip
PROMPT_SETS = ((2, 64), (4, 64), (2, 256), (4, 256))  # (prompts in one forward, tokens each)
# (rows, tokens per row, chunk) of forwards that carry a prompt: each chunk meets few and many rows, no and many drafts
CARRIED = (
    (1, 2, 64), (8, 1, 64), (24, 4, 64), (64, 2, 64), (8, 3, 128), (16, 2, 128), (48, 1, 128), (64, 3, 128),
    (4, 9, 256), (8, 1, 256), (24, 3, 256), (64, 2, 256), (2, 4, 512), (8, 3, 512), (16, 9, 512), (48, 2, 512),
    (1, 5, 1024), (8, 2, 1024), (32, 3, 1024),
)  # fmt: skip
SPREAD = 0.1  # contexts of an even batch lie within this share of the nominal one
SIGMAS: dict[Unevenness, float] = {"chat": 0.9, "tailed": 1.5}  # of the logarithms of an uneven one's, at the same mean
LONGEST_UNEVEN_CONTEXT = 3200
HOT_TOKENS = 64  # a forward of this many tokens draws the power that makes the card lower its clock
SMALL_PARAMS = 3.2e9  # models up to this size are also measured as drafters


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One shape of launch: `tokens` per row in the first forward, `context` per row cached before it, on average.

    `chunk_tokens` is the sum over `chunks` equal prompt chunks, each after `chunk_start` cached tokens; `emits`
    says whether they end a prompt and yield first tokens.
    """

    kind: PointKind
    rows: int = 0
    tokens: int = 0
    steps: int = 1
    catch_up: bool = False
    context: int = 0
    chunk_tokens: int = 0
    chunk_start: int = 0
    chunks: int = 0
    emits: bool = False
    lengths: Unevenness = "even"

    @property
    def throttles(self) -> bool:
        """Whether its launches one after another slow each other down."""
        return self.rows * self.tokens + self.chunk_tokens >= HOT_TOKENS

    @property
    def slots(self) -> int:
        """Number of cache slots it uses."""
        return self.rows + self.chunks

    @property
    def positions(self) -> int:
        """The longest a slot may get, without the engine's own headroom."""
        longest = int(self.context * (1 + SPREAD)) if self.lengths == "even" else LONGEST_UNEVEN_CONTEXT
        rows = longest + 2 + self.tokens + self.steps if self.rows else 0
        return max(rows, self.chunk_start + self.chunk_tokens // max(1, self.chunks))

    def label(self) -> str:
        """A short name for people."""
        text: str = self.kind
        if self.rows:
            uneven = "" if self.lengths == "even" else f" {self.lengths}"
            text += f" {self.rows}x{self.tokens}@{self.context}{uneven}"
        if self.kind == "draft":
            text += f" k={self.steps}{'+catch-up' if self.catch_up else ''}"
        if self.chunks:
            text += f" {self.chunks}x{self.chunk_tokens // self.chunks} after {self.chunk_start}"
        return text

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def decode(rows: int, tokens: int, context: int, lengths: Unevenness = "even") -> GridPoint:
    """One forward of `tokens` new tokens per row: plain decoding for one, a verify for more."""
    return GridPoint("decode" if tokens == 1 else "verify", rows, tokens, context=context, lengths=lengths)


def draft(rows: int, steps: int, context: int, catch_up: bool = False, lengths: Unevenness = "even") -> GridPoint:
    """A k-step draft graph."""
    return GridPoint("draft", rows, 2 if catch_up else 1, steps, catch_up, context, lengths=lengths)


def reread(rows: int, steps: int, width: int, context: int) -> GridPoint:
    """A draft whose first forward reads each row's last `width` tokens, as a head's does."""
    return GridPoint("draft", rows, width, steps, context=context)


def prefill(tokens: int, start: int = 0, chunks: int = 1, emits: bool = True) -> GridPoint:
    """`chunks` stretches of `tokens` prompt tokens each."""
    return GridPoint("prefill", chunk_tokens=tokens * chunks, chunk_start=start, chunks=chunks, emits=emits)


def read(tokens: int, start: int = 0, chunks: int = 1) -> GridPoint:
    """Return the same for the drafter, whose prefill yields no token."""
    return GridPoint("read", chunk_tokens=tokens * chunks, chunk_start=start, chunks=chunks)


def mixed(rows: int, tokens: int, context: int, chunk: int, start: int = 0) -> GridPoint:
    """A verify that carries a prompt chunk, as continuous batching does."""
    return GridPoint("mixed", rows, tokens, 1, False, context, chunk, start, 1, True)


def labelled(label: str) -> GridPoint:
    """The point of a label, of those that run in groups: rows alone, or prompts alone."""
    kind, size, *rest = label.split()
    if kind in ("prefill", "read"):
        chunks, tokens = map(int, size.split("x"))
        return (prefill if kind == "prefill" else read)(tokens, int(rest[1]), chunks)
    rows, tokens, context = map(int, re.split("[x@]", size))
    if kind == "draft":
        steps, _, catch_up = rest[0].removeprefix("k=").partition("+")
        return draft(rows, int(steps), context, bool(catch_up))
    return decode(rows, tokens, context)


def design(drafts: bool, heads: bool = False) -> list[list[GridPoint]]:
    """All points in classes of falling importance; no point twice. `heads` adds drafts that read a round again."""
    core = [decode(r, t, 512) for r in (1, 8, 32, 64) for t in (1, 5)]
    core += [prefill(n) for n in (128, 512, 1024)] + [mixed(8, 5, 512, 256), mixed(32, 5, 512, 512)]
    more = [decode(r, t, c) for r in ROWS for t in (1, 2, 5, 9) for c in _contexts(r, t)]
    more += [prefill(n) for n in PROMPTS] + [prefill(n, start) for n, start in CHUNKS]
    more += [mixed(r, 5, 512, n) for r in (1, 32) for n in (128, 512)] + [mixed(64, 5, 512, 256, 512)]
    more += [mixed(r, t, 512, n) for r, t, n in CARRIED] + [mixed(8, 1, 4000, 1024, 4000)]
    more += [decode(r, t, LONG_CONTEXT) for r, t in ((1, 1), (8, 1), (8, 5))]
    more += [decode(r, t, 512, "chat") for r in (8, 40) for t in (1, 5)]
    rest = [decode(r, t, c) for r in ROWS for t in TOKENS for c in _contexts(r, t)]
    rest += [decode(r, t, 512) for r in BETWEEN_BUCKETS for t in (1, 5)]
    rest += [prefill(n, chunks=count) for count, n in PROMPT_SETS]
    rest += [prefill(n, emits=False) for n in (128, 512)] + [prefill(256, 512, emits=False)]
    rest += [mixed(16, 3, 1500, 256, 1024), mixed(64, 1, 512, 512), mixed(12, 5, 512, 100)]
    rest += [decode(r, t, 512, lengths) for r, t in ((24, 1), (64, 2)) for lengths in SIGMAS]
    rest += [decode(r, t, 512) for r in LARGE_ROWS for t in (1, 2, 5)] + [decode(256, 2, 128)]
    rest += [mixed(192, 2, 512, 256), mixed(256, 1, 512, 512)]
    if drafts:
        core += [draft(r, 4, 512) for r in (1, 8, 32, 64)]
        more += [draft(r, k, 512) for r in (1, 8, 32, 64) for k in (1, 8)]
        more += [draft(r, 4, 512, True) for r in (1, 8, 32, 64)] + [draft(r, 4, 512) for r in (4, 16, 24, 40, 48)]
        more += [draft(r, 2, 512, lengths="chat") for r in (8, 28, 40)]
        rest += [draft(r, k, 512) for r in (1, 8, 32, 64) for k in (2, 6)]
        rest += [draft(r, 4, c) for r in (8, 64) for c in (128, 1500, 3000)] + [draft(r, 4, 512) for r in (96, 128)]
        rest += [draft(r, 2, 512, True) for r in (24, 40, 128)] + [draft(28, 2, 512, lengths="tailed")]
        rest += (
            [draft(4, 4, LONG_CONTEXT)]
            + [draft(r, k, 1500, True) for r, k in ((8, 4), (64, 4), (64, 1))]
            + [draft(8, 8, 512, True)]
        )
        rest += [draft(r, 4, 512) for r in LARGE_ROWS] + [draft(256, 1, 512)]
    if heads:
        core += [reread(r, 4, 5, 512) for r in (1, 8, 32, 64)]
        more += [reread(r, k, w, 512) for r in (1, 8, 32, 64) for k, w in ((1, 5), (4, 3))]
        rest += [reread(r, 4, 5, c) for r in (8, 64) for c in (128, 1500, 3000)] + [reread(128, 4, 5, 512)]
    seen: set[GridPoint] = set()
    return [[p for p in points if not (p in seen or seen.add(p))] for points in (core, more, rest)]  # type: ignore[func-returns-value]


def _contexts(rows: int, tokens: int) -> tuple[int, ...]:
    """The two contexts a (rows, tokens) is measured at: they alternate like the fields of a chessboard."""
    odd = (ROWS.index(rows) + TOKENS.index(tokens)) % 2
    if tokens == 7:
        return CONTEXTS[1 + odd :: 2][:1]
    return CONTEXTS[odd::2]


def ordered(classes: Sequence[Sequence[GridPoint]], seed: int) -> list[GridPoint]:
    """The order to measure in: class after class, kinds interleaved in each, shuffled within a kind."""
    return [point for number, points in enumerate(classes) for point in _interleaved(points, seed + number)]


def _interleaved(points: Sequence[GridPoint], seed: int) -> Iterator[GridPoint]:
    placed: list[tuple[float, int, GridPoint]] = []
    for number, kind in enumerate(KINDS):
        family = [p for p in points if p.kind == kind]
        random.Random(f"{seed} {kind}").shuffle(family)
        # the first of each kind before anything else, the others spread evenly over the class
        placed += [(i / len(family), number, point) for i, point in enumerate(family)]
    return (point for _, _, point in sorted(placed, key=lambda entry: entry[:2]))
