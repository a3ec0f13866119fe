"""The recommendation in a few lines: what to run, whether it meets the goal, and what that depends on."""

from __future__ import annotations

from pdvsim.decide.goal import attained, level_title
from pdvsim.decide.question import Findings
from pdvsim.decide.report import NO_DRAFTS, gpus_text, positive
from pdvsim.decide.runs import load_words
from pdvsim.decide.served import unknown_head
from pdvsim.sim.config import Experiment
from pdvsim.study.length import too_short
from pdvsim.study.stats import interval
from pdvsim.view.setting import acceptance_notes, is_assumed, is_published, recorded_elsewhere
from pdvsim.view.table import cell


def recommendation(advice: Findings, best: Experiment) -> list[str]:
    """The recommended setting with its head-room, and notes on its uncertainty."""
    ask, goal = advice.question, advice.question.goal
    card = gpus_text(best.hardware.replicas * best.gpus, best.hardware.gpu) if ask.fleets else best.hardware.gpu
    load = load_words(ask.base.traffic)
    model = ask.base.pair.target.name if ask.drafters else ask.base.server.pair
    lines = [ask.described(best), f"for {model} on {card} at {load}", *_without_drafts(advice, best)]
    if goal.levels:
        share = cell(interval(map(attained, advice.rows)), 1, 100)
        verb = "meets" if advice.met else "does not meet"
        lines.append(f"{verb} {goal.levels_text}{goal.share_text} (predicted: {share} %)")
        rooms = {name: interval(goal.headrooms(row)[name] for row in advice.rows) for name in goal.levels_ms}
        parts = ", ".join(f"{level_title(name)} {cell(room, 1)}" for name, room in rooms.items())
        of = "predicted value" if goal.named else goal.percentile.upper()
        lines.append(f"head-room (service level / {of}): {parts}")
    if advice.met:
        lines += [f"inconclusive: {why}" for why in _inconclusive(advice)]
    else:
        lines.append(_not_met(advice))
        if advice.search.skipped:
            lines.append(f"{advice.search.skipped} settings were not tested; one may meet the levels: raise --budget")
    return lines + _on_assumption(advice, best)


def _without_drafts(advice: Findings, best: Experiment) -> list[str]:
    """A note that drafts do not pay, if some were compared and the recommendation has none."""
    contest, drafting = advice.contest, [advice.question.name(c) for c in advice.finals if c.speculates]
    assert contest is not None
    if best.speculates or not drafting:
        return []
    first = next(name for name in (contest.best, *contest.others) if name in drafting)
    if advice.question.name(best) != contest.best or first in contest.unsure:
        return [f"{NO_DRAFTS}: no setting that drafts is significantly better"]
    lead = cell(contest.leads[first], 1, 100)
    return [f"{NO_DRAFTS}: the best setting that drafts, {first}, is {lead} % behind"]


def _on_assumption(advice: Findings, best: Experiment) -> list[str]:
    """Notes on unmeasured acceptance that the decision depends on, with the rate at which drafting breaks even.

    That is, assumed, published by others, or recorded with another target. A drafter that cannot be loaded is
    called hypothetical. If the recommendation drafts, it depends on its own acceptance and on that of its ties; else on
    every drafter's.
    """
    contest, name, even = advice.contest, advice.question.name, advice.break_even
    assert contest is not None
    ties = (name(best), contest.best, *contest.alike)
    decisive = [c for c in advice.finals if name(c) in ties or not best.speculates]
    why = unknown_head(best) if best.speculates else ""
    notes = [f"note: hypothetical: {why}"] if why else []
    for kind in (recorded_elsewhere, is_published, is_assumed):
        mine = [c for c in decisive if kind(c)]
        pays = f"; {even.text(name(best))}" if even and even.who in map(name, mine) else ""
        notes += [f"note: {note}{pays}" for note in acceptance_notes(mine)]
    return notes


def _inconclusive(advice: Findings) -> list[str]:
    """Why it is uncertain that the load is held; empty if it is certain."""
    rate, traffic = advice.held_rate, advice.question.base.traffic
    if rate is not None:
        return [f"the highest rate it holds is {positive(rate, 1)} req/s"] if traffic.request_rate > rate.mean else []
    if short := next(filter(None, (too_short(traffic, row) for row in advice.rows)), ""):
        return [f"{short}: raise --num-prompts"]
    if 2 * sum(row["stability"] == "inconclusive" for row in advice.rows) <= len(advice.rows):
        return []
    assert advice.recommended is not None
    runs = f"runs of {advice.recommended.traffic.num_prompts} requests"
    return [f"{runs} are too short to show that the queue stays bounded: raise --num-prompts"]


def nothing_meets(advice: Findings) -> str:
    """The heading if no finalist meets the goal."""
    goal, load = advice.question.goal, load_words(advice.question.base.traffic)
    missed = f"meets {goal.levels_text}" if goal.levels else "keeps up"
    return f"Nothing {missed} at {load}; closest:"


def _not_met(advice: Findings) -> str:
    """What would meet the goal, as far as that is known."""
    rate, ask = advice.held_rate, advice.question
    more = f"no fleet of up to {gpus_text(ask.most_gpus)} meets the goal: raise --gpus" if ask.most_gpus else ""
    if advice.capacity and rate and rate.mean > 0:
        holds = f"on {gpus_text(advice.capacity.plan.gpus)} it holds {rate.mean:.3g} req/s"
        return f"{holds}; {more}" if more else holds
    return more or "no tested setting holds this load; the values below are of the best one"
