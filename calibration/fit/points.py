"""Measured samples as the latency model sees them: one row a point, in columns of tokens, rows and cached tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import Chunk, Request
from pdvsim.sim.hardware.latency import Latency, Shape, in_waves
from pdvsim.sim.hardware.reach import Reach

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Points:
    """The measured medians of one model."""

    seconds: Floats
    tokens: Floats  # through the layers in the first forward, padded as the engine pads
    logits: Floats  # through the head in the first forward
    rows: Floats
    padded: Floats  # rows that the engine runs
    steps: Floats
    width: Floats  # new tokens a row in the first forward
    context: Floats  # cached tokens over all rows
    chunks: Floats  # of prompts, all alike
    chunk_tokens: Floats  # of each
    chunk_start: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def at(self, chosen: NDArray[Any]) -> Points:
        return Points(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})

    def in_waves(self, heads: Floats, head_dim: Floats, sms: int) -> Floats:
        """Context tokens that attention over each point's prompts goes through, as the latency model has it."""
        sizes = zip(self.chunks, self.chunk_start, self.chunk_tokens, heads, head_dim, strict=True)
        return np.array([in_waves([(int(s), int(n))] * int(c), int(h), int(d), sms) for c, s, n, h, d in sizes])


def medians(samples: pd.DataFrame) -> pd.DataFrame:
    """One row a measured point: its median time and mean context, with the number and spread of its samples."""
    import pandas as pd

    by = ["kind", "rows", "bucket_rows", "tokens", "steps", "catch_up", "context", "chunk_tokens", "bucket_chunk"]
    groups = samples.groupby([*by, "chunk_start", "chunks", "emits", "lengths"], sort=False, observed=True)
    times = groups["seconds"]
    frame = pd.DataFrame(
        {
            "seconds": times.median(), "context_total": groups["context_total"].mean(), "samples": times.size(),
            "low": times.quantile(0.1), "high": times.quantile(0.9),
        }
    )  # fmt: skip
    return frame.reset_index()


def points_of(frame: pd.DataFrame) -> Points:
    """The columns of `medians` in the latency model's terms."""
    padded = frame["bucket_rows"].to_numpy(float)
    width = frame["tokens"].to_numpy(float)
    start, chunks = frame["chunk_start"].to_numpy(float), frame["chunks"].to_numpy(float)
    each = frame["chunk_tokens"].to_numpy(float) / np.maximum(chunks, 1)
    return Points(
        seconds=frame["seconds"].to_numpy(float),
        tokens=padded * width + frame["bucket_chunk"].to_numpy(float),
        logits=padded * width + chunks * frame["emits"].to_numpy(float),
        rows=frame["rows"].to_numpy(float),
        padded=padded,
        steps=np.maximum(frame["steps"].to_numpy(float), 1),
        width=width,
        context=frame["context_total"].to_numpy(float),
        chunks=chunks,
        chunk_tokens=each,
        chunk_start=start,
    )


def price(model: Latency, point: Mapping[Hashable, Any] | pd.Series) -> Shape:
    """What a measured point costs by the simulator's own latency model."""
    rows, tokens, steps = int(point["rows"]), int(point["tokens"]), max(1, int(point["steps"]))
    if not point["chunks"]:
        return model.shape(rows, tokens, steps)
    start, each = int(point["chunk_start"]), int(point["chunk_tokens"]) // int(point["chunks"])
    chunk = Chunk(Request(0, 0.0, start + each, 1, b""), start, each)
    return model.carrying(rows, tokens, steps, [chunk] * int(point["chunks"]), bool(point["emits"]))


def price_s(model: Latency, point: Mapping[Hashable, Any]) -> Any:
    """The seconds that a measured point takes by the simulator's own latency model."""
    shape = price(model, point)
    return shape.solo_0 + shape.solo_1 * float(point["context_total"])


def reach_of(samples: pd.DataFrame) -> Reach:
    """How far samples went: of one model alone, or of works side by side."""
    drafts = samples["kind"] == "draft"
    tokens = samples["rows"] * samples["tokens"] + samples["chunk_tokens"]
    return Reach(
        rows=int(samples["rows"].max()),
        k=int(samples["steps"].where(drafts, samples["tokens"] - 1).max()),
        context=int(samples["context"].max()),
        prompt_tokens=int(samples["chunk_tokens"].max()),
        prompt_start=int(samples["chunk_start"].max()),
        tokens=int(tokens.max()),
    )
