"""A GPU's profile: all hardware data of the simulator, with its sources.

A profile is data (JSON), checked on load; an unknown key, a negative or missing figure is refused with one line.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pdvsim.sim.limits import MAX_TOKENS, Range, Share
from pdvsim.sim.models.presets import MODELS, unquantised
from pdvsim.sim.models.specs import GpuSpec, ModelSpec, Pair
from pdvsim.sim.prices.cards import GPUS, check_figures, gpu, typed
from pdvsim.sim.prices.costs import CostModel, LookupCosts, cost_model, widest_draft
from pdvsim.sim.prices.forward import REQUIRED, TIME, ForwardSeconds, ForwardTerms, interpolate
from pdvsim.sim.prices.host import HostCost as HostCost
from pdvsim.sim.prices.links import LINKS, LinkSpec
from pdvsim.sim.prices.power import PowerFit
from pdvsim.sim.prices.reach import Reach, Reaches
from pdvsim.sim.prices.steps import GraphSizes
from pdvsim.sim.prices.transfer import BAR, shipped, with_collectives
from pdvsim.sim.reading import error_text, parse_json, printable, quoted, read_text

SCHEMA = 1
# 95% of |log(predicted / measured)| of a shard's share of the whole model's time: Vidur's kernels on H100s, the worse
# of the two cards that it has them of
SHARD_BAR = 0.155
ROOFLINE = "roofline, not measured"

Weight = Annotated[float, Range(0.001, 1000)]
Exponent = Annotated[float, Range(0, 10)]
KNOTS = ("_knots", "_factors")  # ends of the names of figures that are read between knots
STEEPEST_FALL = 2 / 3  # of knots: measured times fall by half at most, where another kernel takes over


@dataclass(frozen=True)
class ContentionFit:
    """Slowdown of co-running launches beyond the sharing of bandwidth and compute."""

    stream_weight: Weight = 4.0  # share of a stream against the next lower one that is running
    # The same where three or more run: of two, each is scheduled when the other's kernel ends; only among more is there
    # a choice of which goes next. None: no different.
    crowd_weight: Weight | None = None
    # Streams take turns kernel by kernel, so a launch with longer kernels gets more of the GPU: its share grows with
    # this power of its time per layer. 0: all alike.
    turn_exponent: Exponent = 0.0
    # Kernels of few blocks find room next to others, if the one before them is small too: their share is this much
    # larger, ...
    small_kernel_weight: Weight = 1.0
    # ... and on the stream that goes first larger still, by this power of the other's time per layer over theirs.
    yielding: Exponent = 0.0
    # Kernels of experts have many short blocks. When a block ends, one of the stream with the higher priority is
    # scheduled: next to a launch that reads all experts, the share of one without small kernels is this many times
    # larger.
    expert_weight: Weight = 1.0
    # Where the other kernels of such a launch are small, they start before the experts' last blocks end. Next to all
    # experts its share of the turns is this many times larger, and it occupies this many times as much of the GPU.
    small_expert_weight: Weight = 1.0
    small_expert_hold: Annotated[float, Range(0.1, 10)] = 1.0
    # What priority is worth next to a dense launch in 8 bits, whose blocks are short too.
    weight_8bit: Weight = 1.0
    # How much of the GPU a launch holds at full speed, so that nothing else finds room: this much of one with very
    # short kernels. Of the rest, half at this time per layer (0: none), as pauses between kernels and their last
    # blocks matter less in longer ones. And more with the arithmetic it uses. All held together is at most 1. Zeros: no
    # limit.
    hold: Share = 0.0
    hold_layer_s: ForwardSeconds = 0.0
    hold_compute: Annotated[float, Range(0, 10)] = 0.0
    crowd_hold: Annotated[float, Range(0.1, 1)] = 1.0  # where three or more run they find more room: times so much
    # A launch of a model that multiplies in 8 bits occupies less: times so much.
    hold_8bit: Annotated[float, Range(0.1, 1)] = 1.0


@dataclass(frozen=True)
class Profile:
    """One GPU, the models known on it, and how well-founded the figures are."""

    schema_version: Annotated[int, Range(SCHEMA, SCHEMA)]
    name: str
    foundation: str
    gpu: GpuSpec
    models: dict[str, ForwardTerms]
    host: HostCost
    contention: ContentionFit = field(default_factory=ContentionFit)
    power: PowerFit | None = None  # absent: the clock is taken to stay where it was when forwards were measured
    provenance: dict[str, Any] = field(default_factory=dict)
    # share that holds 95% of the errors of a model's forward times, for models whose times were predicted
    uncertainty: dict[str, Annotated[float, Range(0, 10)]] = field(default_factory=dict)
    # the largest sizes measured, by model alone and for co-running launches; absent: unknown
    measured: dict[str, Reach] = field(default_factory=dict)
    measured_together: Reach | None = None
    # how many times as long as alone a model's forwards take in service, where that is known; contained in `models`
    in_service: dict[str, Annotated[float, Range(0.2, 20)]] = field(default_factory=dict)
    # of an engine's own steps, not of its forwards one by one: nothing is known of concurrent lanes
    whole_steps: bool = False
    sent_bar: ClassVar[float | None] = BAR  # the error bar of all-reduces; None: that of the other times holds them too

    def fit(self, spec: ModelSpec) -> ForwardTerms:
        """Cost terms of a model; a ValueError naming the known ones otherwise."""
        if spec.name not in self.models:
            raise ValueError(f"profile {self.name} does not cover {spec.name}; it has {', '.join(self.models)}")
        return self.models[spec.name]

    def bar(self, spec: ModelSpec) -> float:
        """The error bar of a model's forward times; of a shard's for one row, all-reduces included. 0: measured."""
        own, fit = self.uncertainty.get(spec.name, 0.0), self.models.get(spec.name)
        if fit is None or not fit.reduce_knots or self.sent_bar is None:
            return own
        sent_s = interpolate(fit.reduce_knots, 1) + interpolate(fit.gather_knots, 1)
        share = sent_s / self.cost_model(spec).price(1).seconds_0
        return own * (1 - share) + self.sent_bar * share

    def cost_model(self, spec: ModelSpec) -> CostModel:
        """The cost model of a model's launches on the GPU, or of an n-gram search on the host."""
        if spec.on_host:
            return LookupCosts(spec)
        return cost_model(spec, self.fit(spec))

    def reaches(self, pair: Pair) -> Reaches:
        """Return how much of a pair's figures was measured."""
        draft, target = (self.measured.get(spec.name) for spec in (pair.draft, pair.target))
        return Reaches(draft, target, self.measured_together, widest_draft(pair.draft))

    @property
    def handover_s(self) -> float:
        """Seconds per request between prefill and decode engines: router, connector and waits for a step."""
        return 0.0

    def covering(self, pair: Pair, link: LinkSpec | None = None) -> Profile:
        """Return the same with both models of a pair: one that it lacks is predicted, and the foundation says so.

        A shard is one that it lacks. What it exchanges with the others of its group over `link` comes on top.
        """
        whole = _predicting(self, pair)
        shards = {spec.name: spec for spec in (pair.draft, pair.target) if spec.shards > 1 or spec.data_ranks > 1}
        if link is None or not shards:
            return whole
        fits = {name: with_collectives(whole.fit(spec), spec, link, self.gpu.name) for name, spec in shards.items()}
        how = "as published" if link in (LINKS["nvlink4"], LINKS["nvlink5"]) else "as a ring's"
        return replace(
            whole, foundation=f"{whole.foundation}; all-reduces {how}, within {BAR:.0%}", models=whole.models | fits
        )

    def at_bar(self, sign: int) -> Profile:
        """Return the same with predicted forward times at one end of their error bar: +1 slow, -1 fast.

        All-reduces have a bar of their own.
        """
        bars = {name: (1 + bar) ** sign for name, bar in self.uncertainty.items()}
        sent = None if self.sent_bar is None else (1 + self.sent_bar) ** sign
        return replace(self, models={name: fit.scaled(bars.get(name, 1.0), sent) for name, fit in self.models.items()})

    def padded(self, graphs: GraphSizes) -> Profile:
        """Return the same with forwards padded to these sizes."""
        return replace(self, models={name: replace(fit, **graphs._asdict()) for name, fit in self.models.items()})

    def document(self) -> dict[str, Any]:
        """The profile as its file holds it."""
        return asdict(replace(self, models={})) | {"models": {name: fit.figures() for name, fit in self.models.items()}}


PARTS: dict[str, Any] = {
    "gpu": GpuSpec, "host": HostCost, "contention": ContentionFit, "power": PowerFit, "measured_together": Reach,
}  # fmt: skip


def roofline(spec: GpuSpec) -> Profile:
    """The best the card's ceilings allow; the host's costs are assumed, of the size seen for one graph launch."""
    return Profile(
        schema_version=SCHEMA,
        name=f"{spec.name}-roofline",
        foundation=ROOFLINE,
        gpu=spec,
        models={name: ForwardTerms.roofline(m, spec) for name, m in MODELS.items()},
        host=HostCost(launch_s=30e-6, completion_s=20e-6, handoff_s=5e-6),
        provenance={"ceilings": spec.source, "host": "assumed", "contention": "ideal sharing, assumed"},
    )


@lru_cache(maxsize=16)
def transferred(spec: GpuSpec) -> Profile:
    """The H200's profile under the ceilings of another card; host and sharing are the H200's."""
    transfer, h200 = shipped(), builtin("h200")
    if spec.sister is not None:
        return _like(builtin(spec.sister), spec)
    return Profile(
        schema_version=SCHEMA,
        name=f"{spec.name}-transferred",
        foundation="transferred from the H200's kernels, not measured",
        gpu=transfer.ceilings(spec),
        models={name: transfer.fit(m, spec) for name, m in MODELS.items()},
        host=h200.host,
        contention=h200.contention,
        provenance={"ceilings": spec.source, "kernels": transfer.source, "host": h200.name, "contention": h200.name},
        uncertainty={name: transfer.bar(card_known=False) for name in MODELS},  # no kernel of it was timed
    )


def _like(sister: Profile, spec: GpuSpec) -> Profile:
    """The profile of a card with the same chip as another: its layers take as much longer as is predicted of both."""
    sheet, known = GPUS[sister.gpu.name], replace(sister.gpu, measured=True)
    card = replace(
        spec,
        bandwidth_bytes_per_s=spec.bandwidth_bytes_per_s * known.bandwidth_bytes_per_s / sheet.bandwidth_bytes_per_s,
        flops_per_s=spec.flops_per_s * known.flops_per_s / sheet.flops_per_s,
        source=f"{spec.source}; shares of it reached as by {sister.name}",
    )
    models = {}
    for name in MODELS:
        here, there = (shipped().fit(MODELS[name], one) for one in (replace(card, measured=True), known))
        mine, other, known_knots = here.layer_knots, there.layer_knots, sister.models[name].layer_knots
        knots = tuple((at, time_s * interpolate(mine, at) / interpolate(other, at)) for at, time_s in known_knots)
        models[name] = replace(here, layer_knots=knots)
    return replace(
        sister,
        name=f"{spec.name}-transferred",
        foundation=f"transferred from the {sister.gpu.name}: {sister.foundation}",
        gpu=card,
        models=models,
        power=None,
        provenance=sister.provenance | {"ceilings": card.source, "kernels": sister.name},
        uncertainty=dict.fromkeys(models, shipped().bar(card_known=False)),
        measured={},
        measured_together=None,
        in_service={},
    )


def _predicting(profile: Profile, pair: Pair) -> Profile:
    run = {spec.name: spec for spec in (pair.draft, pair.target) if not spec.on_host}
    for spec in run.values():
        profile = _with_cache(_with_plain_head(profile, spec), spec)
    missing = {name: spec for name, spec in run.items() if name not in profile.models}
    if not missing:
        return profile
    if profile.foundation == ROOFLINE:
        fits = {name: ForwardTerms.roofline(spec, profile.gpu) for name, spec in missing.items()}
        return replace(profile, models=profile.models | fits)
    # a profile's ceilings are reached ones, whether measured or assumed
    card = replace(profile.gpu, measured=True)
    bar = max(profile.uncertainty.values(), default=shipped().bar(profile.gpu.measured))
    fits = {name: shipped().fit(spec, card) for name, spec in missing.items()}
    note = "" if profile.foundation.startswith("transferred") else f"; transferred: {', '.join(missing)}"
    items = [spec.layer_bytes for spec in missing.values()]
    items += [spec.experts.weight_bytes for spec in missing.values() if spec.experts is not None]
    if any(item is not None and item < 1 for item in items):
        note += "; weights of 4 bits by their bytes alone, with an error of at least the range"
    if any(spec.state or spec.sparse or spec.compressed for spec in missing.values()):
        note += "; states and sparse attention by their bytes and arithmetic, assumed"
    return replace(
        profile,
        foundation=profile.foundation + note,
        models=profile.models | fits,
        uncertainty=profile.uncertainty
        | {name: _sharded(shipped().widened(bar, spec), spec) for name, spec in missing.items()},
    )


def _with_plain_head(profile: Profile, spec: ModelSpec) -> Profile:
    """The profile with the head of a quantised target, which is that of the unquantised one."""
    plain = unquantised(spec.name)
    if spec.name in profile.models or spec.layer_bytes is not None or plain not in profile.models:
        return profile
    known: dict[str, Any] = {
        name: {**figures, spec.name: figures[plain]}
        for name in ("models", "measured", "in_service", "uncertainty")
        if plain in (figures := getattr(profile, name))
    }
    return replace(profile, **known)


def _with_cache(profile: Profile, spec: ModelSpec) -> Profile:
    """The profile with the reading of a model's KV cache scaled by the bytes of its values, where it has the model."""
    fit, item = profile.models.get(spec.name), spec.kv_dtype_bytes or spec.dtype_bytes
    if fit is None or item == spec.dtype_bytes:
        return profile
    note = "; KV cache of 8 bits by its bytes alone"
    return replace(
        profile,
        foundation=profile.foundation.removesuffix(note) + note,
        models=profile.models | {spec.name: fit.with_cache(item / spec.dtype_bytes)},
    )


def _sharded(bar: float, spec: ModelSpec) -> float:
    """A model's error bar with that of sharding it; errors of unlike origin add squared."""
    whole = spec.shards == 1 and spec.data_ranks == 1
    return bar if whole else math.expm1(math.hypot(math.log1p(bar), SHARD_BAR))


def load(path: str | Path) -> Profile:
    """The profile in a JSON file; a ValueError of one line naming the file and field if it is not one."""
    state: tuple[int, ...] = ()
    with suppress(OSError, ValueError):  # a missing file is reported where it is read
        status = os.stat(path)
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
    try:
        return _load(str(path), state)
    except ValueError as error:  # a key of the file may hold anything, a new line too
        raise ValueError(printable(str(error))) from None


@lru_cache(maxsize=8)
def _load(path: str, state: tuple[int, ...]) -> Profile:
    """Read and checked once, as long as the file's `state` is the same."""
    try:
        text = read_text(path)
        data = parse_json(text)
    except OSError as error:
        raise ValueError(f"profile {path}: {error.strerror}; a profile is a JSON file, or roofline") from None
    except ValueError as error:
        raise ValueError(f"profile {path}: {error_text(error)}") from None
    if not isinstance(data, dict):
        raise ValueError(f"profile {path}: expected a JSON object")
    version = data.get("schema_version")
    if type(version) is not int or version != SCHEMA:
        raise ValueError(f"profile {path}: schema_version is {quoted(version)}, this version reads {SCHEMA}")
    profile = typed(f"profile {path}: ", text, Profile)
    _check(f"profile {path}: ", data, Profile)
    for name, kind in PARTS.items():
        if data.get(name) is not None:
            _check(f"profile {path}: {name}.", data[name], kind)
    for name, figures in data["models"].items():
        _check(f"profile {path}: models.{name}.", figures, ForwardTerms)
        if missing := next((figure for figure in REQUIRED if figure not in figures), ""):
            raise ValueError(f"profile {path}: models.{name}.{missing}: Field required")
        if not figures.get("layer_knots") and not any(figures[part] for part in REQUIRED[:3]):
            raise ValueError(f"profile {path}: models.{name}.weights_s: a forward would take no time")
    for name, sizes in data.get("measured", {}).items():
        _check(f"profile {path}: measured.{name}.", sizes, Reach)
    return profile


def _check(where: str, given: dict[str, Any], kind: type) -> None:
    """Refuse unknown keys and figures that are no durations, rates or sizes."""
    for name, value in given.items():
        if name.endswith("_ratios"):
            _check_tokens(f"{where}{name}", value)
    check_figures(where, given, kind)
    for name, value in given.items():
        if name.endswith("_buckets") and value != sorted(set(value)):
            raise ValueError(f"{where}{name}: needs increasing sizes")
        if name.endswith(KNOTS) and value:
            _check_knots(f"{where}{name}", value)


def _check_knots(where: str, knots: list[tuple[int, float]]) -> None:
    """Refuse knots that no measurement gives: they rise in tokens, take time, and never take much less for more."""
    seconds = [time_s for _, time_s in knots]
    if len(knots) == 1:
        raise ValueError(f"{where}: needs two or more (tokens, seconds) pairs")
    _check_tokens(where, knots)
    if not all(TIME.holds(time_s) for time_s in seconds):
        raise ValueError(f"{where}: seconds must be {TIME}")
    if not any(seconds) or (where.endswith(".layer_knots") and not all(seconds)):
        raise ValueError(f"{where}: seconds must be above 0")
    if any(time_s < (1 - STEEPEST_FALL) * most for time_s, most in zip(seconds, accumulate(seconds, max), strict=True)):
        raise ValueError(f"{where}: more tokens must not take less than a third of the time of fewer")
    if seconds[-1] < seconds[-2]:  # what lies beyond would be less than nothing
        raise ValueError(f"{where}: the last pair's seconds must not fall")


def _check_tokens(where: str, pairs: list[tuple[int, float]]) -> None:
    """Refuse pairs whose numbers of tokens do not increase."""
    at = [tokens for tokens, _ in pairs]
    if at != sorted(set(at)) or (at and (at[0] < 0 or at[-1] > MAX_TOKENS)):
        raise ValueError(f"{where}: the tokens of its pairs must increase, up to {MAX_TOKENS}")


def builtin(gpu_name: str) -> Profile:
    """The best-founded profile for a card: measured or published where one is shipped, else transferred."""
    return _shipped(gpu_name) or transferred(gpu(gpu_name))


@cache
def _shipped(gpu_name: str) -> Profile | None:
    """Read once for all runs of a process."""
    file = files("pdvsim.sim.prices") / "data" / f"{gpu_name}.json"
    if gpu_name not in GPUS or not file.is_file():
        return None
    data = json.loads(file.read_text(encoding="utf-8"))  # checked by the tests, so not at every start
    models = {name: ForwardTerms.read(figures) for name, figures in data.pop("models").items()}
    measured = {name: Reach(**sizes) for name, sizes in data.pop("measured", {}).items()}
    read = {k: PARTS[k](**v) if k in PARTS and v is not None else v for k, v in data.items()}
    return Profile(models=models, measured=measured, **read)
