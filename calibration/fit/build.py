"""Make a profile from measured samples, with its errors on samples held out of its fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.bench.join import middle
from pdvsim.bench.pool import parallel_map
from pdvsim.calibration.fit.corun import FOLDS as CORUN_FOLDS
from pdvsim.calibration.fit.corun import Corun, fit_corun
from pdvsim.calibration.fit.forward import Kernels, Solo, fit_solo
from pdvsim.calibration.fit.points import layer_courses, medians, reach_of
from pdvsim.calibration.fit.power import PowerCalibration, at_full_clock, fit_power
from pdvsim.calibration.fit.service import WarmUp, in_service
from pdvsim.common.files import write_whole
from pdvsim.realrun.engine.buckets import CHUNK_BUCKETS, PROGRAMS_PER_SM, ROW_BUCKETS, SMALL_BYTES, SMALL_TOKENS
from pdvsim.sim.models.specs import GpuSpec, ModelSpec
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.power import Power
from pdvsim.sim.prices.profile import SCHEMA, ContentionFit, HostCost, Profile

if TYPE_CHECKING:
    import pandas as pd

    from pdvsim.profiler.samples import Samples, SamplesHeader


@dataclass(frozen=True)
class Calibration:
    """A profile, and how well each part of it holds."""

    profile: Profile
    solos: dict[str, Solo]
    corun: Corun | None
    heated: PowerCalibration | None

    def document(self) -> dict[str, Any]:
        """All errors, as one document."""
        return {
            "name": self.profile.name,
            "foundation": self.profile.foundation,
            "solo": {
                model: {"points": solo.points, **middle(solo.errors), "spread": middle(solo.spread)}
                for model, solo in self.solos.items()
            },
            "corun": corun_errors(self.corun) if self.corun else None,
            "power": power_errors(self.heated) if self.heated else None,
            "contention": asdict(self.profile.contention),
            "host": asdict(self.profile.host),
        }


def read(path: str | Path) -> Samples:
    """The samples in a folder, or those of a samples.parquet with its header next to it; a ValueError otherwise."""
    from pdvsim.profiler.samples import SAMPLES, load

    path = Path(path)
    if path.is_dir() or not path.exists():
        return load(path)
    if path.name != SAMPLES:
        raise ValueError(f"{path}: expected a folder with {SAMPLES} and header.json, or that {SAMPLES}")
    return load(path.parent)


def host_cost(frame: pd.DataFrame) -> HostCost:
    """Medians over kinds and sizes: what a launch costs the device, and what reading its result costs.

    A launch is the time from the call to noticing its end that is not the device's own: the device begins before the
    call returns, so the whole call would be too much. A hand-over between lanes is a few queue operations of the same
    thread, measured apart; samples without it are taken to have spent a tenth of a launch.
    """
    host = frame[frame["section"] == "host"]
    by = host.groupby("what", observed=True)["seconds"].median()
    missing = [what for what in ("turnaround", "outcome") if what not in by]
    if missing:
        raise ValueError(f"samples hold no host costs ({', '.join(missing)}): also measure a pair, with --pairs")
    launch = float(by["turnaround"])
    handoff = float(by["handoff"]) if "handoff" in by else launch / 10
    return HostCost(launch_s=launch, completion_s=float(by["outcome"]), handoff_s=handoff)


def gpu_spec(header: SamplesHeader, name: str) -> GpuSpec:
    """The GPU with the peak rates measured with the samples."""
    card = header.device
    if card.bandwidth_bytes_per_s is None or card.flops_per_s is None or card.memory_bytes is None:
        raise ValueError(f"samples of {card.name} hold no bandwidth and arithmetic: measured without a GPU")
    dates = sorted(part.date for part in header.parts)
    return GpuSpec(
        name,
        bandwidth_bytes_per_s=card.bandwidth_bytes_per_s,
        flops_per_s=card.flops_per_s,
        memory_bytes=card.memory_bytes,
        source=f"{card.name}: copy and bf16 matrix product measured {dates[0][:10]}",
        measured=True,
        sms=card.multiprocessors,
    )


def kernels(header: SamplesHeader) -> Kernels:
    """Return the measured engine's cost model on this card."""
    programs = PROGRAMS_PER_SM * (header.device.multiprocessors or 1)
    # up to this number of tokens its own small kernels do a model's small products; the library's fill the card
    return Kernels(ROW_BUCKETS, CHUNK_BUCKETS, programs, SMALL_TOKENS, SMALL_BYTES)


def parts(samples: Samples) -> int:
    """Return how often `calibrate` reports progress."""
    frame = samples.frame
    pairs = frame[(frame["section"] == "corun") & (frame["members"] > 1)]["pair"].nunique()
    models = int(frame[frame["section"] == "solo"]["model"].nunique())
    return models + (CORUN_FOLDS + int(pairs) if pairs else 0)


def calibrate(
    samples: Samples,
    name: str,
    progress: Callable[[], None] = lambda: None,
    served: Sequence[WarmUp] = (),
    join_s: float = 0.0,
) -> Calibration:
    """Fit everything; `progress` is called after each of the `parts`, `served` are warm-ups of real runs.

    `join_s` is the host time of prompts in these runs.
    """
    gpu, frame, specs = gpu_spec(samples.header, name), samples.frame, samples.header.specs()
    host = host_cost(frame)
    alone = frame[frame["section"] == "solo"].groupby("model", sort=True, observed=True)
    measured = {str(model): medians(rows) for model, rows in alone}
    if not measured:
        raise ValueError("samples hold no model measured alone: measure some with --models")
    engine = kernels(samples.header)
    # the draw of a launch follows from its bytes and flops, which need no fit
    counted = {model: _unfitted(specs[model], gpu, engine) for model in measured}
    heated = fit_power(frame, gpu, counted)
    if heated:
        power = Power(heated.fit, gpu.bandwidth_bytes_per_s)
        measured = {model: at_full_clock(points, counted[model], power) for model, points in measured.items()}
    courses = layer_courses(frame)
    todo = [(points, specs[model], gpu, engine, courses.get(model)) for model, points in measured.items()]
    solos = dict(zip(measured, parallel_map(fit_solo, todo, progress), strict=True))
    models = {model: CostModel(specs[model], solo.fit) for model, solo in solos.items()}
    corun = fit_corun(frame, gpu, models, heated.fit if heated else None, progress)
    header = samples.header
    profile = Profile(
        schema_version=SCHEMA,
        name=f"{name}-measured",
        foundation=f"measured on {header.device.name}, {min(part.date for part in header.parts)[:10]}",
        gpu=gpu,
        models={model: _with_ratios(model, solo.fit, corun) for model, solo in solos.items()},
        host=host,
        contention=corun.fit if corun else ContentionFit(),
        power=heated.fit if heated else None,
        provenance={
            "device": header.device.name,
            "software": header.software,
            "dates": sorted({part.date[:10] for part in header.parts}),
            "samples": header.samples,
            "held_out_error": {model: middle(solo.errors) for model, solo in solos.items()},
            "corun_held_out_error": corun_errors(corun) if corun else "ideal sharing, assumed",
            "power_error": power_errors(heated) if heated else "constant clock, assumed",
        },
        **ranges(frame),
    )
    return Calibration(in_service(profile, served, join_s) if served else profile, solos, corun, heated)


def _with_ratios(model: str, terms: ForwardTerms, corun: Corun | None) -> ForwardTerms:
    """A model's terms with how long its prompts keep others waiting and what they occupy, where that was measured."""
    if corun is None:
        return terms
    wait, room = (
        tuple(sorted((tokens, ratio) for (name, tokens), ratio in ratios.items() if name == model))
        for ratios in (corun.ratios["wait"], corun.ratios["room"])
    )
    return replace(terms, wait_ratios=wait, room_ratios=room)


def _unfitted(spec: ModelSpec, gpu: GpuSpec, engine: Kernels) -> CostModel:
    """A model whose launches move the engine's bytes, padded as it pads, in times that nothing was fitted to."""
    roof = ForwardTerms.roofline(spec, gpu)
    return CostModel(spec, replace(roof, row_buckets=engine.row_buckets, chunk_buckets=engine.chunk_buckets))


def ranges(frame: pd.DataFrame) -> dict[str, Any]:
    """The ranges of the samples, as a profile records them."""
    alone = frame[frame["section"] == "solo"].groupby("model", sort=True, observed=True)
    together = frame[(frame["section"] == "corun") & (frame["members"] > 1)]
    return {
        "measured": {str(model): reach_of(rows) for model, rows in alone},
        "measured_together": reach_of(together) if len(together) else None,
    }


def corun_errors(corun: Corun) -> dict[str, Any]:
    """Errors of pairs and triples held out by shapes and by models, and of triples where none of them is fitted.

    Those with mixtures of experts or 8-bit products are apart.
    """
    errors_by_kind: dict[str, Any] = {}
    ways = ("by_shape", "by_models")
    kinds = (
        ("pairs", "dense", 2, ways),
        ("triples", "dense", 3, (*ways, "no_triples")),
        ("mixtures", "mixtures", None, ways[:1]),
        ("8-bit", "8-bit", None, ways[:1]),
    )
    for label, sort, works, held_outs in kinds:
        for held_out in held_outs:
            errors = corun.errors(sort, works, held_out)
            if len(errors):
                errors_by_kind[f"{label}_{held_out}"] = {"works": len(errors), **middle(errors)}
    return errors_by_kind


def power_errors(heated: PowerCalibration) -> dict[str, Any]:
    """Return the errors of the power readings, and of launch times in runs without a pause."""
    return {
        "watts": middle(heated.power_error),
        "seconds": {"runs": len(heated.time_error), **middle(heated.time_error)},
    }


def as_bytes(profile: Profile) -> bytes:
    """A profile as the JSON that `pdvsim.sim.prices.profile.load` reads."""
    return (json.dumps(profile.document(), indent=1) + "\n").encode()


def save(profile: Profile, path: str | Path) -> None:
    """Write a profile."""
    write_whole(Path(path), as_bytes(profile))
