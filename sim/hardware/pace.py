"""How fast the machine in front of you is, beside the one that a profile was measured on.

Before its clock starts `realrun` serves some requests that it does not keep. From their launches come three ratios,
which its results hold as `pace_target`, `pace_draft` and `pace_host`: what forwards of the target, drafts, and the host
between two launches took, over what the profile says.

Not told: how prompts and lanes that share the GPU differ, and the power limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdvsim.sim.core import KINDS, Pair
from pdvsim.sim.hardware.profile import HostCost, Profile
from pdvsim.sim.reading import read_json
from pdvsim.sim.records import Table

FEWEST = 20  # launches from which a ratio is taken
LEAST, MOST = 0.2, 20.0  # ratios that are believed


class Pace(NamedTuple):
    """How many times as long as the profile says."""

    target: float = 1.0
    draft: float = 1.0
    host: float = 1.0

    def applied(self, profile: Profile, pair: Pair) -> Profile:
        """The profile of such a machine."""
        fits = dict(profile.models)
        for spec, factor in ((pair.draft, self.draft), (pair.target, self.target)):
            if spec.name in fits:
                fits[spec.name] = profile.models[spec.name].scaled(factor)
        host = HostCost(*(getattr(profile.host, cost.name) * self.host for cost in fields(HostCost)))
        return replace(profile, models=fits, host=host)


def read_pace(path: str | Path) -> Pace:
    """What a result of `realrun` says; a ValueError if it says nothing."""
    document = read_json(Path(path))
    found = pace_in(document) if isinstance(document, dict) else None
    if found is None:
        raise ValueError(f"--machine {path}: not a result of realrun with pace_target, pace_draft and pace_host")
    return found


def pace_in(meta: Mapping[str, Any]) -> Pace | None:
    """What a run's own record says; None where it says nothing."""
    found = [meta.get(f"pace_{name}") for name in Pace._fields]
    if found[0] is None or not all(value is None or _is_ratio(value) for value in found):
        return None
    return Pace(*(1.0 if value is None else float(value) for value in found))


def _is_ratio(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and LEAST <= value <= MOST


def pace_of(launches: Table, host: HostCost, handed: bool) -> dict[str, float]:
    """The ratios of a run whose launches were priced by a profile; those that it has too few launches for are left out.

    `handed`: drafts and verifies are on lanes of their own.
    """
    order = np.argsort(launches["start_s"], kind="stable")
    start_s, end_s, solo_s, rows, kind = (launches[n][order] for n in ("start_s", "end_s", "solo_s", "rows", "kind"))
    prompts = launches["tokens"][order] > rows * (launches["width"][order] + launches["steps"][order] - 1)
    before_s = np.concatenate(([-np.inf], np.maximum.accumulate(end_s)[:-1]))
    alone = (start_s >= before_s) & (end_s <= np.concatenate((start_s[1:], [np.inf]))) & (solo_s > 0) & (rows > 0)
    drafts, verifies = kind == KINDS.index("draft"), np.isin(kind, [KINDS.index("verify"), KINDS.index("decode")])
    found: dict[str, float] = {}
    for name, those in (("target", verifies), ("draft", drafts)):
        those = those & alone & ~prompts
        if those.sum() >= FEWEST:
            found[f"pace_{name}"] = float((end_s - start_s)[those].sum() / solo_s[those].sum())
    # a round's first launch waits for the verdict before it, and on lanes of their own also for the hand-over
    follows = np.concatenate(([False], (verifies & alone)[:-1])) & (drafts | (verifies & ~drafts.any())) & ~prompts
    gaps_s, expected_s = (start_s - before_s)[follows], host.completion_s + host.launch_s + handed * host.handoff_s
    if len(gaps_s) >= FEWEST and expected_s > 0:
        found["pace_host"] = float(np.clip(np.median(gaps_s) / expected_s, LEAST, MOST))
    return found
