"""What to measure of one model: forwards over rows x tokens x context, prompts and chunks, mixed forwards, drafts.

The full product would take too long, so every (rows, tokens) meets two contexts and every context many rows. Points are
ordered so that a budget may cut anywhere: the ones every fit needs first, then the rest with all kinds interleaved.
The table is points.txt: a class, whom it is for if not for all models, and the point's label.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

PointKind = Literal["decode", "verify", "draft", "prefill", "mixed", "read"]
Unevenness = Literal["even", "chat", "tailed"]

KINDS: tuple[PointKind, ...] = ("decode", "verify", "draft", "prefill", "mixed", "read")
LONG_CONTEXT = 8000
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
        """Its name in tables, which `labelled` reads."""
        text: str = self.kind
        if self.rows:
            uneven = "" if self.lengths == "even" else f" {self.lengths}"
            text += f" {self.rows}x{self.tokens}@{self.context}{uneven}"
        if self.kind == "draft":
            text += f" k={self.steps}{'+catch-up' if self.catch_up else ''}"
        if self.chunks:
            text += f" {self.chunks}x{self.chunk_tokens // self.chunks} after {self.chunk_start}"
            text += "" if self.emits or self.kind == "read" else " unfinished"
        return text

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


LABEL = re.compile(
    r"(?P<kind>\w+)(?: (?P<rows>\d+)x(?P<tokens>\d+)@(?P<context>\d+))?(?: (?P<lengths>chat|tailed))?"
    r"(?: k=(?P<steps>\d+)(?P<catch_up>\+catch-up)?)?(?: (?P<chunks>\d+)x(?P<each>\d+) after (?P<start>\d+))?"
    r"(?P<unfinished> unfinished)?"
)


def labelled(label: str) -> GridPoint:
    """The point of a label."""
    found = LABEL.fullmatch(label)
    assert found is not None, label
    part: dict[str, Any] = found.groupdict(default="0")
    chunks = int(part["chunks"])
    return GridPoint(
        kind=part["kind"], rows=int(part["rows"]), tokens=int(part["tokens"]), steps=max(1, int(part["steps"])),
        catch_up=part["catch_up"] != "0", context=int(part["context"]), chunk_tokens=chunks * int(part["each"]),
        chunk_start=int(part["start"]), chunks=chunks, lengths="even" if part["lengths"] == "0" else part["lengths"],
        emits=chunks > 0 and part["kind"] != "read" and found["unfinished"] is None,
    )  # fmt: skip


def table(name: str) -> list[tuple[str, tuple[GridPoint, ...]]]:
    """The lines of a file next to this one: what is in front of the colon, and the points after it."""
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    split = (line.partition(": ") for line in lines)
    return [(front, tuple(map(labelled, labels.split(" + ")))) for front, _, labels in split]


def design(drafts: bool, heads: bool = False) -> list[list[GridPoint]]:
    """The points of points.txt in classes of falling importance; `heads` adds drafts that read a round again."""
    asked = {"": True, "drafts": drafts, "heads": heads}
    classes: dict[str, list[GridPoint]] = {}
    for name, points in table("points.txt"):
        importance, _, only = name.partition(" ")
        if asked[only]:
            classes.setdefault(importance, []).extend(points)
    return list(classes.values())


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
