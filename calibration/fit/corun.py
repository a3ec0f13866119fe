"""Fit of the sharing model: how co-running launches slow each other, from co-run samples.

All coefficients but seven are fitted to pairs of dense 16-bit models. Two are fitted to triples: the effect of
priority among three, the only case with a choice of the next launch, and the additional room of three. Three are fitted
to pairs that have mixtures of experts: the effect of priority, and the weight and the room of small kernels between
their experts. The others are the room and the effect of priority of 8-bit products, from dense ones. How long the
kernels of a prompt keep others waiting, and how much of the GPU they occupy, is fitted to each model and number of
prompt tokens: the library has other kernels for each.
Co-running launches are measured while the GPU reaches its power limit and single launches on a cool one, so the effect
of the limit is removed first; the simulator adds it again. Errors are reported on held-out data: shapes (of any models
and priorities), models where several pairs were measured, and triples with a fit to pairs alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.bench.pool import parallel_map
from pdvsim.calibration.fit.points import Floats
from pdvsim.profiler import overlap
from pdvsim.sim.models.specs import GpuSpec
from pdvsim.sim.prices.contention import Sharing
from pdvsim.sim.prices.costs import CostModel, Load
from pdvsim.sim.prices.power import Draw, Power, PowerFit
from pdvsim.sim.prices.profile import ContentionFit

if TYPE_CHECKING:
    import pandas as pd

SHAPE = ["kind", "rows", "tokens", "steps", "context", "chunk_tokens", "chunk_start", "chunks"]
SAME_SOLO = ["pair", *SHAPE, "priority"]
COLUMNS = [*SAME_SOLO, "member", "model", "emits", "bucket_chunk", "context_total"]
FOLDS = 5
RATE_AND_DRAW_ITERATIONS = 5
RATIO_BOUNDS = {"wait": (-1.0, 1.0), "room": (-0.7, 0.3)}  # of logarithms
RATIO_PRIOR = 0.5  # weight of a factor's squared logarithm, in mean errors of a group
LONGEST_HALF_S = 1.0  # of a layer; room that no kernel is long enough to take
LEAST_RATE = 1e-3
Prompt = tuple[str, int]  # a model and a number of tokens, 0 for forwards of rows
# "wait" and "room": how long prompts keep others waiting and how much of the GPU they occupy, over what their time
# predicts
Ratios = dict[str, dict[Prompt, float]]


@dataclass(eq=False, kw_only=True)
class Member(Load):
    """One launch of a group as the sharing model sees it, and its measured rate."""

    kind: str
    model: str
    prompt: int = 0  # tokens, padded, of one that only prefills
    measured: float  # the work it did while all were busy, over what it would have done alone on a card as throttled
    draw: Draw | None = None  # where the card's power is known

    @property
    def sized(self) -> Prompt:
        return self.model, self.prompt


@dataclass(frozen=True)
class Group:
    """Launches measured while co-running."""

    models: str  # draft:target
    shapes: str  # what ran, whatever the models and priorities
    members: list[Member]

    @cached_property
    def sort(self) -> str:
        """The kind of group that its errors are counted under."""
        if any(member.experts_read for member in self.members):
            return "mixtures"
        return "8-bit" if any(member.eight_bits for member in self.members) else "dense"

    @cached_property
    def ordered(self) -> bool:
        return len({member.priority for member in self.members}) > 1

    @cached_property
    def measured(self) -> list[float]:
        """Measured slowdown of every member."""
        return [1 / max(member.measured, LEAST_RATE) for member in self.members]


@dataclass(frozen=True)
class Corun:
    """The fitted figures, and a row a member with its measured slowdown and what fits without it predict."""

    fit: ContentionFit
    ratios: Ratios
    # models, sort, shapes, launches, ordered, kind, measured, and predicted with these shapes or models held out (nan
    # where nothing is left to fit) or no triples fitted: by_shape, by_models, no_triples
    frame: pd.DataFrame

    def errors(self, sort: str, works: int | None = None, held_out: str = "by_shape") -> Floats:
        """Predicted over measured slowdown, less one, of a sort of groups; of its pairs (2) or triples (3) if given."""
        rows = self.frame[self.frame["sort"] == sort]
        rows = rows[rows["works"] == works] if works else rows
        off = np.asarray(rows[held_out] / rows["measured"] - 1, np.float64)
        return off[np.isfinite(off)]


def groups_of(
    frame: pd.DataFrame, gpu: GpuSpec, models: dict[str, CostModel], heat: PowerFit | None = None
) -> list[Group]:
    """Every group of co-run samples that has a window in which all its members were busy."""
    power = Power(heat, gpu.bandwidth_bytes_per_s) if heat else None
    corun = frame[frame["section"] == "corun"]
    solos = corun[corun["members"] == 1].groupby(SAME_SOLO, observed=True)["seconds"].median().to_dict()
    together = corun[corun["members"] > 1]
    columns = {name: together[name].to_numpy() for name in COLUMNS}
    times_s = together[["start_s", "end_s"]].to_numpy(float)
    groups = []
    by_group: dict[Any, Any] = together.groupby(["pair", "group"], observed=True).indices
    for (pair, _), rows in sorted(by_group.items()):
        parts = [rows[columns["member"][rows] == member] for member in np.unique(columns["member"][rows])]
        spans = [times_s[part] for part in parts]
        within = overlap.window(spans)
        if within is None:
            continue
        firsts = [{name: column[part[0]] for name, column in columns.items()} for part in parts]
        members = []
        for part, first, intervals in zip(parts, firsts, spans, strict=True):
            solo_s = float(solos[tuple(first[name] for name in SAME_SOLO)])
            rate = overlap.work_done_s(intervals, solo_s, within) / (within[1] - within[0])
            context, model = float(columns["context_total"][part].mean()), models[first["model"]]
            members.append(_member(first, rate, context, solo_s, gpu, model, power))
        if power:
            _cool(members, spans, within, power)
        shapes = " + ".join(" ".join(str(first[name]) for name in SHAPE) for first in firsts)
        groups.append(Group(str(pair), shapes, members))
    return groups


def _cool(members: Sequence[Member], spans: Sequence[Floats], within: tuple[float, float], power: Power) -> None:
    """Remove the effect of the lowered clock from the measured rates.

    A group lasts some tens of milliseconds, not much longer than the GPU takes to lower its clock. So each launch has
    the mean draw up to its own start, from the power at rest towards what all members draw together.
    """
    rest_w, begin_s = power.fit.rest_w, min(float(each[:, 0].min()) for each in spans)
    for _ in range(RATE_AND_DRAW_ITERATIONS):
        drawn_w = rest_w + sum(m.measured * (m.draw.watts - rest_w) for m in members if m.draw)
        for member, each in zip(members, spans, strict=True):
            draw = member.draw
            assert draw is not None
            means_w = [power.mean_w(rest_w, start_s - begin_s, drawn_w) for start_s in each[:, 0].tolist()]
            taken_s = np.array([power.taken_s(mean_w, draw, member.solo_s) for mean_w in means_w])
            member.measured = min(1.0, overlap.work_done_s(each, taken_s, within) / (within[1] - within[0]))


def _member(
    row: Mapping[str, Any],
    rate: float,
    context: float,
    solo_s: float,
    gpu: GpuSpec,
    model: CostModel,
    power: Power | None,
) -> Member:
    """Demands from the bytes and flops of the launch over its measured time alone, at full clock."""
    names = ("rows", "steps", "tokens", "chunks", "chunk_start", "chunk_tokens")
    rows, steps, tokens, chunks, start, prompt = (int(row[name]) for name in names)
    prompts = [(start, prompt // chunks)] * chunks if chunks else []
    cost = model.price(rows, tokens, steps, context, prompts, chunks if row["emits"] else 0)
    alone = cost.at(context)._replace(seconds=solo_s)
    if power:
        solo_s = power.full_clock_s(alone, power.fit.flop_factor(model.spec))
        alone = alone._replace(seconds=solo_s)
    member = Member(
        kind=str(row["kind"]),
        model=str(row["model"]),
        prompt=0 if rows else int(row["bucket_chunk"]),
        priority=int(row["priority"]),
        measured=rate,
        solo_s=solo_s,
        draw=power.draw(alone, power.fit.flop_factor(model.spec)) if power else None,
    )
    peak = gpu.flops_per_s, gpu.bandwidth_bytes_per_s
    model.demand(member, peak, alone.bytes, alone.flops, rows, tokens, steps, prompts)
    return member


def slowdowns(groups: Sequence[Group], fit: ContentionFit, ratios: Ratios | None = None) -> Floats:
    """Predicted slowdown of every member; without `ratios`, with those of the members."""
    sharing = {True: Sharing("fluid", "stream", fit), False: Sharing("fluid", "none", fit)}
    predicted = []
    for group in groups:
        model, members = sharing[group.ordered], group.members
        for member in members:
            member.share = 0.0  # another fit, another share
            if ratios is not None and member.prompt:
                member.wait_ratio = ratios["wait"].get(member.sized, 1.0)
                member.room_ratio = ratios["room"].get(member.sized, 1.0)
        model.solve(members)
        predicted += [1 / max(member.rate, LEAST_RATE) for member in members]
    return np.array(predicted)


def measured(groups: Sequence[Group]) -> Floats:
    """Measured slowdown of every member."""
    return np.array([slowdown for group in groups for slowdown in group.measured])


def errors(groups: Sequence[Group], fit: ContentionFit, ratios: Ratios | None = None) -> Floats:
    """Predicted over measured slowdown, less one, of every member."""
    return np.asarray(slowdowns(groups, fit, ratios) / measured(groups) - 1)


def loss(groups: Sequence[Group], fit: ContentionFit, ratios: Ratios) -> float:
    """The mean size of the logarithms of predicted over measured slowdown."""
    # the logarithm of the C library: numpy's own rounds differently on other processors, and a search follows the last
    # digit to another end
    return float(np.mean([abs(math.log1p(error)) for error in errors(groups, fit, ratios).tolist()]))


def fit_of(x: Floats) -> ContentionFit:
    """The coefficients that the free parameters encode."""
    grown = [math.exp(each) for each in x]
    return ContentionFit(
        stream_weight=1.0,  # two that fill the GPU alternate, whatever their priorities
        turn_exponent=min(grown[0], 2.0),
        small_kernel_weight=1 + grown[1],
        yielding=min(grown[2], 2.0),
        hold=1 / (1 + math.exp(-x[3])),
        hold_compute=min(grown[4], 1.0),
        hold_layer_s=min(grown[5], LONGEST_HALF_S),
    )


START = np.array([-0.2, 0.0, -1.8, 1.2, -2.1, -7.8])


def fit_groups(groups: Sequence[Group]) -> tuple[ContentionFit, Ratios] | None:
    """The figures of all launches and the ratios of prompts, in turns.

    None without pairs.
    """
    pairs = [group for group in groups if len(group.members) == 2]
    more = [group for group in groups if len(group.members) > 2]
    if not pairs:
        return None
    sorts = {sort: [group for group in pairs if group.sort == sort] for sort in ("dense", "mixtures", "8-bit")}
    triples = [group for group in more if group.sort == "dense"] or more
    ratios, start = Ratios(wait={}, room={}), START
    for names in (("wait",), ("room", "wait"), ()):
        fit, start = _fit_alike(sorts, ratios, start)
        if any(group.ordered for group in triples):
            fit = _fit_crowd(triples, fit, ratios)
        for name in names:
            ratios = _fit_ratios(groups, fit, ratios, name)
    return fit, ratios


def _fit_ratios(groups: Sequence[Group], fit: ContentionFit, known: Ratios, name: str) -> Ratios:
    """The known ratios, those of this name fitted again one by one: for a model and its number of prompt tokens."""
    by_prompt: dict[Prompt, list[Group]] = {}
    for group in groups:
        for prompt in {member.sized for member in group.members if member.prompt}:
            by_prompt.setdefault(prompt, []).append(group)
    for prompt, subset in sorted(by_prompt.items()):
        best = _best(partial(_ratio_loss, subset, fit, known, name, prompt), RATIO_BOUNDS[name])
        known = known | {name: known[name] | {prompt: best}}
    return known


def _ratio_loss(
    groups: Sequence[Group], fit: ContentionFit, known: Ratios, name: str, prompt: Prompt, ratio: float
) -> float:
    """The loss with the ratio of a prompt, which is nearer to 1 where it is in few groups."""
    others = loss(groups, fit, known | {name: known[name] | {prompt: ratio}})
    return others + RATIO_PRIOR * math.log(ratio) ** 2 / len(groups)


def _best(figure: Callable[[float], float], log_bounds: tuple[float, float]) -> float:
    """The figure of the least loss, to a thousandth: fits that build on it then end alike on all processors."""
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(lambda x: figure(math.exp(x)), bounds=log_bounds, method="bounded", options={"xatol": 1e-6})
    return round(math.exp(found.x), 3)


def _fit_alike(sorts: Mapping[str, Sequence[Group]], ratios: Ratios, start: Floats) -> tuple[ContentionFit, Floats]:
    """The figures of dense pairs, then of pairs of other sorts; and where the search for the former ended."""
    from scipy.optimize import minimize

    dense = sorts["dense"] or [group for groups in sorts.values() for group in groups]
    options: Any = {"maxfev": 1500, "xatol": 1e-3, "fatol": 1e-5, "adaptive": True}

    def alike(x: Floats) -> float:
        return loss(dense, fit_of(x), ratios)

    best: Floats = minimize(alike, start.tolist(), method="Nelder-Mead", options=options).x
    fit = fit_of(best)
    if sorts["dense"] and sorts["8-bit"]:
        fit = _fit_one(sorts["8-bit"], fit, ratios, "hold_8bit", (-1.0, 0.0))
        if any(group.ordered for group in sorts["8-bit"]):
            fit = _fit_one(sorts["8-bit"], fit, ratios, "weight_8bit", (0.0, 2.0))
            fit = _fit_one(sorts["8-bit"], fit, ratios, "hold_8bit", (-1.0, 0.0))
    if any(group.ordered for group in sorts["mixtures"]):
        fit = _fit_one(sorts["mixtures"], fit, ratios, "expert_weight", (0.0, 3.0))
    small = [g for g in sorts["mixtures"] if any(m.experts_read and m.small_kernel_share for m in g.members)]
    for name in ("small_expert_weight", "small_expert_hold") * (3 if small else 0):
        fit = _fit_one(small, fit, ratios, name, (-0.5, 0.5))
    return fit, best


def _fit_one(
    groups: Sequence[Group], fit: ContentionFit, ratios: Ratios, name: str, log_bounds: tuple[float, float]
) -> ContentionFit:
    """The fit with one more figure, from the pairs that depend on it."""

    def of(value: float) -> ContentionFit:
        figures: dict[str, Any] = {name: value}
        return replace(fit, **figures)

    return of(_best(lambda value: loss(groups, of(value), ratios), log_bounds))


def _fit_crowd(triples: Sequence[Group], fit: ContentionFit, ratios: Ratios) -> ContentionFit:
    """The fit with what holds among three."""
    from scipy.optimize import minimize

    def of(x: Floats) -> ContentionFit:
        return replace(fit, crowd_weight=1 + math.exp(x[0]), crowd_hold=min(math.exp(x[1]), 1.0))

    def among_three(x: Floats) -> float:
        return loss(triples, of(x), ratios)

    return of(minimize(among_three, np.array([-0.5, -0.05]), method="Nelder-Mead").x)


def fit_corun(
    frame: pd.DataFrame,
    gpu: GpuSpec,
    models: dict[str, CostModel],
    heat: PowerFit | None,
    progress: Callable[[], None] = lambda: None,
) -> Corun | None:
    """Fit pairs and triples; None where the samples hold no pairs."""
    import pandas as pd

    groups = groups_of(frame, gpu, models, heat)
    fitted = fit_groups(groups)
    if fitted is None:
        return None
    fit, ratios = fitted
    shapes = sorted({group.shapes for group in groups})
    fold = dict(zip(shapes, (np.random.default_rng(0).permutation(len(shapes)) % FOLDS).tolist(), strict=True))
    rows = pd.DataFrame(
        [
            {"models": g.models, "sort": g.sort, "shapes": g.shapes, "works": len(g.members)}
            | {"ordered": g.ordered, "kind": member.kind}
            for g in groups
            for member in g.members
        ]
    )
    rows["measured"] = measured(groups)
    rows["by_shape"] = held_out(groups, [fold[g.shapes] for g in groups], progress)
    rows["by_models"] = held_out(groups, [g.models for g in groups], progress)
    rows["no_triples"] = slowdowns(groups, replace(fit, crowd_weight=None, crowd_hold=1.0), ratios)
    return Corun(fit, ratios, rows)


def held_out(groups: Sequence[Group], parts: Sequence[str | int], progress: Callable[[], None]) -> Floats:
    """Each member's slowdown as a fit on the other parts predicts it; nan where those hold no pairs."""
    predicted = np.full(len(measured(groups)), np.nan)
    of_member = np.array([part for part, group in zip(parts, groups, strict=True) for _ in group.members])
    distinct = list(dict.fromkeys(parts))
    rests = [[group for group, other in zip(groups, parts, strict=True) if other != part] for part in distinct]
    fits = parallel_map(fit_groups, [(rest,) for rest in rests], progress)
    for part, fit in zip(distinct, fits, strict=True):
        out = [group for group, other in zip(groups, parts, strict=True) if other == part]
        if fit is not None:
            predicted[of_member == part] = slowdowns(out, *fit)
    return predicted
