"""The speed of a machine relative to the one that a profile was measured on.

Before its clock starts, `realrun` serves some warm-up requests. Their launches give two ratios of measured time over
the time alone on the profiled machine: `pace_target` (target forwards) and `pace_draft` (drafts). `pace_host_s` is the
host time between two launches of few rows, `pace_row_s` the additional host time per row.

`pdvsim calibrate --from-bench` finds the same of another engine from its benchmarks. It gives the overhead of a whole
step, `pace_step_s`, instead of the time between launches: all of it is exposed, once per step. `pace_prompt_s` is the
time per prompt token beyond that of the profile.

Not covered: differences of co-running lanes and of the power limit; of prefills on the machine of a `realrun`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdvsim.sim.core import KINDS, Pair
from pdvsim.sim.hardware.profile import Profile
from pdvsim.sim.reading import read_json
from pdvsim.sim.records import Table

FEWEST_LAUNCHES = 20
LEAST, MOST, MOST_HOST_S = 0.2, 20.0, 1e-2  # ratios, and seconds of the host, that are believed
MOST_STEP_S = 1.0  # of the overhead of a step of an engine


class Pace(NamedTuple):
    """Times relative to those alone on the profiled machine; host seconds between launches and per row."""

    target: float = 1.0
    draft: float = 1.0
    host_s: float | None = None  # None: as in the profile
    row_s: float = 0.0
    step_s: float | None = None  # overhead of a step of another engine, in place of `host_s`
    prompt_s: float = 0.0  # per prompt token that its target prefills

    def applied(self, profile: Profile, pair: Pair) -> Profile:
        """The profile of such a machine."""
        fits = dict(profile.models)
        for spec, factor in ((pair.draft, self.draft), (pair.target, self.target)):
            if spec.name in fits:
                fits[spec.name] = profile.models[spec.name].scaled(factor / profile.in_service.get(spec.name, 1.0))
        if self.prompt_s and pair.target.name in fits:
            fits[pair.target.name] = replace(fits[pair.target.name], prompt_token_s=self.prompt_s)
        host = profile.host
        if self.host_s is not None:
            host = replace(host.scaled(self.host_s), row_s=self.row_s)
        if self.step_s is not None:
            host = replace(host, launch_s=0.0, completion_s=self.step_s, row_s=self.row_s)
        return replace(profile, models=fits, host=host)


def read_pace(path: str | Path) -> Pace:
    """What a result of `realrun` or of `calibrate --from-bench` says; a ValueError if it says nothing."""
    document = read_json(Path(path))
    pace = pace_in(document) if isinstance(document, dict) else None
    if pace is None:
        raise ValueError(
            f"--machine {path}: not a result of realrun, or of calibrate --from-bench, with pace_target and pace_draft"
        )
    return pace


def pace_in(meta: Mapping[str, Any]) -> Pace | None:
    """What a run's own record says; None where it says nothing."""
    recorded = {name: meta.get(f"pace_{name}") for name in Pace._fields}
    given = {name: value for name, value in recorded.items() if value is not None}
    if "target" not in given or not all(_is_within(name, value) for name, value in given.items()):
        return None
    return Pace(**given)


def _is_within(name: str, value: object) -> bool:
    low, high = (0.0, MOST_HOST_S) if name.endswith("_s") else (LEAST, MOST)
    high = MOST_STEP_S if name == "step_s" else high
    return isinstance(value, int | float) and low <= value <= high


def pace_of(launches: Table, profile: Profile, pair: Pair, handed: bool) -> dict[str, float]:
    """What the launches of a run tell that were priced by a profile; what there are too few of is left out.

    `handed`: drafts and verifies are on lanes of their own.
    """
    order = np.argsort(launches["start_s"], kind="stable")
    start_s, end_s, solo_s, rows, kind = (launches[n][order] for n in ("start_s", "end_s", "solo_s", "rows", "kind"))
    prompts = launches["tokens"][order] > rows * (launches["width"][order] + launches["steps"][order] - 1)
    before_s = np.concatenate(([-np.inf], np.maximum.accumulate(end_s)[:-1]))
    alone = (start_s >= before_s) & (end_s <= np.concatenate((start_s[1:], [np.inf]))) & (solo_s > 0) & (rows > 0)
    drafts, verifies = kind == KINDS.index("draft"), np.isin(kind, [KINDS.index("verify"), KINDS.index("decode")])
    pace: dict[str, float] = {}
    for name, those, spec in (("target", verifies, pair.target), ("draft", drafts, pair.draft)):
        those = those & alone & ~prompts
        if those.sum() >= FEWEST_LAUNCHES:
            ratio = float((end_s - start_s)[those].sum() / solo_s[those].sum())
            pace[f"pace_{name}"] = ratio * profile.in_service.get(spec.name, 1.0)
    # a round's first launch waits for the verdict before it, and on lanes of their own also for the hand-over
    follows = np.concatenate(([False], (verifies & alone)[:-1])) & (drafts | (verifies & ~drafts.any())) & ~prompts
    gaps_s, host = (start_s - before_s)[follows], profile.host
    sizes, those = np.unique(np.concatenate(([0], rows[:-1]))[follows], return_inverse=True)
    known = [at for at in range(len(sizes)) if (those == at).sum() >= FEWEST_LAUNCHES // 4]
    if known and host.between_s > 0:
        medians_s = [float(np.median(gaps_s[those == at])) for at in known]
        row_s = max(0.0, float(np.polyfit(sizes[known], medians_s, 1)[0])) if len(known) > 1 else 0.0
        few_s = float(np.mean(medians_s)) - row_s * float(np.mean(sizes[known]))
        few_s *= host.between_s / (host.between_s + handed * host.handoff_s)  # without the hand-over
        pace |= {"pace_host_s": min(max(few_s, 0.0), MOST_HOST_S), "pace_row_s": min(row_s, MOST_HOST_S)}
    return pace
