"""Host time of n-gram drafts, and how often one is found where none is accepted, from recorded tokens.

    python studies/ngram_lookups.py TRACES…

Each line of a trace is a request of SpecDecode-Bench (`simulator/data/llama3.1-8B/combined_*.jsonl`): the prompt's and
the answer's tokens, and what an n-gram draft at each output position gained. The search is the one that realrun serves
with (`realrun.ngram`). For each file it prints how often the search yields the
recorded tokens, and how often it finds a draft where nothing was accepted; and a linear fit of the search time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pdvsim.realrun.ngram import History

EVERY = 5  # every fifth position is used
LENGTH = 7  # draft length
REPEATS = 3  # of each search; the fastest counts


def searched(request: dict[str, Any]) -> list[tuple[int, bool, bool, bool, float]]:
    """By position of an answer: tokens before it, whether a draft was found, accepted and as recorded, and seconds."""
    prompt, answer = request["prompt_token_ids"], request["generated_token_ids"]
    recorded = request["acc_ngram"]["acc_len"]
    rows = []
    history, held = History(prompt), 0
    for at in range(0, min(len(recorded), len(answer)), EVERY):
        history.extend(answer[held:at])
        held, best_s, drafts = at, float("inf"), []
        for _ in range(REPEATS):
            began = time.perf_counter()
            drafts = history.drafts(LENGTH)
            best_s = min(best_s, time.perf_counter() - began)
        agreed = next((i for i, (a, b) in enumerate(zip(drafts, answer[at:], strict=False)) if a != b), len(drafts))
        same = agreed == min(recorded[at] - 1, LENGTH)
        rows.append((len(history), bool(drafts), recorded[at] > 1, same, best_s))
    return rows


def line(rows: Sequence[tuple[int, bool, bool, bool, float]]) -> tuple[float, float]:
    """Seconds per search and per token searched: least squares over the mean of each hundred tokens."""
    table = np.array([(size // 100, spent_s) for size, *_, spent_s in rows])
    places = np.unique(table[:, 0])
    means = [float(table[table[:, 0] == place, 1].mean()) for place in places]
    slope, base = np.polyfit(100 * places + 50, means, 1)
    return float(base), float(slope)


def main(traces: Sequence[str]) -> None:
    """Print the figures of some traces."""
    everything = []
    for path in map(Path, traces):
        rows = [row for text in path.read_text(encoding="utf-8").splitlines() for row in searched(json.loads(text))]
        everything += rows
        refused = [matched for _, matched, accepted, _, _ in rows if not accepted]
        same = np.mean([agreed for *_, agreed, _ in rows])
        print(f"{path.stem}: as recorded {same:.3f}, found where nothing is accepted {np.mean(refused):.3f}")
    base_s, token_s = line(everything)
    sizes = [size for size, *_ in everything]
    spans = f"{len(everything)} searches through {min(sizes)} to {max(sizes)} tokens"
    print(f"{spans}: {base_s:.3g} s and {token_s:.3g} s per token")


if __name__ == "__main__":
    main(sys.argv[1:])
