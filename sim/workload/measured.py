"""Measured acceptance: sampled from models of recorded EAGLE-3 and n-gram drafts, by data set and drafter.

A request belongs to one class, easy or hard to draft, for its whole output. A run of accepted drafts starts after a
rejection. Its length depends on the class and on whether the last run was empty, so that long runs are clustered. A
round may also start inside a run, if an earlier draft was shorter: its acceptance is sampled given the rest of the run.

Classes have equally many tokens, not requests. So the mean over a run's tokens is the recorded one for any output
lengths.

Not modelled: that an output becomes easier to draft as it grows (n-gram finds more to copy), except by its class; that
classes differ between long and short outputs; runs beyond LONGEST, which were not recorded.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Share of the positions where no n-gram draft is accepted at which one is found, by data set: `realrun.ngram` over the
# tokens of the same recordings (`studies/ngram_lookups.py`). It gains what was recorded at 97% of positions or more.
FOUND_REFUSED = {"cnn": 0.162, "gsm8k": 0.136, "instructcoder": 0.168, "sharegpt": 0.145}
LONGEST = 20  # longest recorded run of accepted drafts

Uniforms = NDArray[np.float32]
Floats = NDArray[np.float64]


class MeasuredModel(NamedTuple):
    """Cumulative shares, flat: row i starts at i, so that one search serves all rows."""

    classes: int
    starts: Floats  # rows by class and by whether the last run was empty
    inside: Floats  # rows by class and rest of the run
    tokens_per_round: tuple[float, ...]  # of the recording, for draft lengths 1, 2, …


@lru_cache(maxsize=16)
def measured(name: str) -> MeasuredModel:
    """The included model of a name, e.g. sharegpt-eagle3."""
    text = (files("pdvsim.sim.workload") / "data" / "acceptance.json").read_text(encoding="utf-8")
    model = json.loads(text)["models"][name]
    starts, inside = (_cumulative([row for one in model[part] for row in one]) for part in ("starts", "inside"))
    return MeasuredModel(len(model["starts"]), starts, inside, tuple(model["tokens_per_round"]))


def _cumulative(rows: list[list[int]]) -> Floats:
    table = np.zeros((len(rows), LONGEST + 1))
    for at, row in enumerate(rows):
        table[at, : len(row)] = row
    ends = np.cumsum(table, axis=1) / table.sum(axis=1, keepdims=True)
    flat: Floats = (ends + np.arange(len(rows))[:, None]).ravel()
    return flat


def _found(cumulative: Floats, row: NDArray[np.int64], uniforms: Uniforms) -> NDArray[np.int64]:
    """The run length of each uniform number in its row."""
    at = np.searchsorted(cumulative, uniforms + row, side="right")
    run: NDArray[np.int64] = np.minimum(at - row * (LONGEST + 1), LONGEST)
    return run


def draw_runs(
    model: MeasuredModel, uniforms: Uniforms, starts: NDArray[np.int64], ends: NDArray[np.int64], shares: Uniforms
) -> NDArray[np.uint8]:
    """At each position the number of consecutive accepted drafts; requests are concatenated.

    One uniform number per position decides; `shares` in [0, 1) determine the class of each request.
    """
    kind = (shares * model.classes).astype(np.int64)
    runs = np.zeros(len(uniforms), dtype=np.int64)
    begins = np.zeros(len(uniforms), dtype=bool)
    at, before, request = starts.copy(), np.zeros_like(starts), np.arange(len(starts))
    while len(at):  # one run of every request per step
        run = _found(model.starts, 2 * kind[request] + (before > 0), uniforms[at])
        runs[at] = run
        begins[at] = True
        at, before = at + run + 1, run
        going = at < ends[request]
        if not going.all():
            at, before, request = at[going], before[going], request[going]
    inner = np.flatnonzero(~begins)
    start = np.maximum.accumulate(np.where(begins, np.arange(len(runs)), 0))[inner]
    left = start + runs[start] - inner
    runs[inner] = _found(model.inside, LONGEST * np.repeat(kind, ends - starts)[inner] + left, uniforms[inner])
    return runs.astype(np.uint8)
