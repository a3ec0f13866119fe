"""Correct a profile for launches in service, which take longer than the same launches timed alone.

`realrun` warms up with batches of 1 to 64 requests. Its results contain the pace of these launches and the host time
between them. The corrected profile contains their medians over all machines, and what a launch that carries prompts
takes the host besides, from the launches of the runs themselves (`gaps`). Metrics of the runs are not used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pdvsim.calibration.validate.served import read_runs
from pdvsim.sim.models.presets import pair
from pdvsim.sim.models.specs import Pair
from pdvsim.sim.prices.pace import Pace, pace_in
from pdvsim.sim.prices.profile import Profile
from pdvsim.sim.reading import read_json

WarmUp = tuple[Pair, Pace]


def read_served(paths: Iterable[str]) -> list[WarmUp]:
    """The warm-ups in results of `realrun` or in files of runs; a ValueError if a file has none."""
    warm_ups: list[WarmUp] = []
    for path in paths:
        metas: list[tuple[Pair, Mapping[str, Any]]]
        if path.endswith(".jsonl"):
            metas = [(run.experiment.pair, run.meta) for run in read_runs(path)]
        else:
            document = read_json(Path(path))
            tells = isinstance(document, dict) and "pair" in document
            metas = [(pair(str(document["pair"])), document)] if tells else []
        here = [(served, pace) for served, meta in metas if (pace := pace_in(meta)) is not None]
        if not here:
            raise ValueError(f"--served {path}: no result of realrun with pace_launches")
        warm_ups += here
    return list(dict.fromkeys(warm_ups))  # runs that share a server share its warm-up


def in_service(profile: Profile, served: Iterable[WarmUp], join_s: float = 0.0) -> Profile:
    """The profile with forward and host times of the median machine; models without a warm-up are unchanged.

    `join_s`: what a launch that carries prompts takes the host besides.
    """
    factors: dict[str, list[float]] = defaultdict(list)
    hosts: list[Pace] = []
    for of, pace in served:
        for name, ratio in pace.ratios(profile.covering(of), of).items():
            if name in profile.models:
                factors[name].append(ratio)
        if pace.host_s is not None:
            hosts.append(pace)
    medians = {name: median(ratios) for name, ratios in factors.items()}
    models = profile.models | {name: profile.models[name].scaled(factor) for name, factor in medians.items()}
    host = profile.host
    if hosts:
        row_s = median(pace.row_s for pace in hosts)
        host = replace(host.scaled(median(pace.host_s or 0.0 for pace in hosts)), row_s=row_s)
    host = replace(host, join_s=join_s)
    counts = {"warm_ups": sum(map(len, factors.values())), "hosts": len(hosts)}
    return replace(
        profile, models=models, host=host, in_service=medians, provenance=profile.provenance | {"in_service": counts}
    )
