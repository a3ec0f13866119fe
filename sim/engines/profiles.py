"""The profile of an engine on a card: its kernels' times, its own constants, and how it pads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import numpy as np

from pdvsim.sim.core import DrafterKind, ServingEngine
from pdvsim.sim.engines import ENGINES
from pdvsim.sim.models.specs import GpuSpec
from pdvsim.sim.prices.cards import gpu
from pdvsim.sim.prices.composed import ComposedProfile
from pdvsim.sim.prices.host import HostCost
from pdvsim.sim.prices.kernels import KernelTables, read_tables, shipped_tables
from pdvsim.sim.prices.options import Padding
from pdvsim.sim.prices.profile import SCHEMA, Profile, builtin
from pdvsim.sim.prices.shapes import packed, roofline, unpacked
from pdvsim.sim.prices.steps import EngineStep, GraphSizes
from pdvsim.sim.prices.transfer import shipped

MESSAGES = ("reduce", "nccl", "deepep", "deepep-nodes")
SCALED_BAR = 0.15  # widens the errors where the tables are another card's
TABLES = ".npz"  # end of the names of files of calibrate --from-kernels


@cache
def engine_profile(engine: ServingEngine, card: str, version: str = "") -> ComposedProfile:
    """The profile of an engine on a card; a ValueError that names the cards it has tables of otherwise.

    `version` chooses among the engine's constants, where older versions have their own; empty: the newest.
    """
    known = {name: path for one, name, path in shipped_tables() if one == engine}
    if card in known:
        return from_tables(read_tables(known[card], gpu(card)), version)
    if not known:
        raise ValueError(f"--engine {engine}: there are no kernel tables of it")
    return from_tables(scaled(read_tables(known[(near := _nearest(gpu(card), known))], gpu(near)), gpu(card)), version)


def _nearest(card: GpuSpec, known: Iterable[str]) -> str:
    """The card with tables that is nearest in bandwidth and arithmetic, as ratios."""
    ratios = {name: (_ratios(gpu(name), card)) for name in known}
    return min(ratios, key=lambda name: sum(abs(math.log(ratio)) for ratio in ratios[name]))


def _ratios(one: GpuSpec, other: GpuSpec) -> tuple[float, float]:
    """Arithmetic and bandwidth of a card over another's."""
    return one.flops_per_s / other.flops_per_s, one.bandwidth_bytes_per_s / other.bandwidth_bytes_per_s


def scaled(tables: KernelTables, card: GpuSpec) -> KernelTables:
    """Another card's tables: products by the roofline of their size, prefill by arithmetic, the rest by bandwidth.

    Messages between GPUs take as long.
    """
    old = tables.gpu
    flops, bandwidth = _ratios(old, card)
    arrays = dict(tables.arrays)
    for name in (name for name in arrays if name.endswith("/t")):
        table, kind = name.split("/")[:2]
        if table == "gemm":
            m, n, k = (arrays[f"gemm/{kind}/{axis}"].astype(float) for axis in "mnk")
            sizes = kind, m[:, None, None], n[None, :, None], k[None, None, :]
            arrays[name] = packed(np.exp(unpacked(arrays[name])) * roofline(card, *sizes) / roofline(old, *sizes))
        elif table not in MESSAGES:
            arrays[name] = packed(np.exp(unpacked(arrays[name])) * (flops if "prefill" in table else bandwidth))
    return replace(tables, about={**tables.about, "scaled": old.name}, gpu=card, arrays=arrays, _cache={})


def from_tables(tables: KernelTables, version: str = "") -> ComposedProfile:
    """The profile that tables give with the engine's constants."""
    engine = ENGINES[tables.engine]  # type: ignore[index]
    h200, step, error = builtin("h200"), engine.era(version).step, engine.error(tables.gpu.name)
    served, version = version, f"{tables.engine} {tables.version}"
    kernels = f"{version}{f', host of {tables.engine} {served}' if served else ''}"
    measured, near = "no measured server", tables.about.get("scaled")
    if error is not None and near is not None:
        error = replace(error, tpot=math.expm1(math.hypot(math.log1p(error.tpot), math.log1p(SCALED_BAR))))
    if error is not None:
        where = "" if error.here else " on other cards"
        measured = f"TPOT of {error.rows} measured servers{where} within {error.tpot:.0%}"
    return ComposedProfile(
        schema_version=SCHEMA,
        name=f"{tables.gpu.name}-{tables.engine}",
        foundation=f"composed from the kernels of {kernels}{f' on {near}, scaled' if near else ''}; {measured}",
        gpu=shipped().ceilings(tables.gpu),
        models={},
        host=_host(step),
        contention=h200.contention,
        provenance={
            "ceilings": tables.gpu.source,
            "kernels": f"{version} on {tables.about['system']}: {tables.about['source']}",
            "verify width": "pdvsim's ratio of wide to narrow attention on the H200, assumed",
            "contention": "the H200's, assumed",
        },
        tables=tables,
        step=step,
        error=error,
        graphs=engine.graphs,
        served=served,
    )  # fmt: skip


def _host(step: EngineStep) -> HostCost:
    handoff_s = builtin("h200").host.handoff_s
    return HostCost(0.0, step.step_s, handoff_s, step.row_s, step.request_s, step.prompt_token_s)


def serving(
    profile: ComposedProfile, kind: DrafterKind, asynchronous: bool | None = None, eager: bool = False
) -> ComposedProfile:
    """The profile with a kind of drafter, asynchronous scheduling or not (None: by default), and eager or not."""
    step = ENGINES[profile.engine].serving(profile.served, kind, asynchronous, eager)
    graphs = GraphSizes() if eager else profile.graphs
    return profile if step == profile.step else replace(profile, step=step, host=_host(step), graphs=graphs)


def padded(profile: Profile, padding: Padding) -> Profile:
    """The profile with forwards padded as `--padding` says; that of an engine is padded as the engine does."""
    own = ENGINES[profile.engine].padding if isinstance(profile, ComposedProfile) else "profile"
    if padding == own:
        return profile
    if own != "profile":
        raise ValueError(f"--padding {padding}: profile {profile.name} is padded as {own}")
    if profile.whole_steps:
        raise ValueError(f"--padding {padding}: profile {profile.name} holds an engine's steps, padding included")
    return profile.padded(next(engine.graphs for engine in ENGINES.values() if engine.padding == padding))
