"""The speed of a machine relative to the one that a profile was measured on.

Before its clock starts, `realrun` serves some warm-up requests. Its record contains their launches that ran alone, by
shape, as `pace_launches`: how many, the cached tokens they read and the seconds they took. A profile prices these
launches, so the ratio of both is the pace relative to any profile, also to one that was fitted later. Earlier records
have ratios to the profile of their day instead: `pace_target` (target forwards) and `pace_draft` (drafts).
`pace_host_s` is the host time between two launches of few rows, `pace_row_s` the additional host time per row.

`pdvsim calibrate --from-bench` finds the same of another engine from its benchmarks. It gives the overhead of a whole
step, `pace_step_s`, instead of the time between launches: all of it is exposed, once per step. `pace_prompt_s` is the
time per prompt token beyond that of the profile.

Not covered: differences of co-running lanes and of the power limit; of prefills on the machine of a `realrun`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdvsim.sim.core import KINDS
from pdvsim.sim.limits import MAX_TOKENS, Range
from pdvsim.sim.models.specs import ModelSpec, Pair
from pdvsim.sim.prices.costs import CostModel, widest_draft
from pdvsim.sim.prices.host import HostCost
from pdvsim.sim.prices.profile import Profile
from pdvsim.sim.reading import read_json
from pdvsim.sim.records import ROLES, Table

FEWEST_LAUNCHES = 20
LEAST, MOST, MOST_HOST_S = 0.2, 20.0, 1e-2  # ratios, and seconds of the host, that are believed
MOST_STEP_S = 1.0  # of the overhead of a step of an engine
HOST_S = Range(0.0, MOST_HOST_S)
BELIEVED = {  # fields of a `Pace` that a record has
    "target": Range(LEAST, MOST), "draft": Range(LEAST, MOST), "host_s": HOST_S, "row_s": HOST_S,
    "step_s": Range(0.0, MOST_STEP_S), "prompt_s": HOST_S,
}  # fmt: skip
SHAPE = ("rows", "tokens", "steps", "width")
# Of a warm-up's deviation from the profile's host time, what is found in the run after it: least squares over 39 runs
# (studies/README.md). The host's speed wanders by a factor of two within minutes.
HOST_SHARE = 0.37


class TimedLaunches(NamedTuple):
    """Launches of one shape: how many, their cached tokens in all, and their seconds in all."""

    role: int  # its place in ROLES
    rows: int
    tokens: int
    steps: int
    width: int
    launches: int
    context: int
    seconds: float

    def priced_s(self, model: CostModel) -> float:
        """Seconds of the same launches alone by a profile, whose price is linear in the cached tokens."""
        packed = self.tokens if self.tokens < self.rows * (self.width + self.steps - 1) else 0  # of unequal length
        cost = model.price(self.rows, self.width, self.steps, packed=packed)
        return self.launches * cost.seconds_0 + self.context * cost.seconds_1


class Pace(NamedTuple):
    """Measured launches of a warm-up, or ratios to the profiled machine; host seconds between launches and per row."""

    target: float | None = None  # None: not known as a ratio
    draft: float | None = None
    host_s: float | None = None  # None: as in the profile
    row_s: float = 0.0
    step_s: float | None = None  # overhead of a step of another engine, in place of `host_s`
    prompt_s: float = 0.0  # per prompt token that its target prefills
    launches: tuple[TimedLaunches, ...] = ()

    def ratios(self, profile: Profile, pair: Pair) -> dict[str, float]:
        """Return by model its time over that on the profiled machine, without models that were not timed."""
        ratios: dict[str, float] = {}
        for spec, ratio in ((pair.draft, self.draft), (pair.target, self.target)):
            if not spec.on_host and spec.name in profile.models:
                ratio = self._timed(profile, spec, ROLES.index("target" if spec is pair.target else "draft")) or ratio
                if ratio is not None:
                    ratios[spec.name] = ratio
        return ratios

    def _timed(self, profile: Profile, spec: ModelSpec, role: int) -> float | None:
        timed = [launches for launches in self.launches if launches.role == role]
        if not timed:
            return None
        model = profile.cost_model(spec)
        ratio = sum(each.seconds for each in timed) / sum(each.priced_s(model) for each in timed)
        if not LEAST <= ratio <= MOST:
            raise ValueError(f"pace_launches: {spec.name} took {ratio:.3g} times as long as in profile {profile.name}")
        return ratio * profile.in_service.get(spec.name, 1.0)

    def applied(self, profile: Profile, pair: Pair) -> Profile:
        """The profile of such a machine."""
        fits = dict(profile.models)
        for name, ratio in self.ratios(profile, pair).items():
            fits[name] = profile.models[name].scaled(ratio / profile.in_service.get(name, 1.0))
        if self.prompt_s and pair.target.name in fits:
            fits[pair.target.name] = replace(fits[pair.target.name], prompt_token_s=self.prompt_s)
        host = profile.host
        if self.host_s is not None:
            between_s = host.between_s + HOST_SHARE * (self.host_s - host.between_s)
            row_s = host.row_s + HOST_SHARE * (self.row_s - host.row_s)
            host = replace(host.scaled(between_s), row_s=row_s, join_s=host.join_s)
        if self.step_s is not None:
            host = replace(host, launch_s=0.0, completion_s=self.step_s, row_s=self.row_s, join_s=0.0)
        return replace(profile, models=fits, host=host)


# read ----------------------------------------------------------------------------------------------------------------


def read_pace(path: str | Path) -> Pace:
    """Return the pace in a result of `realrun` or `calibrate --from-bench`; a ValueError if it has none."""
    document = read_json(Path(path))
    pace = pace_in(document) if isinstance(document, dict) else None
    if pace is None:
        raise ValueError(f"--machine {path}: not a result of realrun with pace_launches, or of calibrate --from-bench")
    return pace


def pace_in(meta: Mapping[str, Any]) -> Pace | None:
    """Return the pace in a run's own record; None where it has none."""
    given = {name: meta[f"pace_{name}"] for name in BELIEVED if meta.get(f"pace_{name}") is not None}
    if not all(isinstance(value, int | float) and BELIEVED[name].holds(value) for name, value in given.items()):
        return None
    launches = _read_launches(meta.get("pace_launches", []))
    if launches is None or not (launches or "target" in given):
        return None
    return Pace(**given, launches=launches)


def _read_launches(rows: object) -> tuple[TimedLaunches, ...] | None:
    """The recorded launches; None if they are not a table of them."""
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == len(TimedLaunches._fields) for row in rows
    ):
        return None
    launches = tuple(map(TimedLaunches._make, rows))
    for timed in launches:
        *sizes, seconds = timed
        good = all(type(size) is int and 0 <= size <= MAX_TOKENS**2 for size in sizes) and timed.role < len(ROLES)
        if not good or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            return None
        if not (timed.rows and timed.steps and timed.width and timed.launches):
            return None
    return launches


# recorded ------------------------------------------------------------------------------------------------------------


def pace_of(launches: Table, host: HostCost, pair: Pair, handed: bool) -> dict[str, Any]:
    """The pace that the launches of a run show; sizes with too few launches are left out.

    `host` is the profile's, of which a hand-over's share is taken. `handed`: drafts and verifies have their own lanes.
    """
    order = np.argsort(launches["start_s"], kind="stable")
    start_s, end_s, rows, kind = (launches[name][order] for name in ("start_s", "end_s", "rows", "kind"))
    width, steps, tokens = (launches[name][order] for name in ("width", "steps", "tokens"))
    prompts = tokens > rows * (width + steps - 1)
    before_s = np.concatenate(([-np.inf], np.maximum.accumulate(end_s)[:-1]))
    alone = (start_s >= before_s) & (end_s <= np.concatenate((start_s[1:], [np.inf]))) & (end_s > start_s) & (rows > 0)
    drafts, verifies = kind == KINDS.index("draft"), np.isin(kind, [KINDS.index("verify"), KINDS.index("decode")])
    pace: dict[str, Any] = {}
    timed: list[TimedLaunches] = []
    # a draft whose rows lack more tokens has forwards before it that its shape does not show
    priced = {"target": verifies, "draft": drafts & (width <= widest_draft(pair.draft)) & (not pair.draft.on_host)}
    for role, those in priced.items():
        those = those & alone & ~prompts
        if those.sum() >= FEWEST_LAUNCHES:
            timed += _by_shape({name: column[order][those] for name, column in launches.items()}, ROLES.index(role))
    if timed:
        pace["pace_launches"] = [list(each) for each in timed]
    # a round's first launch waits for the verdict before it, and on lanes of their own also for the hand-over
    follows = np.concatenate(([False], (verifies & alone)[:-1])) & (drafts | (verifies & ~drafts.any())) & ~prompts
    gaps_s = (start_s - before_s)[follows]
    sizes, those = np.unique(np.concatenate(([0], rows[:-1]))[follows], return_inverse=True)
    known = [at for at in range(len(sizes)) if (those == at).sum() >= FEWEST_LAUNCHES // 4]
    if known and host.between_s > 0:
        medians_s = [float(np.median(gaps_s[those == at])) for at in known]
        row_s = max(0.0, float(np.polyfit(sizes[known], medians_s, 1)[0])) if len(known) > 1 else 0.0
        few_s = float(np.mean(medians_s)) - row_s * float(np.mean(sizes[known]))
        few_s *= host.between_s / (host.between_s + handed * host.handoff_s)  # without the hand-over
        pace |= {"pace_host_s": min(max(few_s, 0.0), MOST_HOST_S), "pace_row_s": min(row_s, MOST_HOST_S)}
    return pace


def _by_shape(launches: Table, role: int) -> list[TimedLaunches]:
    """Sums over the launches of each shape, to a tenth of a microsecond."""
    shapes, shape_of = np.unique(np.column_stack([launches[name] for name in SHAPE]), axis=0, return_inverse=True)
    counts = np.bincount(shape_of)
    contexts = np.bincount(shape_of, launches["context"])
    seconds = np.bincount(shape_of, launches["end_s"] - launches["start_s"])
    return [
        TimedLaunches._make((role, *map(int, shape), int(count), round(float(context)), round(float(second), 7)))
        for shape, count, context, second in zip(shapes, counts, contexts, seconds, strict=True)
    ]
