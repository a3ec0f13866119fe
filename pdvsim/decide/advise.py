"""Recommend a setup for a load: tune every architecture, replicate the best, decide, and find where that changes.

The decision is the finalist with the best objective among those that meet the service levels and keep up, or among all
if none does. If others do not differ significantly over seeds and indifference, the simplest of these is chosen. The
budget counts simulations, so the same question has the same answer on any machine. Steps that do not fit are listed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from pdvsim.decide import surroundings
from pdvsim.decide.advice import Advice
from pdvsim.decide.deploy import deployment
from pdvsim.decide.fleet import servers
from pdvsim.decide.question import Question
from pdvsim.decide.race import chosen, contest_of
from pdvsim.decide.runs import Bench, Spent, at_load, load_axis, load_of
from pdvsim.decide.sizing import largest_fleets, smallest_fleets, too_small
from pdvsim.decide.space import PROMISING
from pdvsim.decide.surroundings import Rivalry, find_flips
from pdvsim.decide.tune import FINALISTS, Search, decided

SEARCH_SHARE, FINALS_SHARE = 0.5, 0.6  # of the budget, used up to the end of each step
CLOSE_BY = 1.05  # a rate this many times the load is tested, if no higher one is held
SERVER_GPUS = 8  # most GPUs of one server of a fleet
RIVALS = 2  # best other finalists tested for flips, in addition to plain decoding
LOADS = {"load": (0.25, 4.0), "concurrency": (0.25, 4.0), "requests": (0.25, 2.0)}  # times the given load


def advise(question: Question, bench: Bench, tell: Callable[[str, str], None] | None = None) -> Advice:
    """Answer within the budget; the finals are always run. Ctrl-C keeps finished steps.

    `tell` reports the decision before its surroundings are searched.

    If nothing on the given GPUs meets the goal, and more may be used, the answer is on the smallest fleets that do.
    """
    started_s = time.monotonic()
    search = _search(question)
    advice = Advice(question, search)
    try:
        grows = question.most_gpus > 0 and load_axis(question.base.traffic) == "load"
        if not (grows and too_small(search.starts(question.base), question.goal, question.space)):
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
    contenders, seeds = len(question.contenders or question.space.archs), question.num_runs
    tried = PROMISING + len(question.space.controllers) + 4 if question.space.steps() else 0
    tuning = contenders + min(contenders, RIVALS + 1) * tried
    finals = min(contenders, FINALISTS + 1) * seeds
    at_a_place = min(contenders, RIVALS + 2)
    places = 2 * at_a_place * len(LOADS["load"])  # which few seeds decide
    return min(question.budget, tuning + finals + places + 8 * surroundings.FEW_RUNS)


def _on_more_gpus(advice: Advice, bench: Bench) -> Advice:
    """The advice on the smallest fleets that meet the goal; if there are none, that on one server."""
    ask = advice.question
    one = replace(ask.base, hardware=replace(ask.base.hardware, tensor_parallel_size=1))
    drafted = [one for one in ask.drafters if one.arch in ask.fleet_archs]
    kinds = servers(one, ask.fleet_archs, min(ask.most_gpus, SERVER_GPUS), drafted)
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
    always = question.cheaper
    if question.by_cost:
        least = min(one.gpus(question.base) for one in question.contenders)
        always = frozenset(one.name for one in question.contenders if one.gpus(question.base) == least)
    budget = int(SEARCH_SHARE * question.budget)
    return Search(question.goal, question.space, question.indifference, budget, question.contenders, always)


def _decided(question: Question, bench: Bench) -> Advice:
    """The finals and the recommendation. Ctrl-C keeps finished steps."""
    search = _search(question)
    advice = Advice(question, search)
    finals_budget = int(FINALS_SHARE * question.budget)
    try:
        for _, _, finals in decided(search, [question.base], bench, question.num_runs, finals_budget):
            advice.finals = {finals.candidates[name]: rows for name, rows in finals.rows.items()}
            advice.contest = finals.contest
            if question.by_cost and (cheapest := advice.cheapest) is not None:
                alike = [c for c in advice.able if question.hourly(c) == question.hourly(cheapest)]
                rows = {name: mine for name, mine in finals.rows.items() if finals.candidates[name] in alike}
                advice.contest = contest_of(rows, question.goal, finals.candidates, question.indifference)
            advice.recommended = finals.candidates[chosen(advice.contest, finals.candidates, question.base)]
    except KeyboardInterrupt:
        advice.interrupted = True
    return advice


def _surroundings(advice: Advice, bench: Bench) -> None:
    """What the recommendation holds, failure modes near it and where it changes, while the budget lasts."""
    ask, best = advice.question, advice.recommended
    assert best is not None
    assert advice.contest is not None
    order = [advice.finalists[name] for name in advice.contest.order]
    others = [c for c in (*order, *advice.finals) if c != best]
    rated = next((c for c in (best, *others) if surroundings.has_break_even(c)), None)
    plain = next((c for c in (best, *others) if c.arch == "autoregressive"), None)
    rivals = tuple(dict.fromkeys([*others[:RIVALS], *([plain] if plain not in (None, best) else [])]))
    rivalry = Rivalry(best, rivals, advice.search, ask.num_runs)
    fixed = [c for c in advice.search.figures if c.arch == "colocated" and c.server.controller == "fixed"]
    advice.deployment = deployment(best, advice.search.best(fixed))  # as engines support it
    axis, here = load_axis(best.traffic), load_of(best.traffic)

    def break_even() -> None:
        if rated and plain:
            advice.break_even = surroundings.break_even(rated, plain, rivalry, bench)

    def capacity() -> None:
        if axis == "load" and ask.goal.levels:
            both = {ask.name(c): c for c in (best, plain) if c is not None}
            advice.capacity = surroundings.saturation(both, rivalry, bench, ask.gpu_hour_usd)
            if advice.capacity.interrupted:
                raise KeyboardInterrupt

    def load_flips() -> None:
        places = [here * x if axis == "load" else float(max(1, round(here * x))) for x in LOADS[axis]]
        if (held := advice.holds(best)) is not None:  # beyond it nothing is recommended
            most = held.mean
            places = [place for place in places if place <= max(here, most)]
            places += [most] if most > CLOSE_BY * here and max(places) < here else []
        advice.flips = find_flips(axis, here, places, at_load, rivalry, bench)

    steps = {"distance to capacity": capacity, "break-even": break_even}
    steps |= {"flips with the load": load_flips} if rivals else {}
    for what, step in steps.items():
        try:
            with bench.within(ask.budget):
                step()
        except Spent:
            advice.left_out.append(what)
