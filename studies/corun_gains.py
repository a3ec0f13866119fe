"""Gains of concurrent launches, and of prompt chunks inside a verify: `python studies/corun_gains.py`.

Computed from the H200's samples, as a share of the time that the launches take one after the other on an equally
throttled GPU. Concurrently, each launch is repeated while the other runs, so the gain is the sum of their speeds.
A pair is "with room" if one of its launches leaves at least a sixth of the GPU without thread blocks, averaged over its
time: small chunks of long prompts do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from pdvsim.calibration.fit.corun import groups_of
from pdvsim.sim.models.presets import model_or_shard
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.profile import Profile, builtin

EMPTY = 1 / 6
WORK = ["model", "kind", "rows", "tokens", "steps", "context", "chunk_tokens", "chunk_start", "chunks"]


def concurrent(samples: pd.DataFrame, profile: Profile) -> pd.DataFrame:
    """One row per pair of launches: their kinds, and their time divided by the serial time."""
    models = {name: CostModel(model_or_shard(name), fit) for name, fit in profile.models.items()}
    rows = []
    for group in groups_of(samples, profile.gpu, models, profile.power):
        if len(group.members) == 2:
            kinds = " + ".join(sorted(member.kind for member in group.members))
            if any(member.empty >= EMPTY for member in group.members):
                kinds += ", with room"
            rows.append({"works": kinds, "share": 1 / sum(member.measured for member in group.members)})
    return pd.DataFrame(rows)


def carried(samples: pd.DataFrame) -> pd.DataFrame:
    """One row per verify with a prompt chunk: its time divided by that of the verify and the chunk alone."""
    solo = samples[(samples["section"] == "solo") & (samples["what"] == "gpu")]
    rows_of = solo[solo["kind"].isin(["verify", "decode"])].groupby(
        ["model", "rows", "tokens", "context"], observed=True
    )
    chunks_of = solo[solo["kind"] == "prefill"].groupby(
        ["model", "chunk_tokens", "chunk_start", "chunks"], observed=True
    )
    verify, prompt = rows_of["seconds"].median(), chunks_of["seconds"].median()
    rows = []
    for _, group in solo[solo["kind"] == "mixed"].groupby(WORK, observed=True):
        work = group.iloc[0]
        apart = verify.get(tuple(work[["model", "rows", "tokens", "context"]]), np.nan)
        apart += prompt.get(tuple(work[["model", "chunk_tokens", "chunk_start", "chunks"]]), np.nan)
        rows.append({"works": "verify carries a chunk", "share": group["seconds"].median() / apart})
    return pd.DataFrame(rows).dropna()


def shares() -> pd.DataFrame:
    """Count, minimum, median and maximum by kind of launches, from the shipped samples."""
    samples = pd.read_parquet(Path(__file__).parents[1] / "calibration/data/h200/samples.parquet")
    by_kind = pd.concat([concurrent(samples, builtin("h200")), carried(samples)]).groupby("works")["share"]
    return by_kind.describe()[["count", "min", "50%", "max"]]


if __name__ == "__main__":
    print(shares().round(2).to_string())
