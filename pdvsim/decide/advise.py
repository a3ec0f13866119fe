"""Recommend a setup for a load: tune every architecture, replicate the best, decide, and find where that changes.

The decision is the finalist with the best objective among those that meet the service levels and keep up, or among all
if none does. If others do not differ significantly over seeds and indifference, the simplest of these is chosen. The
budget counts simulations, so the same question has the same answer on any machine. Steps that do not fit are listed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from pdvsim.bench.stats import interval
from pdvsim.decide.advice import Advice, Question
from pdvsim.decide.capacity import Plan
from pdvsim.decide.capacity_search import find_capacities
from pdvsim.decide.fleet import largest_fleets, servers, smallest_fleets, too_small
from pdvsim.decide.formula import break_even_rate
from pdvsim.decide.race import chosen, contest_of
from pdvsim.decide.runs import Bench, Spent, at_load, load_axis, load_of
from pdvsim.decide.space import PROMISING
from pdvsim.decide.surroundings import Rivalry, equivalent_rate, has_rate
from pdvsim.decide.tune import FINALISTS, Search, decided
from pdvsim.sim.config import Acceptance, Experiment
from pdvsim.sim.metrics.steady import LEAST
from pdvsim.sim.relevance import applicable

SEARCH_SHARE, FINALS_SHARE = 0.5, 0.6  # of the budget, used up to the end of each step
CLOSE_BY = 1.05  # a rate this many times the load is tested, if no higher one is held
CLOSE = 0.05  # precision of the distance to capacity: an advice needs no more
FEW_RUNS = 3  # searches for a capacity
SERVER_GPUS = 8  # most GPUs of one server of a fleet
RIVALS = 2  # best other finalists tested for flips, in addition to plain decoding
LOADS = {"load": (0.25, 4.0), "concurrency": (0.25, 4.0), "requests": (0.25, 2.0)}  # times the given load


def advise(question: Question, bench: Bench, tell: Callable[[str, str], None] | None = None) -> Advice:
    """Answer within the budget; the finals are always run. Ctrl-C keeps finished steps.

    `tell` reports the decision before its surroundings are searched.

    If nothing on the given GPUs meets the goal, and more may be used, the answer is on the smallest fleets that do.
    """
    started_s = time.monotonic()
    advice = Advice(question, _search(question))
    try:
        grows = question.most_gpus > 0 and load_axis(question.base.traffic) == "load"
        if not (grows and too_small(advice.search.starts(question.base), question.goal, question.space)):
            advice = _decided(question, bench)
            grows &= advice.recommended is not None and not question.goal.met(advice.rows)
        if grows and not advice.interrupted:
            advice = _on_more_gpus(advice, bench)
        if advice.recommended is not None and not advice.interrupted:
            if tell is not None:
                tell("pdvsim", f"{advice.standing}: {question.described(advice.recommended)}; next: where that changes")
            _surroundings(advice, bench)
    except KeyboardInterrupt:
        advice.interrupted = True
    advice.runs, advice.spent_s = bench.runs, time.monotonic() - started_s
    return advice


def usual_runs(question: Question) -> int:
    """Estimated simulations of an answer, for its progress; fleets take more."""
    contenders = len(question.contenders or question.space.archs)
    tried = PROMISING + len(question.space.controllers) + 4 if question.space.kinds() else 0
    tuning = contenders + min(contenders, RIVALS + 1) * tried
    finals, flips = min(contenders, FINALISTS + 1) * question.num_runs, 4 * min(contenders, RIVALS + 2)
    return min(question.budget, tuning + finals + flips + 8 * FEW_RUNS)


def _on_more_gpus(advice: Advice, bench: Bench) -> Advice:
    """The advice on the smallest fleets that meet the goal; if there are none, that on one server."""
    ask = advice.question
    one = replace(ask.base, hardware=replace(ask.base.hardware, tensor_parallel_size=1))
    drafted = [one for one in ask.drafters if one.arch in ask.fleet_archs]
    kinds = servers(one, ask.fleet_archs, range(1, min(ask.most_gpus, SERVER_GPUS) + 1), drafted)
    fleets, refused = smallest_fleets(one, ask.goal, kinds, ask.most_gpus, ask.space, bench)
    if fleets:
        advice = _decided(replace(ask, base=one, contenders=fleets, by_cost=True), bench)
    elif ask.gpus is not None and (whole := largest_fleets(one, kinds, ask.most_gpus, ask.space)):
        advice = _decided(replace(ask, base=one, contenders=whole), bench)  # the closest, on all GPUs there are
    elif advice.recommended is None:
        advice = _decided(ask, bench)
    advice.refused = refused
    return advice


def _search(question: Question) -> Search:
    """The search. Fleets that cost less than the largest are always kept; for the cheapest, those that cost least."""
    costs = {fleet.name: fleet.gpus(question.base) for fleet in question.fleets}
    most = min(costs.values()) + 1 if question.by_cost else max(costs.values(), default=0)
    always = frozenset(name for name, gpus in costs.items() if gpus < most)
    budget = int(SEARCH_SHARE * question.budget)
    return Search(question.goal, question.space, question.indifference, budget, question.contenders, always)


def _decided(question: Question, bench: Bench) -> Advice:
    """The finals and the recommendation. Ctrl-C keeps finished steps."""
    search, goal = _search(question), question.goal
    advice = Advice(question, search)
    finals_budget = int(FINALS_SHARE * question.budget)
    try:
        for _, _, finals in decided(search, [question.base], bench, question.num_runs, finals_budget):
            if question.by_cost:
                hourly = {name: question.hourly(c) for name, c in finals.candidates.items()}
                able = [name for name, rows in finals.rows.items() if goal.met(rows)]
                alike = {n: finals.rows[n] for n in able if hourly[n] == min(hourly[other] for other in able)}
                contest = contest_of(alike or finals.rows, goal, finals.candidates, question.indifference)
                finals = finals._replace(contest=contest)
            advice.finals, advice.best = finals, chosen(finals.contest, finals.candidates, question.base)
    except KeyboardInterrupt:
        advice.interrupted = True
    return advice


def _surroundings(advice: Advice, bench: Bench) -> None:
    """What the recommendation holds, failure modes near it and where it changes, while the budget lasts."""
    ask, best, finalists, finals = advice.question, advice.best, advice.finalists, advice.finals
    assert finals is not None
    order = list(dict.fromkeys([best, *finals.contest.order, *finalists]))
    plain = next((name for name in order if finalists[name].arch == "autoregressive"), None)
    rated = next((name for name in order if has_rate(finalists[name])), None)
    rivals = dict.fromkeys([best, *order[1 : 1 + RIVALS], *([plain] if plain else [])])
    rivalry = Rivalry({name: finalists[name] for name in rivals}, advice.search, ask.num_runs, bench)
    traffic = ask.base.traffic
    axis, here = load_axis(traffic), load_of(traffic)

    def capacity() -> None:
        """The highest rates that the recommendation and plain decoding hold, as `pdvsim capacity` finds them."""
        if axis == "load" and ask.goal.levels:
            both = {name: applicable(finalists[name]) for name in dict.fromkeys([best, plain or best])}
            least = bench.prompts or LEAST
            few = ask.num_runs if traffic.use_trace_timestamps else min(FEW_RUNS, ask.num_runs)  # days of a log differ
            plan = Plan(both[best], tuple(both), few, ask.goal, CLOSE, tuned=both, least=least)
            advice.capacity = find_capacities(plan, bench, ask.gpu_hour_usd)
            if advice.capacity.interrupted:
                raise KeyboardInterrupt

    def load_flips() -> None:
        places = [here * x if axis == "load" else float(max(1, round(here * x))) for x in LOADS[axis]]
        if (held := advice.holds(best)) is not None:  # beyond it nothing is recommended
            most = held.mean
            places = [place for place in places if place <= max(here, most)]
            places += [most] if most > CLOSE_BY * here and max(places) < here else []
        advice.flips.append(rivalry.flips(axis, here, places, at_load))

    def acceptance_flips() -> None:
        """From which acceptance the best finalist that drafts leads plain decoding, on average."""
        if rated is None or plain is None:
            return
        drafting = finalists[rated]
        accepted, given = drafting.acceptance, drafting.acceptance.acceptance_rate
        if not accepted.by_rate:
            given, accepted = equivalent_rate(finals.rows[rated]), Acceptance()
        guess = break_even_rate(replace(drafting, acceptance=accepted), [k for k in ask.space.draft_lengths if k])

        def at_rate(candidate: Experiment, rate: float) -> Experiment:
            moved = replace(candidate, acceptance=replace(accepted, acceptance_rate=rate))
            return moved if candidate == drafting else candidate

        goal, start = ask.goal, 1.0 if guess is None else guess
        means = {name: interval(map(goal.value, finals.rows[name])).mean for name in (rated, plain)}
        order = sorted(means, key=lambda name: -goal.sign * means[name])
        around, end = replace(rivalry, finalists={name: finalists[name] for name in order}), float(order[0] != rated)
        found = around.flips("acceptance", given, [end], at_rate, {-1: start, 1: start})
        advice.flips.append(replace(found, of=rated, leader=order[0]))

    steps = {"distance to capacity": capacity, "flips with the acceptance": acceptance_flips}
    steps |= {"flips with the load": load_flips} if len(rivals) > 1 else {}
    for what, step in steps.items():
        try:
            with bench.within(ask.budget):
                step()
        except Spent:
            advice.left_out.append(what)
