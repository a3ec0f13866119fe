"""Measured samples as points, and what the simulator's latency model makes of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.prices.costs import AffineCost, CostModel
from pdvsim.sim.prices.reach import Reach

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]


def medians(samples: pd.DataFrame) -> pd.DataFrame:
    """One row per measured point: its median time and mean context, with the number and spread of its samples."""
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


def layer_courses(samples: pd.DataFrame) -> dict[str, dict[int, float]]:
    """Return by model the median seconds of its layers without attention, by tokens."""
    layers = samples[samples["section"] == "layers"].groupby(["model", "chunk_tokens"], observed=True)
    medians_s: dict[Any, float] = layers["seconds"].median().to_dict()
    courses: dict[str, dict[int, float]] = {}
    for (model, tokens), seconds in medians_s.items():
        courses.setdefault(str(model), {})[int(tokens)] = float(seconds)
    return courses


def tokens_of(frame: pd.DataFrame) -> list[int]:
    """Tokens through the layers in each point's first forward, padded as the engine pads."""
    padded: list[int] = (frame["bucket_rows"] * frame["tokens"] + frame["bucket_chunk"]).astype(int).tolist()
    return padded


def price(model: CostModel, point: Mapping[Hashable, Any] | pd.Series) -> AffineCost:
    """Return the cost of a measured point in the simulator's own latency model."""
    rows, tokens, steps = int(point["rows"]), int(point["tokens"]), max(1, int(point["steps"]))
    if not point["chunks"]:
        return model.price(rows, tokens, steps, float(point.get("context_total", rows * point["context"])))
    count = int(point["chunks"])
    prompts = [(int(point["chunk_start"]), int(point["chunk_tokens"]) // count)] * count
    return model.price(rows, tokens, steps, 0, prompts, count if point["emits"] else 0)


def price_s(model: CostModel, point: Mapping[Hashable, Any]) -> Any:
    """The seconds that a measured point takes by the simulator's own latency model."""
    return price(model, point).seconds(float(point["context_total"]))


def reach_of(samples: pd.DataFrame) -> Reach:
    """The measured range of samples: of one model alone, or of co-running launches."""
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
