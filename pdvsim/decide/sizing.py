"""The smallest fleets that hold a request rate within the service levels.

For each kind of server (an architecture and drafter on one GPU, on a group of GPUs, or with its lanes on two) the
formula predicts the least number of replicas that keep up with the load and meet the level of TPOT. The most promising
fleets are then simulated at the whole load, with more or fewer replicas until the least number that meets the goal is
known.

Not covered: fleets of unlike servers, and more than `WORTH` times the GPUs of the smallest fleet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pdvsim.bench.length import length_of, with_length
from pdvsim.decide.edge import Ends, find_edge, first_where, lockstep
from pdvsim.decide.fleet import Contender, copies
from pdvsim.decide.formula import Formula, Predicted
from pdvsim.decide.goal import Goal
from pdvsim.decide.report import gpus_text
from pdvsim.decide.runs import Bench, at_rate, shortened
from pdvsim.decide.space import Space, with_best_length
from pdvsim.sim.config import Experiment

WORTH = 1.5  # times the GPUs of the smallest fleet, up to which others are compared
MOST_FLEETS = 4  # in addition to plain decoding
RUN_SHARE = 0.5  # of what a final run measures
MARGIN = 1.5  # a load that is predicted to be this many times too high for one server is not tried on it


def too_small(candidates: Sequence[Experiment], goal: Goal, space: Space) -> bool:
    """Whether the formula predicts that the load is far too high for each of the candidates."""
    rates = (candidate.traffic.request_rate / MARGIN for candidate in candidates)
    return not any(_holds(at_rate(one, rate), goal, space) for one, rate in zip(candidates, rates, strict=True))


def smallest_fleets(
    base: Experiment, goal: Goal, servers: Sequence[Contender], most: int, space: Space, bench: Bench
) -> tuple[tuple[Contender, ...], dict[str, str]]:
    """The fleets of these servers that hold the load of `base` on at most `most` GPUs, smallest first.

    Also those that do not, by name with the reason.
    """
    counts = {kind: _predicted(kind, base, goal, space, most) for kind in servers}
    gpus = {kind: count * kind.gpus(base) for kind, count in counts.items()}
    refused = {
        kind.name: f"predicted not to hold the load on {gpus_text(most)}" for kind in servers if not counts[kind]
    }
    able = [kind for kind in servers if counts[kind]]
    paces_s = {kind: _ranked(copies(kind, base, counts[kind]).of(base), space)[0].seconds_per_token for kind in able}
    order = sorted(able, key=lambda kind: (gpus[kind], paces_s[kind]))
    worth = [kind for kind in order if gpus[kind] <= WORTH * gpus[order[0]]]
    plain = [kind for kind in worth if kind.arch == "autoregressive"][:1]
    finalists = list(dict.fromkeys([*worth[:MOST_FLEETS], *plain]))
    refused |= {kind.name: f"predicted to need {gpus_text(gpus[kind])}" for kind in order if kind not in finalists}
    fleets = _refined(base, goal, {kind: counts[kind] for kind in finalists}, most, space, bench)
    known = {fleet.kind for fleet in fleets}
    refused |= {kind.name: f"not meeting the goal on {gpus_text(most)}" for kind in finalists if kind.kind not in known}
    return tuple(sorted(fleets, key=lambda kind: kind.gpus(base))), refused


def largest_fleets(base: Experiment, servers: Sequence[Contender], most: int, space: Space) -> tuple[Contender, ...]:
    """As many of each kind of server as `most` GPUs hold: those that the formula predicts to be fastest."""
    whole = [copies(kind, base, most // kind.gpus(base)) for kind in servers if kind.gpus(base) <= most]
    ranked = sorted(whole, key=lambda one: -_ranked(one.of(base), space)[0].tokens_per_s)
    plain = [one for one in ranked if one.arch == "autoregressive"][:1]
    return tuple(dict.fromkeys([*ranked[:MOST_FLEETS], *plain]))


def _predicted(kind: Contender, base: Experiment, goal: Goal, space: Space, most: int) -> int:
    """The least replicas that hold the load by formula; 0 if none up to `most` GPUs do."""
    counts = range(1, most // kind.gpus(base) + 1)
    return first_where(counts, lambda count: _holds(copies(kind, base, count).of(base), goal, space)) or 0


def _holds(candidate: Experiment, goal: Goal, space: Space) -> bool:
    """Whether the formula predicts that a fleet keeps up and meets the level of TPOT."""
    levels_s = [level / 1e3 for name, level in goal.levels_ms.items() if name.endswith("tpot")]
    predictions = _ranked(candidate, space)
    return any(p.keeps_up and p.seconds_per_token <= min(levels_s, default=math.inf) for p in predictions)


def _ranked(candidate: Experiment, space: Space) -> list[Predicted]:
    """The draft lengths of a fleet, best first, by formula."""
    return Formula(_roomy(candidate, space)).ranked(space.lengths(candidate) if candidate.has_drafter else (0,))


def _roomy(candidate: Experiment, space: Space) -> Experiment:
    """A candidate with the largest batch limit that is allowed."""
    return replace(candidate, server=replace(candidate.server, max_num_seqs=max(space.max_num_seqs)))


def _refined(
    base: Experiment, goal: Goal, counts: dict[Contender, int], most: int, space: Space, bench: Bench
) -> list[Contender]:
    """The fleets with the least replicas that meet the goal in a run at the whole load; without those that do not."""
    if not counts:
        return []

    def fleet(server: Contender, count: int) -> Experiment:
        one = _roomy(goal.prepared(copies(server, base, count).of(base)), space)
        return with_best_length(one, space.lengths(one))

    length = length_of(shortened(bench.sized(fleet(*next(iter(counts.items())))), RUN_SHARE))
    least: dict[Contender, int] = {}

    def too_few(asked: dict[Contender, int]) -> list[float]:
        """1 where the replicas do not meet the goal, else -1."""
        rows = bench.rows([with_length(fleet(server, n), length) for server, n in asked.items()])
        least.update((server, n) for (server, n), row in zip(asked.items(), rows, strict=True) if goal.met([row]))
        return [-1 if goal.met([row]) else 1 for row in rows]

    limits = {server: Ends(0, most // server.gpus(base) + 1) for server in counts}
    lockstep({server: find_edge(counts[server], limits[server], far=0) for server in counts}, too_few, {})
    return [copies(server, base, least[server]) for server in counts if server in least]
