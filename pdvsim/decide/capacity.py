"""How much load each architecture holds: the highest request rate within the service levels, by bisection.

Each architecture first finds its own best settings, near the rate that it holds with those that the formula names.

A rate holds in a run if the share asked of the requests (after the warm-up) meets every service level and the run is
labelled stable: an inconclusive run does not count as held. A run at the rate held lasts `LONG` times as long as a
request is in service; a server that starts empty is then full before the warm-up ends. Each replication has a seed and
a search of its own, in which the same requests are squeezed in time; so there is one capacity per seed, an interval
over seeds, and paired differences between architectures. Rates are those of the arrivals drawn, not of the process that
they were drawn from: a seed whose requests happen to come slowly would seem to hold more. Which rate to try next is
guessed from the head-room at those tried; what is found does not rest on the guess.

What it leaves out: runs are finite, so a server slightly beyond its capacity may hold for a while (more --num-prompts
makes that rarer). A share of requests is not exactly monotone in the rate: the rate given held in its run and the one
above it, by the tolerance, did not, but a still higher one might have by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pdvsim.common.outcomes import Row
from pdvsim.common.version import __version__
from pdvsim.decide.bracket import Bisection, Bracket, Held, search, steepness
from pdvsim.decide.contest import Contest, contest
from pdvsim.decide.error import lead_error
from pdvsim.decide.formula import Formula
from pdvsim.decide.goal import Goal, attained
from pdvsim.decide.runs import Bench, at_rate, keeps_up, mean_gap, mean_output_tokens, saturated
from pdvsim.decide.space import Space, settings_text
from pdvsim.decide.text import contest_document, lead_text, lengths_note, positive, threshold_text, vague
from pdvsim.decide.tune import SHORT, Search, tuned
from pdvsim.sim.config import Arch, Experiment, Server
from pdvsim.sim.doubts import vet
from pdvsim.sim.limits import check_list, check_points, check_ranges
from pdvsim.study import output
from pdvsim.study.stats import Interval, interval
from pdvsim.view.table import founded, grid, most_outside

if TYPE_CHECKING:
    import pandas as pd

WIDE_STEP = 1.25  # the first step of a search at the most; each further one may be the square of the one before
COARSE = 0.1  # tolerance of the search near which settings are tuned
NARROW_STEP = 1.06  # the same where another seed's capacity is known: a few percent apart
FILLING = 3  # requests of a run for each that a larger batch holds: with fewer nobody would ever wait for it
LONG = 16  # length of a run in durations of a request, at the rate held
COARSE_LONG = 0.25  # of that where settings are tuned

Case = tuple[Arch, int, int]  # architecture, GPUs, seed


@dataclass(frozen=True)
class Plan:
    """What to find the capacity of."""

    base: Experiment
    archs: tuple[Arch, ...]
    gpus: tuple[int, ...]
    num_runs: int
    goal: Goal
    tolerance: float = 0.02
    warmup_share: float = 0.2
    space: Space | None = None  # settings that each architecture chooses its own from; None: as in the base
    servers: Mapping[Arch, Server] = field(default_factory=dict)  # those that it has chosen

    def __post_init__(self) -> None:
        check_list("arch", self.archs)
        check_list("gpus", self.gpus)
        if not self.goal.levels:
            raise ValueError("capacity is within service levels: give --goodput, e.g. --goodput ttft:500 tpot:50")
        check_ranges(self)
        check_points("GPUs x architectures x runs", len(self.gpus), len(self.archs), self.num_runs)
        for gpus in self.gpus:
            if gpus % self.gpus_a_server:
                raise ValueError(f"gpus must be a multiple of {self.gpus_a_server}, the GPUs of one server, got {gpus}")
        vet(self.experiment(case, 1.0) for case in self.cases())  # an option that is refused is refused now

    @property
    def gpus_a_server(self) -> int:
        return self.base.gpus

    def cases(self) -> list[Case]:
        """Every search."""
        seeds = range(self.base.traffic.seed, self.base.traffic.seed + self.num_runs)
        return [(arch, gpus, seed) for gpus in self.gpus for arch in self.archs for seed in seeds]

    def experiment(self, case: Case, rate: float) -> Experiment:
        """One run: each server sees as many requests however many there are."""
        arch, gpus, seed = case
        servers = gpus // self.gpus_a_server
        traffic = replace(self.base.traffic, seed=seed, num_prompts=servers * self.base.traffic.num_prompts)
        hardware = replace(self.base.hardware, replicas=servers)
        server = self.servers.get(arch, self.base.server)
        scaled = replace(self.base, arch=arch, traffic=traffic, server=server, hardware=hardware)
        return at_rate(self.goal.prepared(scaled, self.warmup_share), rate * mean_gap(traffic))

    def with_prompts(self, num_prompts: int) -> Plan:
        """The same in runs of so many requests per server."""
        return replace(self, base=replace(self.base, traffic=replace(self.base.traffic, num_prompts=num_prompts)))

    def needed(self, case: Case, row: Row) -> int:
        """Requests per server that a run at this row's rate must have, to last `LONG` durations of a request."""
        in_service = float(row["load"]) * (float(row["mean_e2el_ms"]) - float(row["breakdown_ms_queue"])) / 1e3
        return math.ceil(LONG * in_service * self.gpus_a_server / case[1])


@dataclass(repr=False)
class Capacities:
    """What a search found: one row per architecture, number of GPUs and seed."""

    plan: Plan
    gpu_hour_usd: float | None = None
    rows: list[Row] = field(default_factory=list)
    runs: int = 0
    interrupted: bool = False

    def __repr__(self) -> str:
        return capacity_table(self)

    @property
    def points(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self.rows)

    def summary(self) -> list[dict[str, Any]]:
        """One entry per number of GPUs and architecture, with intervals over seeds."""
        entries = []
        for gpus in self.plan.gpus:
            for arch in self.plan.archs:
                rows = self._of(arch, gpus)
                if not rows:
                    continue
                numbers = ("rate", "output_tokens_per_s", "usd_per_million_output_tokens", "attainment")
                settings = ", ".join(settings_text(self.plan.experiment((arch, gpus, 0), 1.0)))
                entry: dict[str, Any] = {"gpus": gpus, "arch": arch, "settings": settings, "replications": len(rows)}
                entry |= {name: interval(row[name] for row in rows) for name in numbers}
                entry["rate"] = _as_known(entry["rate"], interval(row["may_hold"] for row in rows).mean)
                entry["held_in"] = sum(row["rate"] > 0 for row in rows)
                entry["limited_by"] = "/".join(dict.fromkeys(str(row["limited_by"]) for row in rows))
                entries.append(entry)
        return entries

    def contests(self) -> dict[int, Contest]:
        """For each number of GPUs, which architecture holds most; where all searches of two or more are done.

        Each rate is known to the tolerance only, and not independently; and a profile has its own error.
        """
        found = {}
        for gpus in self.plan.gpus:
            rates = {arch: [row["rate"] for row in self._of(arch, gpus)] for arch in self.plan.archs}
            whole = {arch: values for arch, values in rates.items() if len(values) == self.plan.num_runs}
            if len(whole) > 1:
                comparisons = len(self.plan.gpus) * (len(self.plan.archs) - 1)
                errors = {str(arch): max(map(self._error, self._of(arch, gpus))) for arch in whole}
                values = {str(arch): rates for arch, rates in whole.items()}
                found[gpus] = contest(values, 1, comparisons, self.plan.tolerance, errors)
        return found

    def _error(self, row: Row) -> float:
        """The profile's error in a rate: of the throughput, and of the levels that limit it, by as far as they move it.

        Near saturation a time to the first token rises steeply with the rate, and what it is off by moves the rate by
        little; a time between tokens may rise slowly, and move it by more.
        """
        goal = self.plan.goal
        missed = [goal.level_metric(level) for level in goal.levels_ms if level in row["limited_by"].split("+")]
        off = [lead_error(self.plan.base, metric) / float(row["steepness"]) for metric in missed]
        return max([lead_error(self.plan.base, "output_throughput"), *off])

    def _of(self, arch: Arch, gpus: int) -> list[Row]:
        return [row for row in self.rows if (row["arch"], row["gpus"]) == (arch, gpus)]


def find_capacities(plan: Plan, bench: Bench, gpu_hour_usd: float | None = None) -> Capacities:
    """Search all cases side by side, one rate each at a time, from where the ones before them lead to expect it.

    Ctrl-C keeps the searches that are done.
    """
    found = Capacities(plan, gpu_hour_usd)
    brackets: dict[Case, Bracket] = {}
    before = bench.runs
    try:
        first = plan.base.traffic.seed
        rates = {arch: _most_held(plan, (arch, plan.gpus[0], first), bench) / plan.gpus[0] for arch in plan.archs}
        if plan.space is not None and plan.space.steps_of(plan.archs):
            plan = found.plan = _tuned_near(plan, plan.space, rates, bench)
        starts = {(arch, plan.gpus[0], first): plan.gpus[0] * rates[arch] for arch in plan.archs}
        step = WIDE_STEP
        while starts:
            plan, brackets = _settled(plan, starts, step, plan.tolerance, bench, brackets)
            found.plan, starts, step = plan, {}, NARROW_STEP
            if plan.space is not None and "batches" in plan.space.steps():
                plan, starts = _with_larger_batches(plan, plan.space, bench, brackets)
                for case in starts:
                    del brackets[case]
        for (arch, gpus, _), bracket in brackets.items():
            rates[arch] = bracket.held / gpus or rates[arch]
        for archs in (plan.archs[:1], plan.archs[1:]):
            rest = [case for case in plan.cases() if case[0] in archs and case not in brackets]
            searches = {case: search(_near(case, rates, brackets), NARROW_STEP, plan.tolerance) for case in rest}
            lockstep(plan, searches, bench, brackets)
    except KeyboardInterrupt:
        found.interrupted = True
    steep = {
        (arch, gpus): steepness(of for case, of in brackets.items() if case[:2] == (arch, gpus))
        for arch in plan.archs
        for gpus in plan.gpus
    }
    found.rows = [
        _row(plan, case, brackets[case], bench, gpu_hour_usd) | {"steepness": steep[case[:2]]}
        for case in plan.cases()
        if case in brackets
    ]
    found.runs = bench.runs - before
    return found


def _near(case: Case, starts: dict[Arch, float], brackets: Mapping[Case, Bracket]) -> float:
    """Where to look: at the first seed's rate, more or less as the first architecture's is with this case's seed."""
    arch, gpus, seed = case
    leader = next(iter(starts))
    known = brackets.get((leader, gpus, seed), Bracket(0.0, math.inf)).held
    return starts[arch] * (known / starts[leader] if known else gpus)


def _settled(
    plan: Plan,
    starts: dict[Case, float],
    step: float,
    tolerance: float,
    bench: Bench,
    known: dict[Case, Bracket],
    long: float = 1.0,
) -> tuple[Plan, dict[Case, Bracket]]:
    """Search, and again in longer runs where those at a rate held were too short for it; all in runs of one length.

    `known` was searched for before, in runs of the plan; `long` is the share of the whole length that is enough. The
    plan in runs that are long enough, and all brackets.
    """
    brackets = dict(known)
    while True:
        lockstep(plan, {case: search(start, step, tolerance) for case, start in starts.items()}, bench, brackets, True)
        held = {case: bracket.held for case, bracket in brackets.items() if bracket.held}
        rows = bench.rows([plan.experiment(case, rate) for case, rate in held.items()])
        needed = int(long * max((plan.needed(*of) for of in zip(held, rows, strict=True)), default=0))
        if needed <= plan.base.traffic.num_prompts:
            return plan, brackets
        plan = plan.with_prompts(needed)
        starts = {case: bracket.held or bracket.failed for case, bracket in brackets.items()}


def _tuned_near(plan: Plan, space: Space, rates: dict[Arch, float], bench: Bench) -> Plan:
    """Each architecture's best settings at the rate that it holds, more or less; `rates` is moved there.

    The rate is searched for coarsely, in shorter runs, with the draft length that the formula names.
    """
    guesses = {}
    cases = [(arch, plan.gpus_a_server, plan.base.traffic.seed) for arch in plan.archs]
    for case in cases:
        at = plan.experiment(case, rates[case[0]] * case[1])
        best = Formula(at).ranked(space.draft_lengths)[0].k if at.speculates and len(space.draft_lengths) > 1 else None
        server = at.server if best is None else replace(at.server, num_speculative_tokens=best)
        guesses[case[0]] = server if "fixed" in space.controllers or not at.speculates else plan.base.server
    short = replace(plan, servers=guesses)
    short = short.with_prompts(max(1, plan.base.traffic.num_prompts // 2))
    starts = {case: rates[case[0]] * case[1] for case in cases}
    short, brackets = _settled(short, starts, WIDE_STEP, COARSE, bench, {}, COARSE_LONG)
    # tuned in runs as long as those just made: in shorter ones a batch that is full at that rate does not fill
    few = short.base.traffic.num_prompts
    longer = short.with_prompts(int(few / SHORT))
    for arch, gpus, seed in cases:
        rates[arch] = brackets[arch, gpus, seed].held / gpus or rates[arch]
    places = [longer.experiment(case, rates[case[0]] * case[1]) for case in cases]
    found = Search(replace(plan.goal, objective="headroom"), space, plan.warmup_share, plan.tolerance)
    winners = tuned(found, places, bench, alone=True)
    servers = {arch: winners[at][arch].server for at, arch in enumerate(plan.archs)}
    return replace(plan, servers=servers)


def _with_larger_batches(
    plan: Plan, space: Space, bench: Bench, brackets: Mapping[Case, Bracket]
) -> tuple[Plan, dict[Case, float]]:
    """Settings were tuned where a batch limit may not be reached that ends the search further up.

    So at the rate that did not hold larger batches are tried. The plan with those that have more head-room, and where
    to search on.
    """
    full = {}
    for case, bracket in brackets.items():
        if bracket.failed < math.inf:
            at = plan.experiment(case, bracket.failed)
            [row] = bench.rows([at])
            if int(row["max_concurrent_requests"]) >= at.hardware.replicas * at.server.max_num_seqs:
                limits = [way.server.max_num_seqs for way in space.batches(at)]
                longer = plan.with_prompts(max(plan.base.traffic.num_prompts, *(FILLING * rows for rows in limits)))
                at = longer.experiment(case, bracket.failed)
                larger = (way for way in space.batches(at) if way.server.max_num_seqs > at.server.max_num_seqs)
                full[case] = [at, *larger]
    rows = iter(bench.rows([way for ways in full.values() for way in ways]))
    servers, starts = dict(plan.servers), {}
    for case, ways in full.items():
        rooms = [min(plan.goal.headrooms(next(rows)).values()) for _ in ways]
        if max(rooms) > (1 + plan.tolerance) * rooms[0]:
            servers[case[0]] = ways[rooms.index(max(rooms))].server
            starts[case] = brackets[case].failed
    return replace(plan, servers=servers), starts


def lockstep(
    plan: Plan,
    searches: dict[Case, Bisection],
    bench: Bench,
    brackets: dict[Case, Bracket],
    shorter: bool = False,
) -> None:
    """Take all searches to their ends, filling `brackets`; every step is one batch of runs.

    With `shorter` a rate also holds, for the time being, in a run that is inconclusive and shorter than it must be.
    """
    asked = {case: next(steps) for case, steps in searches.items()}
    while asked:
        rows = bench.rows([plan.experiment(case, rate) for case, rate in asked.items()])
        for case, row in list(zip(asked, rows, strict=True)):
            unclear = shorter and plan.needed(case, row) > plan.base.traffic.num_prompts and keeps_up(row)
            stable = unclear or row["stability"] == "stable"
            holds = stable and plan.goal.attains(row) and asked[case] <= _most_held(plan, case, bench)
            try:
                asked[case] = searches[case].send(Held(holds, min(plan.goal.headrooms(row).values())))
            except StopIteration as end:
                brackets[case] = end.value
                del asked[case]


def _most_held(plan: Plan, case: Case, bench: Bench) -> float:
    """The rate that a case's servers complete when saturated: no higher one can be held, whatever a run shows.

    It is measured in output tokens: one run gives these far more precisely than requests, whose lengths vary.
    """
    arch, gpus, _ = case
    [row] = bench.rows([saturated(plan.experiment((arch, plan.gpus_a_server, plan.base.traffic.seed), 1.0))])
    servers = gpus // plan.gpus_a_server
    return servers * float(row["output_throughput"]) / mean_output_tokens(plan.experiment(case, 1.0).traffic)


def _row(plan: Plan, case: Case, bracket: Bracket, bench: Bench, gpu_hour_usd: float | None) -> Row:
    arch, gpus, seed = case
    at = bracket.held or bracket.failed
    [run] = bench.rows([plan.experiment(case, at)])
    tokens_per_s = float(run["steady_output_throughput"]) if bracket.held else 0.0
    usd = math.nan
    if gpu_hour_usd is not None and tokens_per_s:
        usd = gpu_hour_usd * gpus / (tokens_per_s * 3600) * 1e6
    return {
        "arch": arch,
        "gpus": gpus,
        "seed": seed,
        "rate": bracket.held,
        "failed_rate": bracket.failed,
        "may_hold": _may_hold(plan, case, bracket, bench),
        "attainment": attained(run),
        "limited_by": _limit(plan, case, bracket, bench),
        "output_tokens_per_s": tokens_per_s,
        "usd_per_million_output_tokens": usd,
        "profile": run["profile"],
        "foundation": run["foundation"],
        "forward_error_bar": run.get("forward_error_bar"),
        **{name: value for name, value in run.items() if name.startswith("outside_measured")},
    }


def _may_hold(plan: Plan, case: Case, bracket: Bracket, bench: Bench) -> float:
    """The rate that the capacity is under: the next that was tried, or the saturated one if that was inconclusive."""
    if bracket.failed == math.inf:
        return bracket.held
    [run] = bench.rows([plan.experiment(case, bracket.failed)])
    unclear = plan.goal.attains(run) and run["stability"] == "cannot tell"
    return max(bracket.failed, _most_held(plan, case, bench)) if unclear else bracket.failed


def _as_known(rate: Interval, below: float) -> Interval:
    """The interval, but no narrower than from the rate to the one that the capacity is under."""
    return replace(rate, half_width=max(rate.half_width, below - rate.mean))  # nan, from one replication, stays


def _limit(plan: Plan, case: Case, bracket: Bracket, bench: Bench) -> str:
    """What the first rate that did not hold fails on."""
    if bracket.failed == math.inf:
        return "nothing"
    [run] = bench.rows([plan.experiment(case, bracket.failed)])
    missed = [name for name, room in plan.goal.headrooms(run).items() if room < 1]
    if missed:
        return "+".join(missed)
    return "queue" if plan.goal.attains(run) else "levels together"


def capacity_document(found: Capacities) -> dict[str, Any]:
    """Everything that was asked and found."""
    contests = {str(gpus): contest_document(held) for gpus, held in found.contests().items()}
    return {
        "pdvsim_version": __version__,
        "interrupted": found.interrupted,
        "runs": found.runs,
        "plan": output.settings(found.plan),
        "gpu_hour_usd": found.gpu_hour_usd,
        "summary": found.summary(),
        "most_by_gpus": contests,
        "searches": found.rows,
    }


def capacity_table(found: Capacities) -> str:
    """One row per number of GPUs and architecture, what holds most, and how the figures came about."""
    if not found.rows:
        return "no search is done"
    priced = found.gpu_hour_usd is not None
    header = [
        "GPUs",
        "arch",
        "settings",
        "req/s held",
        "per GPU",
        "out tok/s",
        *(["$/M out tok at that rate"] if priced else []),
        "limited by",
    ]
    rows = []
    for entry in found.summary():
        rate, gpus = entry["rate"], entry["gpus"]
        row = [str(gpus), entry["arch"], entry["settings"], positive(rate), positive(rate, scale=1 / gpus)]
        row.append(positive(entry["output_tokens_per_s"], 0))
        row += [positive(entry["usd_per_million_output_tokens"], 3)] if priced else []
        if not entry["held_in"]:
            row[3:] = ["none", *(["-"] * (len(row) - 4))]
        rows.append([*row, _limited(entry)])
    return "\n".join(
        [grid(header, rows), *(_most(gpus, held) for gpus, held in found.contests().items()), *_capacity_notes(found)]
    )


def _limited(entry: dict[str, Any]) -> str:
    missed = entry["replications"] - entry["held_in"]
    if not entry["held_in"]:
        return f"{entry['limited_by']}, even at a trickle"
    return f"{entry['limited_by']}" + (f" (no rate held in {missed} of {entry['replications']})" if missed else "")


def _most(gpus: int, held: Contest) -> str:
    """One sentence on who holds most."""
    where = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    second = held.second
    assert second is not None
    lead = f"{lead_text(held, second)} ({held.differences[second].mean:+.2f} req/s) over {second}"
    if held.values[held.best].mean == 0:
        return f"{where}: none of them holds the service levels"
    if held.sure:
        return f"{where}: {held.best} holds most, {lead}"
    if math.isnan(held.leads[second].half_width):
        return f"{where}: {held.best} held most, {lead}, in the one replication made; one seed tells no more"
    return f"{where}: {held.best} is not told apart from {', '.join(held.unsure)}; {lead}"


def _capacity_notes(found: Capacities) -> list[str]:
    plan, first = found.plan, found.rows[0]
    levels = " and ".join(f"{name} <= {level:g} ms" for name, level in plan.goal.levels_ms.items())
    notes = [
        f"held: {plan.goal.attainment:.0%} of the requests have {levels}, and the queue does not grow",
        f"runs of {plan.base.traffic.num_prompts} requests per server, at least {LONG} request durations; "
        f"the first {plan.warmup_share:.0%} left out; searched to {plan.tolerance:.0%} from below; {found.runs} runs",
    ]
    if plan.num_runs > 1:
        contests = found.contests()
        family = (
            f"; differences are paired by seed, each at {next(iter(contests.values())).confidence:.1%}"
            if contests
            else ""
        )
        notes.append(f"±: 95% confidence over {plan.num_runs} replications{family}")
        notes += [threshold_text(contests.values(), plan.tolerance)] if contests else []
    if any(vague(entry["rate"]) for entry in found.summary()):
        notes.append(
            "(0 to ...): the 95% interval, wider than the mean: these replications tell little; try more --num-runs"
        )
    if any("queue" in row["limited_by"] for row in found.rows):
        notes.append(
            "queue: at the next rate it grew, or the run is inconclusive; then ± reaches to what the saturated server "
            "completes, and more --num-prompts narrow it"
        )
    return [*notes, *lengths_note(plan.base.traffic), founded(first), *most_outside(found.rows)]
