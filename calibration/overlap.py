"""What running works side by side gains, and what carrying a prompt chunk does: `python -m pdvsim.calibration.overlap`.

From the measured samples, as a share of the time that the works take one after the other. Side by side each work goes
on again and again while the other does, so a / a' + b / b' works are done where one after the other it is one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd

WORK = ["model", "kind", "rows", "tokens", "steps", "context", "chunk_tokens", "chunk_start", "chunks"]


def side_by_side(samples: pd.DataFrame) -> pd.DataFrame:
    """One row a pair of works: their kinds, and their time over that of one after the other."""
    works = samples[(samples["section"] == "corun") & (samples["what"] == "gpu")]
    key = ["pair", *WORK]
    alone = works[works["members"] == 1].groupby(key, observed=True)["seconds"].median()
    found = []
    for _, group in works[works["members"] == 2].groupby(["pair", "group"], observed=True):
        members = [member for _, member in group.groupby("member")]
        speeds = [alone.get(tuple(m.iloc[0][key]), np.nan) / m["seconds"].median() for m in members]
        kinds = " + ".join(sorted(str(m.iloc[0]["kind"]) for m in members))
        found.append({"works": kinds, "share": 1 / sum(speeds)})
    return pd.DataFrame(found).dropna()


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
    samples = pd.read_parquet(folder / "samples.parquet")
    shares = pd.concat([side_by_side(samples), carried(samples)]).groupby("works")["share"]
    print(shares.describe()[["count", "min", "50%", "max"]].round(2).to_string())
    return 0


if __name__ == "__main__":
    sys.exit(main())
