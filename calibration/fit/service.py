"""Forwards and the host as they are in service: launches between others take longer than the same ones timed alone.

Before its clock starts `realrun` serves requests of 1 to 64 at a time, and its results hold what their launches took
over what the profile says, and what the host took between them. A profile for any machine takes the medians over the
machines that served. No figure of a run itself is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pdvsim.calibration.validate.served import read_runs
from pdvsim.sim.core import Pair
from pdvsim.sim.hardware.models import pair
from pdvsim.sim.hardware.pace import Pace, pace_in
from pdvsim.sim.hardware.profile import Profile
from pdvsim.sim.reading import read_json

WarmUp = tuple[Pair, Pace]


def read_served(paths: Iterable[str]) -> list[WarmUp]:
    """The warm-ups of results of `realrun`, or of files of such runs; a ValueError where one tells nothing."""
    found: list[WarmUp] = []
    for path in paths:
        metas: list[tuple[str, Mapping[str, Any]]]
        if path.endswith(".jsonl"):
            metas = [(run.experiment.server.pair, run.meta) for run in read_runs(path)]
        else:
            document = read_json(Path(path))
            metas = [(str(document.get("pair")), document)] if isinstance(document, dict) else []
        here = [(pair(name), pace) for name, meta in metas if (pace := pace_in(meta)) is not None]
        if not here:
            raise ValueError(f"--served {path}: no result of realrun with pace_target")
        found += here
    return list(dict.fromkeys(found))  # runs that share a server share its warm-up


def in_service(profile: Profile, served: Iterable[WarmUp]) -> Profile:
    """The profile with forwards and the host as the median machine has them; other models stay as they are."""
    factors: dict[str, list[float]] = defaultdict(list)
    hosts: list[Pace] = []
    for of, pace in served:
        factors[of.target.name].append(pace.target)
        if pace.draft != 1:
            factors[of.draft.name].append(pace.draft)
        if pace.host_s is not None:
            hosts.append(pace)
    medians = {name: median(found) for name, found in factors.items() if name in profile.models}
    models = profile.models | {name: profile.models[name].scaled(factor) for name, factor in medians.items()}
    host = profile.host
    if hosts:
        row_s = median(pace.row_s for pace in hosts)
        host = replace(host.scaled(median(pace.host_s or 0.0 for pace in hosts)), row_s=row_s)
    told = {"warm_ups": sum(map(len, factors.values())), "hosts": len(hosts)}
    return replace(
        profile, models=models, host=host, in_service=medians, provenance=profile.provenance | {"in_service": told}
    )
