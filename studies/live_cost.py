"""What `realrun --live` costs the run: `python studies/live_cost.py --runs 6 <flags of realrun>`.

The same run again and again on one rig, in turns: as ever, with `--live` and nobody looking on, and with the process of
`pdvsim live --beside real` looking on, which hears, simulates and makes figures. What draws them is a third process,
and needs bokeh; this needs none. A round ends with a target forward over rows and began with the end of the one before
it; the host's time is what of it the device had nothing to do while requests were there. Differences are paired, turn
by turn.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pdvsim.cli.realrun import RealCommand
from pdvsim.common.options import parse
from pdvsim.live.pace import TICK_S, WINDOW_S, Beside
from pdvsim.live.wire import Broadcast, socket_path
from pdvsim.realrun.machine import Machine
from pdvsim.sim.config import Experiment
from pdvsim.sim.workload.requests import make_requests

WAYS = ("as ever", "--live", "looked on")
FIGURES = {
    "round_ms": "a round (ms)",
    "median_round_ms": "a round, median (ms)",
    "host_ms": "host's time a round (ms)",
    "told_ms": "of it spent on telling, at most (ms)",
}


@dataclass(frozen=True)
class WatchedCommand(RealCommand):
    """Compare runs with and without --live."""

    runs: int = 6  # two or more
    """Turns; each has a run of every way."""


def look_on(pipe: Connection, pair: str | None) -> None:
    """Do what the page's process does, at each run it is told of."""
    pipe.send("ready")
    with suppress(EOFError):
        while True:
            pipe.recv()
            while not socket_path().exists():
                time.sleep(0.01)
            beside, pictures = Beside(pair, WINDOW_S), 0
            while not beside.heard.over:
                began = time.perf_counter()
                beside.tick()
                beside.shown()
                pictures += 1
                time.sleep(max(0.0, TICK_S - (time.perf_counter() - began)))
            pipe.send((pictures, beside.heard.gauge.total_tokens))


def measured(experiment: Experiment, machine: Machine, rig: Any, way: str, page: Connection) -> dict[str, float]:
    """One run."""
    from pdvsim.realrun.site import serve

    watchers: list[Broadcast] = []

    def watched_by(site: Any, client: Any) -> Broadcast:
        watchers.append(Broadcast(site, client))
        return watchers[-1]

    if way == "looked on":
        page.send("look")
    result = serve(experiment, machine, rig=rig, watched_by=None if way == "as ever" else watched_by)
    if way == "looked on":
        pictures, tokens = page.recv()
        assert pictures > 1, "the run was over before the page had looked"
        assert tokens == result.deliveries["tokens"].sum(), "the page has missed something"
    launches = dict(result.launches)
    ends_s = np.sort(launches["end_s"][(launches["role"] == 1) & (launches["rows"] > 0)])
    rounds_ms = np.diff(ends_s) * 1e3
    return {
        "rounds": float(len(rounds_ms)),
        "round_ms": float(rounds_ms.mean()),
        "median_round_ms": float(np.median(rounds_ms)),
        "host_ms": result.meta["host_idle_s_per_round"] * 1e3,
        "told_ms": sum(watcher.cost_s for watcher in watchers) * 1e3 / len(rounds_ms),
    }


def main(argv: list[str]) -> None:
    """Run and print."""
    from pdvsim.realrun.site import prepare

    args = parse(WatchedCommand, argv, "live_cost.py")
    context = get_context("spawn")
    page, theirs = context.Pipe()
    pair = args.experiment.server.pair if args.machine.tiny else None  # one that a profile knows
    context.Process(target=look_on, args=(theirs, pair), daemon=True).start()
    page.recv()
    traffic = args.experiment.traffic
    rig = prepare(args.experiment, args.machine, make_requests(traffic, args.experiment.acceptance))
    short = replace(args.experiment, traffic=replace(traffic, num_prompts=8))
    measured(short, args.machine, rig, "as ever", page)  # warms up
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(args.runs):
        for at in range(len(WAYS)):
            way = WAYS[(turn + at) % len(WAYS)]
            found[way].append(measured(args.experiment, args.machine, rig, way, page))
            print(turn, way, {name: round(value, 4) for name, value in found[way][-1].items()}, flush=True)
    print(f"\n{'':<48}{'median':>10}{'least':>10}{'most':>10}   against as ever, and its standard error")
    for name, words in FIGURES.items():
        base = np.array([run[name] for run in found["as ever"]])
        for way in WAYS:
            values = np.array([run[name] for run in found[way]])
            line = f"{words + ', ' + way:<48}{np.median(values):>10.4f}{values.min():>10.4f}{values.max():>10.4f}"
            if way != "as ever" and base.all():
                more = 100 * (values / base - 1)
                line += f"   {more.mean():+.2f}% ± {more.std(ddof=1) / np.sqrt(len(more)):.2f}"
            print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
