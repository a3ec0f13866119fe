"""The setting of a plot or page in one line: pair, GPU, data set, draft length, acceptance, load and seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pdvsim.sim.config import Acceptance, Experiment
from pdvsim.sim.core import LOOKED_UP
from pdvsim.sim.models.presets import unquantised
from pdvsim.sim.workload.options import LENGTHS, PREFIXES
from pdvsim.sim.workload.usual import PUBLISHED, drafter_name, has_rates, published_for
from pdvsim.view.table import load_text

if TYPE_CHECKING:
    import pandas as pd

Settings = Mapping[str, Mapping[str, Any]]  # saved settings of an experiment, by group

ASSUMED_RATE = Acceptance.acceptance_rate
RECORDED_WITH = "Llama-3.1-8B"  # the target of all included recordings
MOST_LISTED_VALUES = 3
UNITS = {"concurrency": "concurrent requests", "request_rate": "req/s"}


def setting_line(config: Settings, load: str, seeds: str, **given: str | None) -> str:
    """The line from an experiment's settings: pair, card, data, drafts, acceptance.

    Given parts replace them, unless they are None, and an empty part is omitted.
    """
    server, hardware, traffic, acceptance = (
        config.get(group, {}) for group in ("server", "hardware", "traffic", "acceptance")
    )
    parts = {
        "pair": server.get("pair", "?"),
        "card": hardware.get("gpu", "?"),
        "data": lengths_text(traffic),
        "drafts": drafts_of(server),
        "acceptance": f"acceptance {acceptance_of(acceptance)}",
    } | {name: text for name, text in given.items() if text is not None}
    return ", ".join(filter(None, [f"{parts.pop('pair')} on {parts.pop('card')}", *parts.values(), load, seeds])) + "."


def points_line(points: pd.DataFrame, configs: Sequence[Settings] = ()) -> str:
    """The line of a sweep's rows; `configs` are those of its base experiments, if known."""
    pair = values_text(points["pair"], "pairs")
    card = values_text(points["gpu"], "cards") if "gpu" in points else "?"
    load, seeds = loads_text(points), seeds_text(points["seed"])
    if not configs:
        return f"{pair} on {card}, {load}, {seeds}."
    data, drafts, rate = (
        " / ".join(dict.fromkeys(text(config[group]) for config in configs))
        for group, text in (("traffic", lengths_text), ("server", drafts_of), ("acceptance", acceptance_of))
    )
    if "num_speculative_tokens" in points:
        drafts = f"k={values_text(points['num_speculative_tokens'], 'draft lengths')}"
    if "settings" in points and points["settings"].any():
        drafts = "each architecture at its best draft length"
    if "acceptance_rate" in points:
        rate = values_text(points["acceptance_rate"], "rates")
    acceptance = f"acceptance {rate}"
    return setting_line(configs[0], load, seeds, pair=pair, card=card, data=data, drafts=drafts, acceptance=acceptance)


def lengths_text(traffic: Mapping[str, Any]) -> str:
    """Data set and lengths."""
    name = str(traffic.get("dataset_name", "?"))
    read, written = traffic.get("input_len"), traffic.get("output_len")
    usual = LENGTHS.get(name, (None, None))
    read, written = read or usual[0], written or usual[1]
    spread = f" ±{traffic['random_range_ratio']:.0%}" if traffic.get("random_range_ratio") else ""
    lengths = [f"{n} tokens {way}" for n, way in ((read, "in"), (written, "out")) if n]
    text = " ".join([name, ", ".join(lengths).replace(" tokens out", " out") + spread if lengths else ""]).strip()
    if prefix := traffic.get("prefix_len") or (PREFIXES[0] if name == "prefix_repetition" else 0):
        text += f" after a prefix of {prefix}"
    return f"{text}, {traffic['num_turns']} turns" if traffic.get("num_turns", 1) > 1 else text


def drafts_of(server: Mapping[str, Any]) -> str:
    """The draft length, or its controller."""
    if server.get("controller", "fixed") != "fixed":
        return f"{server['controller']} controller"
    return f"k={server.get('num_speculative_tokens', '?')}"


def acceptance_of(acceptance: Mapping[str, Any]) -> str:
    """Acceptance as text, in the form it was given."""
    if acceptance.get("synthetic_acceptance_rates"):
        return "by position " + "/".join(f"{rate:g}" for rate in acceptance["synthetic_acceptance_rates"])
    if acceptance.get("acceptance_model"):
        return f"as {acceptance['acceptance_model']}"
    if acceptance.get("acceptance_trace"):
        return "as recorded"
    spread, rate = acceptance.get("acceptance_concentration"), acceptance.get("acceptance_rate", math.nan)
    return f"{rate:g}" + (f" (Beta, {spread:g})" if spread else " (assumed)" if rate == ASSUMED_RATE else "")


def acceptance_source(acceptance: Acceptance) -> str:
    """Source of an acceptance as text."""
    if acceptance == Acceptance():
        return f"{ASSUMED_RATE:g}, assumed"
    if acceptance.acceptance_model is not None:
        return f"recorded with {RECORDED_WITH}, {acceptance.acceptance_model}"
    known = next((source for published, source in PUBLISHED.values() if published == acceptance), None)
    if known is not None:
        return f"published, {known}"
    return f"{acceptance_of(asdict(acceptance))}, as given"


def is_assumed(experiment: Experiment) -> bool:
    """Whether a run uses an assumed acceptance, neither given nor recorded."""
    return experiment.has_drafter and experiment.acceptance == Acceptance() and not has_rates(experiment.traffic)


def is_published(experiment: Experiment) -> bool:
    """Whether a run uses an acceptance that was published for its drafter."""
    published = published_for(experiment.server.pair)
    return experiment.has_drafter and published is not None and published.acceptance == experiment.acceptance


def recorded_elsewhere(experiment: Experiment) -> bool:
    """Whether a run uses an acceptance that was recorded with another target."""
    model = experiment.has_drafter and experiment.acceptance.acceptance_model
    return bool(model) and _target(experiment).lower() != RECORDED_WITH.lower()


def _target(experiment: Experiment) -> str:
    return unquantised(experiment.server.pair.partition(":")[2])


def acceptance_notes(experiments: Iterable[Experiment]) -> list[str]:
    """Notes of the recorded, published and assumed acceptances that results depend on."""
    drafting = [experiment for experiment in experiments if experiment.has_drafter]
    recorded = dict.fromkeys(e.acceptance.acceptance_model for e in drafting if e.acceptance.acceptance_model)
    others = ", ".join(dict.fromkeys(_target(e) for e in drafting if recorded_elsewhere(e)))
    unlike = f" (not with {others})" if others else ""
    notes = [f"acceptance as recorded with {RECORDED_WITH}{unlike}: {', '.join(recorded)}"] if recorded else []
    pairs = dict.fromkeys(e.server.pair for e in drafting if is_published(e))
    sources = {drafter_name(pair): known.source for pair in pairs if (known := published_for(pair)) is not None}
    notes += [f"acceptance of {name} as published: {source}" for name, source in sources.items()]
    assumed = ", ".join(dict.fromkeys(drafter_name(e.server.pair) for e in drafting if is_assumed(e)))
    give = "give yours with --acceptance-from or --acceptance-rate"
    return [*notes, f"acceptance {ASSUMED_RATE:g} is assumed for {assumed}: {give}"] if assumed else notes


def measure_notes(experiments: Iterable[Experiment]) -> list[str]:
    """How to measure acceptance, where results depend on one that was not measured by the user."""
    kinds = {e.server.drafted_by for e in experiments if acceptance_notes([e])}
    how = "--acceptance-from a copy of its /metrics, with --drafter"
    if kinds <= set(LOOKED_UP):  # whose rounds without a match an engine does not count
        how = "pdvsim acceptance --texts looks drafts up in your requests"
    return [f"acceptance of your own server is the best answer: {how}"] if kinds else []


def loads_text(points: pd.DataFrame) -> str:
    """The loads of rows as text: 1 to 64 concurrent requests."""
    parts = []
    for kind, group in points.groupby("load_kind", sort=False):
        loads = sorted({load for load in group["load"] if not math.isnan(load)})
        ends = " to ".join(dict.fromkeys(map(load_text, (loads[0], loads[-1])))) if loads else "the trace's own load"
        parts.append(f"{ends} {UNITS.get(str(kind), '')}".strip())
    return " and ".join(parts)


def seeds_text(seeds: Sequence[int] | pd.Series[Any]) -> str:
    """Seeds as a range: seeds 0 to 4."""
    known = sorted({int(seed) for seed in seeds})
    return f"seed {known[0]}" if len(known) == 1 else f"seeds {known[0]} to {known[-1]}"


def run_seeds(first: int, runs: int) -> str:
    """The seeds of `runs` replications."""
    return seeds_text(range(first, first + runs))


def values_text(values: Sequence[Any] | pd.Series[Any], many: str) -> str:
    """A few values as a list; more as their number."""
    known = [f"{value:g}" if isinstance(value, float) else str(value) for value in dict.fromkeys(values)]
    return ", ".join(known) if len(known) <= MOST_LISTED_VALUES else f"{len(known)} {many}"
