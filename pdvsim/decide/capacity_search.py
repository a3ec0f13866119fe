"""Searches for the rates that architectures hold: all cases in parallel, one rate at a time each.

The margin of a rate is the logarithm of the head-room of its run, and so tells how far the edge is (`find_edge`). The
first seed of each architecture starts from the formula and takes longer runs as it gets closer. The other seeds start
from its rate and slope, and often end with one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from pdvsim.bench.length import service_s
from pdvsim.bench.pool import Row
from pdvsim.decide.capacity import Capacities, Case, Plan
from pdvsim.decide.edge import Bracketing, Edge, Ends, find_edge, lockstep
from pdvsim.decide.formula import Formula
from pdvsim.decide.goal import attained
from pdvsim.decide.runs import (
    Bench,
    conversation_output_tokens,
    delivered_tokens_per_s,
    keeps_up,
    mean_output_tokens,
    saturated,
)
from pdvsim.decide.space import Space, with_best_length
from pdvsim.decide.tune import Search, tuned
from pdvsim.sim.config import Arch, Experiment

WIDE, NARROW = 0.15, 0.06  # largest first step of a search, as a logarithm; the second if the edge is about known
COARSE = 0.1  # tolerance of the search before tuning
BEYOND = 1.05  # times that rate, settings are compared: those that hold more have a shorter queue there
COARSE_SHARE = 0.25  # of what a run measures, for tuning
OPEN = 0.95  # of what a saturated server delivers, where a search starts
FIRST_GUESS = 0.75  # time in service, relative to that of a saturated server
PILOTS = 2  # seeds searched first, if there is one architecture: both cores are busy
ROUNDS = 2  # searches: a first look, and one in runs as long as it showed to be needed
LOOK = 0.1  # the first look, in shorter runs, ends within this logarithm of the rate
REACH = math.log(500)  # search range around the starting rate; below it requests hardly overlap
ROOMY = 1.5  # head-room at a rate that is held, from which its levels do not limit it
STEEPNESS = 2.0  # head-room falls with about this power of the rate; used until two rates are known
FAR_OFF = 0.5  # beyond this logarithm a head-room gives only the direction
TRUST = 0.03  # the edge is extrapolated over at most this logarithm of the rate, and 1.5 times the tolerance
LEAST_STEEP = 0.5
NEAR = 0.1  # largest logarithm of a rate over the held one at which head-rooms are used for the slope


def search(start: float, step: float, tolerance: float, known: float = 0.0, width: float = 0.0) -> Bracketing:
    """Search over rates that are powers of 1 + `tolerance`, so that searches that need the same run share it.

    `known` is the power of the rate with which head-room falls, if another search showed it. A first look ends within
    `width`, a logarithm.
    """
    grid = math.log1p(tolerance)
    first, reach = round(math.log(start) / grid), math.ceil(REACH / grid) + 2
    limits, stride = Ends(first - reach, first + reach), max(1, round(step / grid))
    slope, trust, wide = (known or STEEPNESS) * grid, min(1.5, TRUST / grid), max(1, int(width / grid))
    return find_edge(first, limits, stride, 2, slope, FAR_OFF, trust, known > 0, wide)


def steepness(edges: Iterable[Edge], tolerance: float) -> float:
    """The power of the rate with which head-room falls near the held rate, from the searches of several seeds.

    A relative error of a latency changes the rate by that error divided by this power. To allow for noise it is the
    slope minus two standard errors, at least `LEAST_STEEP`; 1 with too few runs.
    """
    grid = math.log1p(tolerance)
    near = [
        [(at * grid, m) for at, m in e.tried.items() if abs(m) < FAR_OFF and abs(at - e.root) * grid < NEAR]
        for e in edges
    ]
    centred = [np.subtract(points, np.mean(points, axis=0)) for points in near if len(points) > 1]
    free = sum(map(len, centred)) - len(centred) - 1
    if free < 1:
        return 1.0
    rates, rooms = np.concatenate(centred).T
    slope = rates @ rooms / (rates @ rates)
    left = rooms - slope * rates
    return float(max(LEAST_STEEP, -slope - 2 * np.sqrt(left @ left / free / (rates @ rates))))


def find_capacities(plan: Plan, bench: Bench, gpu_hour_usd: float | None = None) -> Capacities:
    """Search all cases in parallel, one rate at a time each. Ctrl-C keeps the searches that have finished."""
    searches, before, interrupted = _Searches(plan, bench, plan.tolerance), bench.runs, False
    try:
        searches.run()
    except KeyboardInterrupt:
        interrupted = True
    edges, plan = searches.edges, searches.plan
    steep = {
        arch: steepness((of for case, of in edges.items() if case[0] == arch), plan.tolerance) for arch in plan.archs
    }
    rows = [searches.row(case, gpu_hour_usd) | {"steepness": steep[case[0]]} for case in plan.cases() if case in edges]
    return Capacities(plan, gpu_hour_usd, rows, bench.runs - before, interrupted)


@dataclass
class _Searches:
    """The searches of a plan, and the edges of those that have finished."""

    plan: Plan
    bench: Bench
    tolerance: float
    edges: dict[Case, Edge] = field(default_factory=dict)

    def run(self) -> None:
        """Tune, search the first seed of every architecture, then the other seeds."""
        first = self.plan.base.traffic.seed
        if self.plan.space is not None and "max_num_seqs" in self.plan.space.kinds():
            roomy = {arch: self._roomy(arch, self.plan.space) for arch in self.plan.archs}
            self.plan = replace(self.plan, tuned=roomy)
        plan = self.plan
        loaded = self._saturated(plan.archs)
        self.plan = plan = replace(plan, service_s=max(plan.service_s, FIRST_GUESS * min(map(service_s, loaded))))
        rates = {arch: self._predicted(arch) for arch in plan.archs}
        step = WIDE
        if plan.space is not None and plan.space.kinds(plan.archs):
            rates, step = self._tuned(plan.space, rates), NARROW
        pilots = range(first, first + (1 if len(plan.archs) > 1 else min(PILOTS, plan.num_runs)))
        starts = {(arch, seed): rate for arch, rate in rates.items() for seed in pilots}
        self._settle(starts, step)
        seeds = {arch: self.edges[arch, first] for arch in plan.archs}
        rest = [case for case in plan.cases() if case not in self.edges]
        self._search({case: self._again(seeds[case[0]]) for case in rest})

    def _rate(self, place: float) -> float:
        return float((1 + self.tolerance) ** place)

    def _again(self, edge: Edge) -> Bracketing:
        """A search that continues from an edge that is about known."""
        known = edge.slope / math.log1p(self.tolerance) if edge.slope > 0 and edge.root > edge.low else 0.0
        if not holds(edge):  # the lowest rate again
            return find_edge(edge.high, Ends(edge.low, edge.high + 1), far=0)
        return search(self._rate(edge.root), self.tolerance, self.tolerance, known)

    @property
    def _level_s(self) -> float:
        """The lowest level of TPOT."""
        levels = self.plan.goal.levels_ms.items()
        return min((level / 1e3 for name, level in levels if name.endswith("tpot")), default=math.inf)

    def _roomy(self, arch: Arch, space: Space) -> Experiment:
        """An architecture's settings with the largest batches that the formula sees meet the level of TPOT."""
        at, one = self.plan.experiment((arch, self.plan.base.traffic.seed), 1.0), self.plan.server_of(arch)
        limits = sorted(space.max_num_seqs)
        for limit in reversed(limits):
            server = replace(at.server, max_num_seqs=limit)
            full = with_best_length(saturated(replace(at, server=server)), space.lengths(at))
            if Formula(full).at(full.longest_draft).row_s <= self._level_s:
                return replace(one, server=full.server)
        return replace(one, server=replace(at.server, max_num_seqs=limits[0]))

    def _predicted(self, arch: Arch) -> float:
        """Somewhat less than a saturated server delivers, or the lower rate at which the formula sees TPOT in time."""
        at = self.plan.experiment((arch, self.plan.base.traffic.seed), 1.0)
        most = OPEN * self._most_held((arch, at.traffic.seed), 1.0)

        def predicted_s(rate: float) -> float:
            there = replace(at, traffic=replace(at.traffic, request_rate=rate, use_trace_timestamps=False))
            return Formula(there).at(at.longest_draft).seconds_per_token

        rates = [most / part for part in (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)]
        return next((rate for rate in rates if predicted_s(rate) <= self._level_s), most)

    def _settle(self, starts: dict[Case, float], step: float) -> None:
        """Search, and go on in longer runs while those near the edge were too short.

        Where caches start cold, runs beyond the edge must be long enough too: they may have failed by the queue of the
        start. All runs at a rate have one length.
        """
        searches = {case: search(start, step, self.tolerance, width=LOOK) for case, start in starts.items()}
        for last in (*[False] * (ROUNDS - 1), True):
            self._search(searches, shorter=not last)
            runs = [(case, place) for case in starts for place in self._deciding(self.edges[case])]
            rows = self.bench.rows([self._experiment(*run) for run in runs])
            if last or (all(map(self.plan.suffices, rows)) and all(map(self._ended, starts))):
                return
            self.plan = self.plan.lengthened(rows)
            searches = {case: self._again(self.edges.pop(case)) for case in starts}

    def _ended(self, case: Case) -> bool:
        """Whether a search went on until its places were adjacent, or its edge was extrapolated."""
        edge = self.edges[case]
        return edge.high - edge.low == 1 or min(abs(place - edge.root) for place in edge.tried) < 1.5

    def _experiment(self, case: Case, place: float) -> Experiment:
        return self.plan.experiment(case, self._rate(place))

    def _deciding(self, edge: Edge) -> list[int]:
        """The places whose runs must be long enough: the highest that is held; with cold caches also the next."""
        held = sorted(place for place, margin in edge.tried.items() if margin > 0)[-1:]
        return [*held, *([edge.high] if self.plan.starts_cold and edge.high in edge.tried else [])]

    def _tuned(self, space: Space, rates: dict[Arch, float]) -> dict[Arch, float]:
        """Tune each architecture just beyond the rate that it holds, which is returned.

        The rate is first searched coarsely, in shorter runs, with the draft length that the formula predicts. If no
        level limits it, the settings with the highest throughput of a saturated server are taken.
        """
        plan, seed = self.plan, self.plan.base.traffic.seed
        placed = {arch: plan.experiment((arch, seed), rate) for arch, rate in rates.items()}
        guesses = {
            arch: replace(plan.server_of(arch), server=with_best_length(at, space.lengths(at)).server)
            for arch, at in placed.items()
        }
        coarse = _Searches(replace(plan, tuned=guesses, share=COARSE_SHARE), self.bench, COARSE)
        coarse._search({(arch, seed): search(rate, WIDE, COARSE) for arch, rate in rates.items()}, shorter=True)
        servers: dict[Arch, Experiment] = {}
        for objective in ("headroom", "throughput"):
            mine = [case for case in coarse.edges if coarse._queues(case) == (objective == "throughput")]
            places = [plan.experiment(case, BEYOND * coarse._rate(coarse.edges[case].root)) for case in mine]
            if objective == "throughput":
                places = [saturated(place) for place in places]
            tuning = Search(replace(plan.goal, objective=objective), space, plan.tolerance)
            best = tuned(tuning, places, self.bench, alone=True) if places else []
            servers |= {
                arch: replace(plan.server_of(arch), server=best[at][arch].server) for at, (arch, _) in enumerate(mine)
            }
        self.plan = replace(plan, tuned=servers)
        return {
            arch: coarse._rate(edge.root) if holds(edge) else rates[arch] for (arch, _), edge in coarse.edges.items()
        }

    def _queues(self, case: Case) -> bool:
        """Whether not a level but the throughput limits a case: far from every level, the next rate is too high."""
        edge = self.edges[case]
        below = [place for place, margin in edge.tried.items() if margin > 0]
        rows = self.bench.rows([self._experiment(case, place) for place in sorted(below)[-1:]])
        return any(min(self.plan.goal.headrooms(row).values()) > ROOMY for row in rows)

    def _search(self, searches: dict[Case, Bracketing], shorter: bool = False) -> None:
        """Complete all searches, filling the edges; every step is one batch of runs.

        With `shorter` an inconclusive run that is too short counts as held for now.
        """

        def judge(asked: dict[Case, int]) -> Iterator[float]:
            rows = self.bench.rows([self._experiment(*place) for place in asked.items()])
            for (case, place), row in zip(asked.items(), rows, strict=True):
                yield self._margin(case, self._rate(place), row, shorter)

        lockstep(searches, judge, self.edges)

    def _margin(self, case: Case, rate: float, row: Row, shorter: bool) -> float:
        """Logarithm of the head-room at a rate, no more than to the saturated rate; only its sign if a queue grows."""
        goal, room = self.plan.goal, min(self.plan.goal.headrooms(row).values())
        unclear = shorter and not self.plan.suffices(row) and keeps_up(row)
        if goal.attains(row):
            stable = unclear or row["stability"] == "stable"
            left = STEEPNESS * math.log(self._most_held(case, rate) / rate)
            return min(max(math.log(min(room, 1e9)), 1e-3), left, FAR_OFF) if stable and left > 0 else -FAR_OFF
        return max(min(math.log(max(room, 1e-9)), -1e-3), -FAR_OFF)

    def _saturated(self, archs: Iterable[Arch]) -> list[Row]:
        """A run of each architecture's servers with requests always waiting."""
        return self.bench.rows([saturated(self.plan.goal.prepared(self.plan.server_of(arch))) for arch in archs])

    def _most_held(self, case: Case, rate: float) -> float:
        """The throughput of a case's servers when saturated: no higher rate can be held, whatever a run shows.

        It is measured in output tokens, which one run gives more precisely than requests, as their lengths vary: those
        of the run at `rate`.
        """
        [row] = self._saturated([case[0]])
        return float(row["output_throughput"]) / mean_output_tokens(self.plan.experiment(case, rate).traffic)

    def row(self, case: Case, gpu_hour_usd: float | None) -> Row:
        """The result of a search, with the metrics and the cost at the rate held."""
        plan, (arch, seed), edge = self.plan, case, self.edges[case]
        rate = self._rate(edge.root) if holds(edge) else 0.0
        failed = edge.high in edge.tried or edge.root < edge.high - 1
        experiment = self._experiment(case, nearest(edge))
        [run] = self.bench.rows([experiment])
        faster = rate / self._rate(nearest(edge))
        tokens_per_s = faster * delivered_tokens_per_s(experiment, run)
        below, limit = self._beyond(case) if failed else (rate, "nothing")
        hourly_usd, traffic = gpu_hour_usd and gpu_hour_usd * plan.gpus(arch), experiment.traffic
        usd = hourly_usd / (tokens_per_s * 3600) * 1e6 if hourly_usd and tokens_per_s else math.nan
        per_talk = (
            {"usd_per_conversation": usd / 1e6 * conversation_output_tokens(traffic)} if traffic.converses else {}
        )
        return {
            "arch": arch,
            "gpus": plan.gpus(arch),
            "seed": seed,
            "rate": rate,
            "failed_rate": self._rate(min(edge.high, edge.root + 1)) if failed else math.inf,
            "may_hold": below,
            "attainment": attained(run),
            "limited_by": limit,
            "output_tokens_per_s": tokens_per_s,
            "usd_per_million_output_tokens": usd,
            **per_talk,
            "completed": run["completed"],
            "total_input_tokens": run["total_input_tokens"],
            "profile": run["profile"],
            "foundation": run["foundation"],
            "forward_error_bar": run.get("forward_error_bar"),
            **{name: value for name, value in run.items() if name.startswith("outside_measured")},
        }

    def _beyond(self, case: Case) -> tuple[float, str]:
        """Upper limit of the capacity, and what limits it.

        The limit is that of the search, or the saturated rate if the run beyond the edge was inconclusive.
        """
        edge, goal = self.edges[case], self.plan.goal
        place = nearest(edge, failing=True)
        [run] = self.bench.rows([self._experiment(case, place)])
        unclear = edge.tried[place] <= 0 and goal.attains(run) and run["stability"] == "inconclusive"
        rooms = goal.headrooms(run)
        missed = [name for name, room in rooms.items() if room < 1]
        if edge.tried[place] > 0:  # extrapolated: by the head-room, or by the distance to the saturated rate
            level = min(rooms, key=rooms.__getitem__)
            missed = [level if math.log(rooms[level]) <= edge.tried[place] + 1e-3 else "queue"]
        above = self._rate(min(edge.high, edge.root + 1))
        below = max(above, self._most_held(case, above)) if unclear else above
        return below, "+".join(missed) or ("queue" if goal.attains(run) else "levels together")


def holds(edge: Edge) -> bool:
    """Whether any rate is held."""
    return edge.low in edge.tried or edge.root > edge.low


def nearest(edge: Edge, failing: bool = False) -> int:
    """The place that ran nearest to an edge; one beyond it, if one just beyond it ran and `failing`."""
    near = [place for place, margin in edge.tried.items() if margin <= 0 and place - edge.root < 2] if failing else []
    return min(near or edge.tried, key=lambda place: abs(place - edge.root))
