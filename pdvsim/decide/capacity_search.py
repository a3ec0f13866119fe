"""Searches for the rates that architectures hold: all in step, one rate at a time each.

The margin of a rate is the logarithm of the head-room of its run, and so tells how far the edge is (`find_edge`). A
coarse search of each architecture's first seed starts from the formula, in short runs and then in longer ones. It gives
the rate at which settings are tuned, and the length that runs need. Then the first seeds are searched. The others start
from their rates and slopes, and often end with one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pdvsim.bench.length import CLOSE, ROUNDS, mean_turns, needed_length, service_s
from pdvsim.bench.pool import Row
from pdvsim.decide.capacity import Capacities, Case, Plan
from pdvsim.decide.edge import Bracketing, Edge, Ends, find_edge, lockstep
from pdvsim.decide.formula import Formula
from pdvsim.decide.goal import attained
from pdvsim.decide.runs import Bench, conversation_output_tokens, keeps_up, mean_output_tokens, saturated
from pdvsim.decide.space import with_best_length
from pdvsim.decide.tune import Search, tuned
from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.metrics.steady import Length, first_uses, rate_length

WIDE, NARROW = 0.15, 0.06  # first step of a search, as a logarithm: from the formula's rate, and from a coarse one
COARSE, COARSE_SHARE, FEW = 0.1, 0.25, 100  # the coarse search: tolerance, what of a run it measures, at least
BEYOND = 1.1  # times that rate, settings are compared: those that hold more have a shorter queue there
OPEN = 0.95  # of what a saturated server delivers, where a search starts
FIRST_GUESS = 0.75  # time in service, relative to that of a saturated server
REACH = math.log(500)  # search range around the starting rate; below it requests hardly overlap
STEEPNESS = 2.0  # head-room falls with about this power of the rate; used until two rates are known
FAR_OFF = 0.5  # beyond this logarithm a head-room gives only the direction
TRUST = 0.03  # the edge is extrapolated over at most this logarithm of the rate, and the tolerance
LEAST_STEEP = 0.5


def find_capacities(plan: Plan, bench: Bench, gpu_hour_usd: float | None = None) -> Capacities:
    """Tune each architecture, then search all cases. Ctrl-C keeps the searches that have finished."""
    before, edges, interrupted = bench.runs, dict[Case, Edge](), False
    try:
        plan, rates = _prepared(plan, bench)
        _search(plan, bench, rates, NARROW, edges)
    except KeyboardInterrupt:
        interrupted = True
    steep = {
        arch: steepness((of for case, of in edges.items() if case[0] == arch), plan.tolerance) for arch in plan.archs
    }
    done = [case for case in plan.cases() if case in edges]
    rows = [_row(plan, bench, case, edges[case], gpu_hour_usd) | {"steepness": steep[case[0]]} for case in done]
    return Capacities(plan, gpu_hour_usd, rows, bench.runs - before, interrupted)


def bracket(start: float, step: float, tolerance: float, power: float = 0.0) -> Bracketing:
    """Search over rates that are powers of 1 + `tolerance`, so that searches that need the same run share it.

    `power` is that of the rate with which head-room falls, if another search showed it.
    """
    grid = math.log1p(tolerance)
    first, reach = round(math.log(start) / grid), math.ceil(REACH / grid) + 2
    limits, stride, slope = Ends(first - reach, first + reach), max(1, round(step / grid)), (power or STEEPNESS) * grid
    return find_edge(first, limits, stride, 2, slope, FAR_OFF, min(1.0, TRUST / grid), known=power > 0)


def steepness(edges: Iterable[Edge], tolerance: float) -> float:
    """The power of the rate with which head-room falls near the held rate: the least over the searches of seeds.

    A relative error of a latency changes the rate by that error divided by this power. It is 1 if no search has two
    runs that show it.
    """
    shown = (edge for edge in edges if sum(abs(margin) < FAR_OFF for margin in edge.tried.values()) > 1)
    return max(LEAST_STEEP, min((edge.slope / math.log1p(tolerance) for edge in shown), default=1.0))


def _prepared(plan: Plan, bench: Bench) -> tuple[Plan, dict[Arch, float]]:
    """The plan with tuned settings and the length that runs need, and about the rate that each architecture holds."""
    cold, settled, edges = first_uses(plan.base.traffic) > 0, False, dict[Case, Edge]()
    coarse = replace(plan, num_runs=1, tolerance=COARSE, coarse=True, least=min(FEW, plan.least))
    cases = {case[0]: case for case in coarse.cases()}
    starts = {arch: _start(coarse, case, bench) for arch, case in cases.items()}
    coarse = coarse.with_servers({arch: at.server for arch, at in starts.items()})
    rates = {arch: at.traffic.request_rate for arch, at in starts.items()}
    fastest = max((at.traffic for at in starts.values()), key=lambda traffic: traffic.request_rate)
    full_s = min(service_s(_saturated(coarse, arch, bench)) for arch in cases)
    length = rate_length(fastest, mean_turns(fastest), FIRST_GUESS * full_s)
    for share in (COARSE_SHARE, *[1.0] * ROUNDS):
        if settled:
            break
        coarse = replace(coarse, length=length.short(share, coarse.least))
        _search(coarse, bench, rates, WIDE, edges)
        rates |= {arch: coarse.rate(edges[case].root) for arch, case in cases.items() if holds(edges[case])}
        runs = [coarse.experiment(case, coarse.rate(at)) for case in edges for at in _deciding(edges[case], cold)]
        lengths = [needed_length(run, row) for run, row in zip(runs, bench.rows(runs), strict=True)]
        length = Length(*map(max, zip(*lengths, strict=True)))
        settled = share == 1 and (not cold or length.total <= CLOSE * coarse.length.total)
    plan = replace(plan, length=length)
    if plan.tuned_over is None:
        return plan, rates
    search = Search(replace(plan.goal, objective="headroom"), plan.tuned_over, plan.tolerance)
    beyond = [plan.experiment(case, BEYOND * rates[arch]) for arch, case in cases.items()]
    best = tuned(search, beyond, bench, alone=True)
    return plan.with_servers({arch: mine[arch].server for arch, mine in zip(cases, best, strict=True)}), rates


def _start(plan: Plan, case: Case, bench: Bench) -> Experiment:
    """Where the search of a case starts: below saturation, or at the lower rate at which the formula sees TPOT in time.

    If settings are tuned, the batch limit is the largest and the draft length the formula's.
    """
    at, levels = plan.experiment(case, 1.0), plan.goal.levels_ms.items()
    level_s = min((level / 1e3 for name, level in levels if name.endswith("tpot")), default=math.inf)
    lengths: Sequence[int] = (at.server.num_speculative_tokens,)
    if plan.tuned_over is not None:
        roomy = replace(at, server=replace(at.server, max_num_seqs=max(plan.tuned_over.max_num_seqs)))
        lengths = plan.tuned_over.lengths(at)
        at = replace(at, server=with_best_length(saturated(roomy), lengths).server)
        plan = plan.with_servers({case[0]: at.server})
    most = OPEN * _most_held(plan, case[0], at, bench)
    for part in (1.0, 1.1, 1.25, 1.5, 2.0, 3.0):
        traffic = replace(at.traffic, request_rate=most / part, use_trace_timestamps=False)
        there = with_best_length(replace(at, traffic=traffic), lengths)
        if Formula(there).at(there.longest_draft).seconds_per_token <= level_s:
            return there
    return replace(at, traffic=replace(at.traffic, request_rate=most))


def _saturated(plan: Plan, arch: Arch, bench: Bench) -> Row:
    """A run of an architecture's servers with requests always waiting."""
    [row] = bench.rows([saturated(plan.goal.prepared(plan.server_of(arch)))])
    return row


def _most_held(plan: Plan, arch: Arch, run: Experiment, bench: Bench) -> float:
    """The throughput of an architecture's servers when saturated: no higher rate can be held, whatever a run shows.

    It is measured in output tokens, which one run gives more precisely than requests, as their lengths vary: those
    of `run`.
    """
    return float(_saturated(plan, arch, bench)["output_throughput"]) / mean_output_tokens(run.traffic)


def _search(plan: Plan, bench: Bench, rates: Mapping[Arch, float], step: float, edges: dict[Case, Edge]) -> None:
    """Complete the searches, filling the edges; every step is one batch of runs.

    The first seed starts from these rates, the others from its edge and slope.
    """
    seed, grid = plan.base.traffic.seed, math.log1p(plan.tolerance)

    def judge(asked: dict[Case, int]) -> Iterator[float]:
        runs = {case: plan.experiment(case, plan.rate(place)) for case, place in asked.items()}
        for (case, run), row in zip(runs.items(), bench.rows(list(runs.values())), strict=True):
            yield _margin(plan, row, _most_held(plan, case[0], run, bench) / plan.rate(asked[case]))

    lockstep({(arch, seed): bracket(rate, step, plan.tolerance) for arch, rate in rates.items()}, judge, edges)
    again = {}
    for arch, number in plan.cases():
        edge = edges[arch, seed]
        start, power = (plan.rate(edge.root), edge.slope / grid) if holds(edge) else (rates[arch], 0.0)
        if number != seed:
            again[arch, number] = bracket(start, grid, plan.tolerance, power)
    lockstep(again, judge, edges)


def _margin(plan: Plan, row: Row, most: float) -> float:
    """Logarithm of the head-room of a run, no more than to the saturated rate; only its sign if the queue grows.

    `most` is the saturated rate over that of the run. In a coarse search an inconclusive run counts as held if it kept
    up.
    """
    room = math.log(min(max(min(plan.goal.headrooms(row).values()), 1e-9), 1e9))
    if not plan.goal.attains(row):
        return max(min(room, -1e-3), -FAR_OFF)
    stable = row["stability"] == "stable" or (plan.coarse and keeps_up(row))
    left = STEEPNESS * math.log(most)
    return min(max(room, 1e-3), left, FAR_OFF) if stable and left > 0 else -FAR_OFF


def _row(plan: Plan, bench: Bench, case: Case, edge: Edge, gpu_hour_usd: float | None) -> Row:
    """The result of a search, with the metrics and the cost at the rate held."""
    (arch, seed), rate = case, plan.rate(edge.root) if holds(edge) else 0.0
    experiment = plan.experiment(case, plan.rate(nearest(edge)))
    [run] = bench.rows([experiment])
    tokens_per_s = rate * mean_output_tokens(experiment.traffic)
    usd = math.nan
    if gpu_hour_usd and rate:
        usd = gpu_hour_usd * plan.gpus(arch) / (tokens_per_s * 3600)
    failed = edge.high in edge.tried or edge.root < edge.high - 1
    above = plan.rate(min(edge.high, edge.root + 1))
    below, limit = _beyond(plan, bench, case, edge, above) if failed else (rate, "nothing")
    talk = conversation_output_tokens(experiment.traffic)
    return {
        "arch": arch,
        "gpus": plan.gpus(arch),
        "seed": seed,
        "rate": rate,
        "failed_rate": above if failed else math.inf,
        "may_hold": below,
        "attainment": attained(run),
        "limited_by": limit,
        "output_tokens_per_s": tokens_per_s,
        "usd_per_million_output_tokens": usd * 1e6,
        **({"usd_per_conversation": usd * talk} if experiment.traffic.converses else {}),
        **{name: run[name] for name in ("completed", "total_input_tokens", "profile", "foundation")},
        "forward_error_bar": run.get("forward_error_bar"),
        **{name: value for name, value in run.items() if name.startswith("outside_measured")},
    }


def _beyond(plan: Plan, bench: Bench, case: Case, edge: Edge, above: float) -> tuple[float, str]:
    """Upper limit of the capacity, and what limits it.

    The limit is the rate `above`, or the saturated one if the run beyond the edge was inconclusive.
    """
    place = nearest(edge, failing=True)
    run = plan.experiment(case, plan.rate(place))
    [row] = bench.rows([run])
    rooms, margin = plan.goal.headrooms(row), edge.tried[place]
    missed = [name for name, room in rooms.items() if room < 1]
    if margin > 0:  # extrapolated: by the head-room, or by the distance to the saturated rate
        level = min(rooms, key=rooms.__getitem__)
        missed = [level if math.log(rooms[level]) <= margin + 1e-3 else "queue"]
    unclear = margin <= 0 and plan.goal.attains(row) and row["stability"] == "inconclusive"
    below = max(above, _most_held(plan, case[0], run, bench)) if unclear else above
    return below, "+".join(missed) or ("queue" if plan.goal.attains(row) else "levels together")


def holds(edge: Edge) -> bool:
    """Whether any rate is held."""
    return edge.low in edge.tried or edge.root > edge.low


def _deciding(edge: Edge, cold: bool) -> list[int]:
    """The places whose runs must be long enough: the highest that is held.

    With `cold` caches also the next one, which may have failed by the queue of the start.
    """
    held = sorted(place for place, margin in edge.tried.items() if margin > 0)[-1:] or [min(edge.tried)]
    return [*held, *([edge.high] if cold and edge.high in edge.tried else [])]


def nearest(edge: Edge, failing: bool = False) -> int:
    """The place that ran nearest to an edge; one beyond it, if one just beyond it ran and `failing`."""
    near = [place for place, margin in edge.tried.items() if margin <= 0 and place - edge.root < 2] if failing else []
    return min(near or edge.tried, key=lambda place: abs(place - edge.root))
