"""Make the built-in models of recorded acceptance: `python studies/make_acceptance.py TRACES… MODELS`.

Each line of the traces is a request: `dataset`, and by drafter the tokens that a round starting at each output position
would yield (accepted draft tokens plus one). The models hold counts: lengths of accepted runs where a round starts, and
what a round that starts inside a run accepts. Where the traces also have the length of the draft at each position
(`suffix_drafted`), a model has the number of rounds by accepted tokens and length of the draft.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.common.files import write_whole
from pdvsim.sim.workload.acceptance import LONGEST

DRAFTERS = ("eagle3", "ngram", "suffix")
CLASSES = 6  # of requests by mean tokens per round, with equal numbers of tokens
LENGTHS = tuple(range(1, 8))  # draft lengths in the source's figures
SCALE = 1000  # shares are written in thousandths

Runs = list[list[int]]
Counts = NDArray[np.int64]


def read(paths: Sequence[Path]) -> tuple[dict[str, Runs], dict[str, Runs]]:
    """By data set and drafter, one list per request: accepted draft tokens and lengths of drafts by output position."""
    runs, drafted = defaultdict[str, Runs](list), defaultdict[str, Runs](list)
    for line in (line for path in paths for line in path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        for drafter in (drafter for drafter in DRAFTERS if drafter in row):
            name = f"{row['dataset']}-{drafter}"
            runs[name].append([gain - 1 for gain in row[drafter]])
            if f"{drafter}_drafted" in row:
                drafted[name].append(row[f"{drafter}_drafted"])
    return runs, drafted


def by_length(requests: Runs, drafted: Runs) -> dict[str, Any]:
    """Rounds by accepted tokens and length of the draft, if drafts are as long as they can be; none without lengths."""
    if not drafted:
        return {}
    counts = np.zeros((LONGEST + 1, LONGEST + 1), dtype=np.int64)
    for runs, lengths in zip(requests, drafted, strict=True):
        at = 0
        while at < len(runs):
            counts[runs[at], lengths[at]] += 1
            at += runs[at] + 1
    seen = counts.sum(axis=1) > 0
    counts[~seen, ~seen] = 1  # as long as what is accepted
    rows = [
        counts[accepted, : counts[accepted].nonzero()[0][-1] + 1] for accepted in range(np.flatnonzero(seen)[-1] + 1)
    ]
    return {"drafted": [row.tolist() for row in rows]}


def tokens_per_round(requests: Runs, k: int) -> float:
    """Mean tokens per round at draft length `k`."""
    tokens = rounds = 0
    for runs in requests:
        at = 0
        while at < len(runs):
            at += min(runs[at], k) + 1
            rounds += 1
        tokens += at
    return tokens / rounds


def classes(requests: Runs) -> list[Runs]:
    """The requests by tokens per round, in CLASSES with about the same number of tokens."""
    ranked = sorted(requests, key=lambda runs: tokens_per_round([runs], LENGTHS[-1]))
    ends = np.cumsum([len(runs) for runs in ranked])
    at = np.minimum((ends - 1) * CLASSES // ends[-1], CLASSES - 1)
    return [[runs for runs, where in zip(ranked, at, strict=True) if where == c] for c in range(CLASSES)]


def fit(requests: Runs) -> dict[str, Any]:
    """One data set and drafter: run lengths by class and whether the last run was empty, and what is inside runs."""
    starts = np.zeros((CLASSES, 2, LONGEST + 1), dtype=np.int64)
    inside = np.zeros((CLASSES, LONGEST, LONGEST + 1), dtype=np.int64)
    for c, members in enumerate(classes(requests)):
        for runs in members:
            at = before = 0
            while at < len(runs):
                run = runs[at]
                starts[c, int(before > 0), run] += 1
                for step, inner in enumerate(runs[at + 1 : at + run + 1], start=1):
                    inside[c, run - step, inner] += 1
                at, before = at + run + 1, run
    return {
        "requests": len(requests),
        "tokens_per_round": [round(tokens_per_round(requests, k), 4) for k in LENGTHS],
        "starts": [[_shares(row) for row in one] for one in starts],
        "inside": [[_shares(row) for row in one] for one in inside],
    }


def _shares(counts: Counts) -> list[int]:
    """Counts as thousandths, without trailing zeros; without counts, an empty run is certain."""
    total = int(counts.sum())
    if not total:
        return [SCALE]
    ends = np.round(np.cumsum(counts) * SCALE / total).astype(np.int64)
    shares: list[int] = np.diff(ends, prepend=0).tolist()
    while not shares[-1]:
        shares.pop()
    return shares


def write(models: dict[str, Any], path: Path) -> None:
    """Write one line per field of a model, so that a change is easy to read."""
    parts = []
    for name, model in models.items():
        fields = ",\n".join(f"   {json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in model.items())
        parts.append(f"  {json.dumps(name)}: {{\n{fields}\n  }}")
    head = {
        "source": "SpecDecode-Bench, simulator/data/llama3.1-8B (the traces of arXiv 2601.11580): "
        "Llama-3.1-8B-Instruct, accepted runs at every output position, of suffix as looked up by "
        "studies/suffix_lookups.py; derived counts only",
        "made_by": "studies/make_acceptance.py",
        "unit": f"shares in 1/{SCALE}",
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    write_whole(
        path, ("{\n" + ",\n".join([*lines, '  "models": {\n' + ",\n".join(parts) + "\n  }"]) + "\n}\n").encode()
    )


if __name__ == "__main__":
    *traces, models = map(Path, sys.argv[1:])
    recorded, drafted = read(traces)
    write({name: fit(recorded[name]) | by_length(recorded[name], drafted[name]) for name in sorted(recorded)}, models)
