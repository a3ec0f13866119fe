"""What co-running launches gains, and what carrying a prompt chunk does: `python studies/corun_gains.py`.

From the H200's samples, as a share of the time that the launches take one after the other on a card as hot. Co-running,
each launch is repeated as long as the other runs, so in the time of one launch the sum of their speeds is done. A
prompt leaves room if its attention has too few programs for a sixth of the GPU, over its time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from pdvsim.calibration.fit.corun import groups_of
from pdvsim.sim.hardware.latency import Latency
from pdvsim.sim.hardware.models import MODELS
from pdvsim.sim.hardware.profile import Profile, builtin

EMPTY = 1 / 6
WORK = ["model", "kind", "rows", "tokens", "steps", "context", "chunk_tokens", "chunk_start", "chunks"]


def side_by_side(samples: pd.DataFrame, profile: Profile) -> pd.DataFrame:
    """One row a pair of works: their kinds, and their time over that of one after the other."""
    models = {name: Latency(MODELS[name], fit) for name, fit in profile.models.items() if name in MODELS}
    found = []
    for group in groups_of(samples, profile.gpu, models, profile.power):
        if len(group.members) == 2:
            kinds = " + ".join(sorted(member.kind for member in group.members))
            if any(member.empty >= EMPTY for member in group.members):
                kinds += ", with room"
            found.append({"works": kinds, "share": 1 / sum(member.measured for member in group.members)})
    return pd.DataFrame(found)


def carried(samples: pd.DataFrame) -> pd.DataFrame:
    """One row a verify that carries a prompt chunk: its time over that of the verify and the chunk on their own."""
    solo = samples[(samples["section"] == "solo") & (samples["what"] == "gpu")]
    rows_of = solo[solo["kind"].isin(["verify", "decode"])].groupby(
        ["model", "rows", "tokens", "context"], observed=True
    )
    chunks_of = solo[solo["kind"] == "prefill"].groupby(
        ["model", "chunk_tokens", "chunk_start", "chunks"], observed=True
    )
    verify, prompt = rows_of["seconds"].median(), chunks_of["seconds"].median()
    found = []
    for _, group in solo[solo["kind"] == "mixed"].groupby(WORK, observed=True):
        work = group.iloc[0]
        apart = verify.get(tuple(work[["model", "rows", "tokens", "context"]]), np.nan)
        apart += prompt.get(tuple(work[["model", "chunk_tokens", "chunk_start", "chunks"]]), np.nan)
        found.append({"works": "verify carries a chunk", "share": group["seconds"].median() / apart})
    return pd.DataFrame(found).dropna()


def shares() -> pd.DataFrame:
    """Count, least, median and most by kind of launches, of the samples that come with pdvsim."""
    samples = pd.read_parquet(Path(__file__).parents[1] / "calibration/data/h200/samples.parquet")
    by_kind = pd.concat([side_by_side(samples, builtin("h200")), carried(samples)]).groupby("works")["share"]
    return by_kind.describe()[["count", "min", "50%", "max"]]


if __name__ == "__main__":
    print(shares().round(2).to_string())
