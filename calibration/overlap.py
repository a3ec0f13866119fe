"""What running works side by side gains, and what carrying a prompt chunk does: `python -m pdvsim.calibration.overlap`.

From the measured samples, as a share of the time that the works take one after the other on a card as hot. Side by side
each work goes on again and again while the other does, so where one after the other it is one work, the sum of
their speeds is done. A prompt leaves room if its attention has too few programs for a sixth of the GPU, over its time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd

from pdvsim.calibration.fit.corun import groups_of
from pdvsim.sim.hardware.latency import Latency
from pdvsim.sim.hardware.models import MODELS
from pdvsim.sim.hardware.profile import Profile, builtin, load

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


def main(argv: Sequence[str] | None = None) -> int:
    """Print the shares by kind of works; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    folder = Path(given[0]) if given else Path(str(files("pdvsim.calibration") / "data" / "h200"))
    profile = load(given[1]) if given[1:] else builtin("h200")
    samples = pd.read_parquet(folder / "samples.parquet")
    shares = pd.concat([side_by_side(samples, profile), carried(samples)]).groupby("works")["share"]
    print(shares.describe()[["count", "min", "50%", "max"]].round(2).to_string())
    return 0


if __name__ == "__main__":
    sys.exit(main())
