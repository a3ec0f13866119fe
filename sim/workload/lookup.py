"""Drafts that the host looks up in tokens: at which positions there is one, and how long it is.

Which of its tokens are accepted is drawn as for any drafter (`acceptance`). An n-gram search drafts as many tokens as
it is asked for, wherever one is accepted and at a recorded share of other positions. Suffix decoding drafts as many as
its match allows: the length is drawn from the recorded ones, given how many of its tokens are accepted.

Not modelled: that drafts become longer as an answer or the cache of answers grows.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from pdvsim.sim.core import LOOKED_UP, DrafterKind, Request
from pdvsim.sim.workload.acceptance import Counts, measured, uniform
from pdvsim.sim.workload.options import ACCEPTANCE_MODELS, USUAL_DATA, Acceptance

# Share of the positions where no n-gram draft is accepted at which one is found, by data set: `realrun.ngram` over the
# tokens of the same recordings (`studies/README.md`). It gains what was recorded at 97% of positions or more.
FOUND_REFUSED = {"cnn": 0.162, "gsm8k": 0.136, "instructcoder": 0.168, "sharegpt": 0.145}


class Lookup:
    """How often a draft is found, and how long it is."""

    def __init__(self, refused: float = 0.0, lengths: Counts | None = None) -> None:
        self.refused = refused  # share of positions without an accepted draft at which one is found
        self.lengths = lengths  # recorded drafts by accepted tokens and length; None: as many as are asked for
        self._ends = [] if lengths is None else np.cumsum(lengths, axis=1).tolist()

    def length(self, request: Request, k: int) -> int:
        """Tokens of the draft for the next round of a request, up to k; 0: none is found."""
        position = request.state.emitted
        accepted = request.accept_runs[position]
        if self.lengths is not None and accepted < len(self._ends):
            ends = self._ends[accepted]
            return min(k, bisect_right(ends, uniform(request, position) * ends[-1]))
        return k if accepted > 0 or uniform(request, position) < self.refused else 0

    def share(self, accepted: float) -> float:
        """Share of rounds with a draft, if its first token is accepted in `accepted` of all rounds."""
        return accepted + (1 - accepted) * self.refused

    def mean_length(self, accepted: float, k: int) -> float:
        """Mean tokens of the drafts of up to k that are found."""
        if self.lengths is None or not (share := self.share(accepted)):
            return float(k)
        tokens = np.minimum(np.arange(self.lengths.shape[1]), k)
        right, wrong = self.lengths[1:].sum(axis=0), self.lengths[0].copy()
        wrong[0] = 0  # no draft
        means = [float(row @ tokens / max(1, row.sum())) for row in (right, wrong)]
        return (accepted * means[0] + (1 - accepted) * self.refused * means[1]) / share


def lookup_of(drafter: DrafterKind, acceptance: Acceptance) -> Lookup:
    """The look-ups of a drafter; acceptance of another kind has the drafts that were recorded with ShareGPT."""
    if drafter not in LOOKED_UP:
        return Lookup()
    data, _, _ = (acceptance.acceptance_model or "").partition("-")
    if drafter == "ngram":
        return Lookup(FOUND_REFUSED.get(data, FOUND_REFUSED[USUAL_DATA]))
    name = f"{data}-{drafter}"
    lengths = measured(name if name in ACCEPTANCE_MODELS else f"{USUAL_DATA}-{drafter}").drafted
    return Lookup(1 - float(lengths[0, 0] / lengths[0].sum()), lengths)
