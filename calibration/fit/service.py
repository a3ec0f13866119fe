"""Correct a profile for launches in service, which take longer than the same launches timed alone.

`realrun` warms up with batches of 1 to 64 requests. Its results contain the pace of these launches and the host time
between them. The corrected profile contains their medians over all machines, and what a launch that carries prompts
takes the host besides, from the launches of the runs themselves on one lane. The next launch of such a server waits for
the result of the last, so the gap before it is the host's. The speed of a host wanders by a factor of two within
minutes. So a gap before a launch with prompts is compared with the gaps without prompts around it, in runs whose
prompts enter whole. Held-out runs and metrics are not used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.calibration.validate.launches import LAUNCHES, TICK_S
from pdvsim.calibration.validate.served import ServedRun, read_runs
from pdvsim.sim.models.presets import pair
from pdvsim.sim.models.specs import Pair
from pdvsim.sim.prices.pace import Pace, pace_in
from pdvsim.sim.prices.profile import Profile
from pdvsim.sim.reading import read_json, read_table
from pdvsim.sim.records import ROLES
from pdvsim.sim.workload.requests import make_requests

if TYPE_CHECKING:
    import pandas as pd

ONE_LANE = ("autoregressive", "colocated")
LONGEST_GAP_S = 3e-3  # above it the server waited for requests
AROUND, FEWEST = 41, 6  # gaps without prompts that one with prompts is compared with, and the fewest
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


# gaps ----------------------------------------------------------------------------------------------------------------


def gaps_of(run: ServedRun, launches: pd.DataFrame) -> pd.DataFrame:
    """Gaps between a target launch and the next launch: `rows` before, whether prompts are `carried`, and `gap_s`.

    `rest_s` is the median of those around it whose launches, before and after, carry none.
    """
    import pandas as pd

    frame = launches.sort_values("start", kind="stable")
    start_s = frame["start"].to_numpy(float) * TICK_S
    end_s = start_s + frame["span"].to_numpy(float) * TICK_S
    rows, tokens, width, steps = (frame[name].to_numpy(int) for name in ("rows", "tokens", "width", "steps"))
    prompts = tokens > rows * (width + steps - 1)
    target = np.flatnonzero(frame["role"].to_numpy() == ROLES.index("target"))
    before, after = target[:-1], target[1:]
    gap_s = start_s[before + 1] - end_s[before]
    known = (gap_s > 0) & (gap_s < LONGEST_GAP_S)
    gaps = pd.DataFrame({"rows": rows[before], "carried": prompts[after], "read": prompts[before], "gap_s": gap_s})[
        known
    ].reset_index(drop=True)
    quiet = gaps["gap_s"].where(~(gaps["carried"] | gaps["read"]))
    return gaps.assign(run=run.id, rest_s=quiet.rolling(AROUND, center=True, min_periods=FEWEST).median())


def read_gaps(paths: Iterable[str | Path]) -> pd.DataFrame:
    """The gaps of all runs of these files that are on one lane, not held out and have their launches next to them."""
    import pandas as pd

    frames = []
    for path in map(Path, paths):
        table = path.parent / LAUNCHES
        if path.suffix != ".jsonl" or not table.exists():
            continue
        by_run = dict(tuple(read_table(table).to_pandas().groupby("run")))
        for run in read_runs(path):
            server = run.experiment.server
            alone = run.experiment.arch in ONE_LANE and not server.async_scheduling and server.drafted_by != "ngram"
            if alone and not run.held_out and run.id in by_run:
                frames.append(gaps_of(run, by_run[run.id]).assign(whole=_enter_whole(run)))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _enter_whole(run: ServedRun) -> bool:
    """Return whether no prompt is cut into chunks."""
    requests = make_requests(run.experiment.traffic, run.experiment.acceptance)
    return max(request.prompt_tokens for request in requests) <= run.experiment.server.max_num_batched_tokens


def join_s(gaps: pd.DataFrame) -> float:
    """Return how much longer a gap is before a launch that carries prompts: the median; 0 where none was seen."""
    if gaps.empty:
        return 0.0
    more_s = (gaps["gap_s"] - gaps["rest_s"])[gaps["carried"] & gaps["whole"]].dropna()
    return max(0.0, float(more_s.median())) if len(more_s) else 0.0
