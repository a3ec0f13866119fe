"""Contenders other than architectures alone: fleets of several GPUs, and drafters of a model.

A fleet is a number of GPUs, an architecture and a placement: replicas, tensor parallelism, lanes on different GPUs,
engines that prefill and engines that decode or, for a mixture of experts, expert parallelism with tensor or data
parallelism. Of the splits into engines that prefill and decode the formula names the most promising (`SPLITS`).
Fleets of the same size are compared on the same requests, each with its best settings (`tune`). So a GPU for one lane
is compared with a second server, and with one server sharded over all GPUs. With a price, one GPU alone is compared
too. Under service levels at a request rate the number of GPUs is not given but found, from the kinds of server that
there are (`servers`): for each the formula predicts the least number of replicas that keep up with the load and meet
the level of TPOT. The most promising fleets are then simulated at the whole load, with more or fewer replicas until the
least number that meets the goal is known (`smallest_fleets`).

Drafters of a model are its natural draft model, its own MTP layers, a published EAGLE-3 head, and n-gram search in the
request's own tokens. Each is compared in every architecture that drafts, with its recorded acceptance. Draft models and
MTP layers have no recording, so their acceptance is assumed. Plain decoding is compared once.

Not included: fleets of unlike servers; lanes that co-run on a sharded target, and an unsharded drafter on one of its
GPUs if it can be sharded: engines have neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pdvsim.bench.length import length_of, with_length
from pdvsim.decide.edge import Ends, find_edge, first_where, lockstep
from pdvsim.decide.formula import Formula, Predicted
from pdvsim.decide.goal import Goal
from pdvsim.decide.report import gpus_text
from pdvsim.decide.runs import Bench, at_rate, shortened
from pdvsim.decide.space import Space, with_best_length
from pdvsim.sim.assembly import ServerParts
from pdvsim.sim.config import RANKED, SHARDED, Acceptance, Arch, Experiment, Hardware
from pdvsim.sim.core import DrafterKind
from pdvsim.sim.models.presets import CannotShard, can_load, drafted_by
from pdvsim.sim.policies import archs_where, policy_of
from pdvsim.sim.prices.options import SERVED
from pdvsim.sim.workload.usual import drafter_name, usual_acceptance

ARCHS: tuple[Arch, ...] = ("autoregressive", "colocated", "pd", "pdv", "pdv-ahead")  # if none is named
PDV_PLACE = ("prefill=1", "decode=0", "verify=1")
SPLITS = 4  # disaggregated servers that are compared, of all on a number of GPUs
WORTH = 1.5  # times the GPUs of the smallest fleet, up to which others are compared
MOST_FLEETS = 4  # in addition to plain decoding
RUN_SHARE = 0.5  # of what a final run measures
MARGIN = 1.5  # a load that is predicted to be this many times too high for one server is not tried on it
KINDS: tuple[DrafterKind, ...] = ("model", "mtp", "eagle3", "ngram")


@dataclass(frozen=True)
class Contender:
    """An architecture with its own GPUs, drafter or both, compared instead of architectures; None: as given."""

    name: str
    arch: Arch
    hardware: Hardware | None = None
    pair: str | None = None
    acceptance: Acceptance | None = None  # of the pair's drafter

    def of(self, place: Experiment) -> Experiment:
        """The experiment as this contender serves it."""
        server = place.server if self.pair is None else replace(place.server, pair=self.pair)
        hardware, acceptance = self.hardware or place.hardware, self.acceptance or place.acceptance
        return replace(place, arch=self.arch, server=server, hardware=hardware, acceptance=acceptance)

    def gpus(self, place: Experiment) -> int:
        mine = self.of(place)
        return mine.gpus * mine.hardware.replicas

    def with_name(self, place: Experiment) -> Contender:
        """The contender with the name that its settings have."""
        return replace(self, name=self.named(self.of(place)))

    def named(self, candidate: Experiment) -> str:
        """A candidate's name among such contenders: 2x colocated, colocated with eagle3 or 2x colocated with eagle3."""
        name = str(candidate.arch) if self.hardware is None else fleet_name(candidate)
        drafts = self.pair is not None and candidate.has_drafter
        return name + (f" with {drafter_name(candidate.server.pair)}" if drafts else "")


def fleet_name(candidate: Experiment) -> str:
    """An architecture and how it uses its GPUs: 2x colocated, colocated tp2, colocated dp8 ep, pd 3p1d, pdv on 1+1.

    1+1 are the GPUs of drafter and target.
    """
    hardware, placement, name = candidate.hardware, candidate.placement, str(candidate.arch)
    if hardware.disaggregate is not None:
        sizes = (
            ("tp", hardware.prefill_tensor_parallel_size, hardware.tensor_parallel_size),
            ("dp", hardware.prefill_data_parallel_size, hardware.data_parallel_size),
        )
        name += f" {hardware.disaggregate}"
        for kind, prefill, decode in sizes:
            if max(prefill or 1, decode) > 1:
                name += f" {kind}{prefill or decode}" + (f"+{decode}" if prefill not in (None, decode) else "")
        return f"{name} ep" if hardware.enable_expert_parallel else name
    if placement.gpus > 1:
        other = placement.draft[0] if policy_of(candidate.arch).hands_over() else placement.prefill[0]
        name += f" on {candidate.group(other)}+{candidate.group(placement.verify)}"
    elif hardware.tensor_parallel_size > 1:
        name += f" tp{hardware.tensor_parallel_size}"
    if hardware.data_parallel_size > 1:
        name += f" dp{hardware.data_parallel_size}"
    name += " ep" if hardware.enable_expert_parallel else ""
    return name if hardware.replicas == 1 < candidate.gpus else f"{hardware.replicas}x {name}"


def contender_name(candidate: Experiment, contenders: Sequence[Contender]) -> str:
    """The contender with these settings: one of those that differ in GPUs or drafters, else an architecture."""
    return contenders[0].named(candidate) if contenders else str(candidate.arch)


def copies(server: Contender, base: Experiment, count: int) -> Contender:
    """A fleet of `count` servers of a kind."""
    hardware = server.of(base).hardware
    router = "least-loaded" if hardware.router == Hardware.router and count > 1 else hardware.router
    return replace(server, hardware=replace(hardware, replicas=count, router=router)).with_name(base)


def servers(
    base: Experiment, archs: Sequence[Arch], sizes: Iterable[int], drafted: Sequence[Contender] = ()
) -> tuple[Contender, ...]:
    """Every kind of server with these architectures, and drafters if any are compared, on these numbers of GPUs."""
    kinds: dict[str, Contender] = {}
    for one in drafted or [Contender("", arch) for arch in archs]:
        for gpus in sizes:
            for hardware in _layouts(one.of(base) if drafted else base, one.arch, gpus):
                if (fitting := _fitting(replace(one, hardware=hardware).with_name(base), base)) is not None:
                    kinds.setdefault(fitting.name, fitting)
    return tuple(kinds.values())


def fleets(
    base: Experiment, archs: Sequence[Arch], gpus: int, alone: bool = False, drafted: Sequence[Contender] = ()
) -> tuple[Contender, ...]:
    """Every fleet of a number of GPUs with these architectures: as many servers of a kind as they hold.

    If drafters are compared (`drafted`), each fleet is combined with every drafter that it supports. A disaggregated
    server has all GPUs. If cost counts, one GPU `alone` is compared too. Fleets without room for a KV cache are
    excluded.
    """
    if gpus < 2:
        raise ValueError(f"gpus must be at least 2, got {gpus}")
    if chosen(base.hardware):
        raise ValueError(
            "--gpus chooses the placement: leave out --place, --disaggregate, --cards, --replicas, "
            "--tensor-parallel-size, --data-parallel-size and --enable-expert-parallel"
        )
    ways = list[Contender]()
    for kind in servers(base, archs, [size for size in range(1, gpus + 1) if not gpus % size], drafted):
        size = kind.gpus(base)
        ways += [kind] if alone and size == 1 else []
        ways += [copies(kind, base, gpus // size)] if size == gpus or not kind.of(base).hardware.disaggregate else []
    if not ways:
        raise ValueError(
            f"{base.server.pair} does not fit on {gpus_text(gpus)}: its weights leave no room for a KV cache"
        )
    if len(ways) < 2:
        raise ValueError("--gpus needs at least two ways to use them")
    return tuple(ways)


def chosen(given: Hardware) -> bool:
    """Whether the layout of GPUs is given, so that there is none to find."""
    sizes = given.replicas, given.tensor_parallel_size, given.data_parallel_size
    placed = given.place or given.cards or given.disaggregate
    return bool(placed or given.enable_expert_parallel or max(sizes) > 1)


def _layouts(base: Experiment, arch: Arch, gpus: int) -> Iterator[Hardware]:
    """All ways to run one server of an architecture on a number of GPUs, also if its models cannot be sharded so.

    An architecture whose lanes are separate workers is also split over two GPUs or groups; pd into engines that prefill
    and engines that decode. One that drafts ahead gains nothing on one GPU. A head or an n-gram search stays with its
    target.
    """
    given, policy, mixture = base.hardware, policy_of(arch), base.server.models().target.experts is not None
    if gpus == 1 == policy.least_gpus and (arch in SERVED or given.predicted_engine == "pdvsim"):
        yield given
    if policy.in_steps() and 1 < gpus in SHARDED:
        yield replace(given, tensor_parallel_size=gpus)
    if policy.in_steps() and mixture and gpus > 1:  # the layouts between these, with some of both, are seldom best
        if gpus in SHARDED:
            yield replace(given, tensor_parallel_size=gpus, enable_expert_parallel=True)
        if gpus in RANKED:
            yield replace(given, data_parallel_size=gpus, enable_expert_parallel=True)
    if arch in archs_where(lambda policy: policy.disaggregates()):
        yield from _splits(replace(base, arch=arch), gpus)[:SPLITS]
    for target in SHARDED if policy.hands_over() and base.server.drafted_by in ("model", "none") else ():
        if (other := gpus - target) in (1, target):  # the drafter's
            split = replace(given, place=PDV_PLACE, tensor_parallel_size=target)
            yield replace(split, draft_tensor_parallel_size=other) if other > 1 else split


def _splits(base: Experiment, gpus: int) -> list[Hardware]:
    """Disaggregated servers on all of the GPUs, most promising first by the formula.

    Those that keep up are ranked by the time of an answer, the others by throughput. Those without room for the models
    are left out.
    """
    ranked: list[tuple[bool, float, int, Hardware]] = []
    mixture = base.server.models().target.experts is not None
    for prefill_size in SHARDED:
        for size in SHARDED:
            for decode in range(1, gpus // size + 1):
                prefill, left = divmod(gpus - decode * size, prefill_size)
                if left or not prefill:
                    continue
                other = prefill_size if prefill_size != size else None
                split = replace(base.hardware, disaggregate=f"{prefill}p{decode}d")
                layouts = [replace(split, tensor_parallel_size=size, prefill_tensor_parallel_size=other)]
                if mixture and max(size, prefill_size) > 1:
                    spread = replace(split, enable_expert_parallel=True)
                    layouts.append(replace(spread, data_parallel_size=size, prefill_data_parallel_size=other))
                for hardware in layouts:
                    if (fitting := _fitting(Contender("", base.arch, hardware), base)) is None:
                        continue
                    formula, k = Formula(fitting.of(base)), base.longest_draft
                    predicted = formula.at(k)
                    order = formula.answer_s(k) if predicted.keeps_up else -predicted.tokens_per_s
                    ranked.append((not predicted.keeps_up, order, len(ranked), hardware))
    return [hardware for *_, hardware in sorted(ranked, key=lambda split: split[:3])]


def _fitting(fleet: Contender, base: Experiment) -> Contender | None:
    """The fleet, with an unsharded drafter if it cannot be sharded; None without room for a KV cache."""
    whole = replace(fleet, hardware=replace(fleet.of(base).hardware, draft_tensor_parallel_size=1))
    for one in (fleet, whole):
        candidate = one.of(base)
        with suppress(CannotShard):
            engines = candidate.sides or (candidate,)
            return one if min(ServerParts(engine).kv_capacity for engine in engines) > 0 else None
    return None


def drafters(
    base: Experiment, target: str, archs: Sequence[Arch], acceptance: Acceptance | None
) -> tuple[Contender, ...]:
    """All drafters of a model that engines can load, in each architecture; a given `acceptance` applies to all."""
    contenders: dict[str, Contender] = {}  # plain decoding is the same with any drafter
    for kind in KINDS:
        if can_load(kind, target):
            pair = drafted_by(kind, target)
            accepted = acceptance or usual_acceptance(pair, base.traffic)
            for arch in archs:
                with suppress(ValueError):  # the architecture does not support this drafter
                    one = Contender("", arch, pair=pair, acceptance=accepted).with_name(base)
                    contenders.setdefault(one.name, one)
    return tuple(contenders.values())


def too_small(candidates: Sequence[Experiment], goal: Goal, space: Space) -> bool:
    """Whether the formula predicts that the load is far too high for each of the candidates."""
    return not any(_holds(at_rate(one, one.traffic.request_rate / MARGIN), goal, space) for one in candidates)


def smallest_fleets(
    base: Experiment, goal: Goal, servers: Sequence[Contender], most: int, space: Space, bench: Bench
) -> tuple[tuple[Contender, ...], dict[str, str]]:
    """The fleets of these servers that hold the load of `base` on at most `most` GPUs, smallest first.

    Also those that do not, by name with the reason.
    """
    every = {kind: _predicted(kind, base, goal, space, most) for kind in servers}
    predicted = {kind: count for kind, count in every.items() if count}
    fleets = {kind: copies(kind, base, count) for kind, count in predicted.items()}
    gpus = {kind: fleet.gpus(base) for kind, fleet in fleets.items()}
    pace_s = {kind: _ranked(fleet.of(base), space)[0].seconds_per_token for kind, fleet in fleets.items()}
    order = sorted(fleets, key=lambda kind: (gpus[kind], pace_s[kind]))
    finalists = _first_few([kind for kind in order if gpus[kind] <= WORTH * gpus[order[0]]])
    least = _least(base, goal, {kind: predicted[kind] for kind in finalists}, most, space, bench)
    refused = {}
    for kind in (*(kind for kind in servers if kind not in predicted), *order):
        if kind not in predicted:
            refused[kind.name] = f"predicted not to hold the load on {gpus_text(most)}"
        elif kind not in finalists:
            refused[kind.name] = f"predicted to need {gpus_text(gpus[kind])}"
        elif kind not in least:
            refused[kind.name] = f"not meeting the goal on {gpus_text(most)}"
    enough = (copies(kind, base, least[kind]) for kind in finalists if kind in least)
    return tuple(sorted(enough, key=lambda fleet: fleet.gpus(base))), refused


def largest_fleets(base: Experiment, servers: Sequence[Contender], most: int, space: Space) -> tuple[Contender, ...]:
    """As many of each kind of server as `most` GPUs hold: those that the formula predicts to be fastest."""
    whole = [copies(kind, base, most // kind.gpus(base)) for kind in servers if kind.gpus(base) <= most]
    return tuple(_first_few(sorted(whole, key=lambda one: -_ranked(one.of(base), space)[0].tokens_per_s)))


def _first_few(ranked: Sequence[Contender]) -> list[Contender]:
    """The first few fleets, and the first without drafts."""
    plain = [one for one in ranked if one.arch == "autoregressive"][:1]
    return list(dict.fromkeys([*ranked[:MOST_FLEETS], *plain]))


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


def _least(
    base: Experiment, goal: Goal, predicted: dict[Contender, int], most: int, space: Space, bench: Bench
) -> dict[Contender, int]:
    """The least replicas that meet the goal in a run at the whole load, where any do."""

    def fleet(server: Contender, count: int) -> Experiment:
        one = _roomy(goal.prepared(copies(server, base, count).of(base)), space)
        return with_best_length(one, space.lengths(one))

    least: dict[Contender, int] = {}
    sized = (bench.sized(fleet(server, count)) for server, count in predicted.items())
    length = next((length_of(shortened(one, RUN_SHARE)) for one in sized), None)

    def too_few(asked: dict[Contender, int]) -> list[float]:
        """1 where the replicas do not meet the goal, else -1."""
        assert length is not None
        rows = bench.rows([with_length(fleet(server, n), length) for server, n in asked.items()])
        met = [goal.met([row]) for row in rows]
        least.update((server, n) for (server, n), meets in zip(asked.items(), met, strict=True) if meets)
        return [-1 if meets else 1 for meets in met]

    limits = {server: Ends(0, most // server.gpus(base) + 1) for server in predicted}
    lockstep({server: find_edge(count, limits[server], far=0) for server, count in predicted.items()}, too_few, {})
    return least
