"""What figures have in common, as pictures and on the page: colours, markers, names and units, what they rest on.

Colours are seaborn's colour-blind palette. An architecture has the same one in every figure, by its rank in the table
of architectures; markers and dashes tell them apart without colour.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from pdvsim.sim.core import KINDS
from pdvsim.sim.metrics.summary import STEPS
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.records import LANES

if TYPE_CHECKING:
    import pandas as pd

BLUE, ORANGE, GREEN, RED, PINK, BROWN, ROSE, GREY, YELLOW, SKY = (
    "#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9",
)  # fmt: skip
RAMP = ("#1b1044", "#4a2c82", "#7a4fb5", "#a67fd1", "#cdb4e6")  # of what is no architecture
ARCH_COLOURS = dict(zip(ARCHS, (GREY, BROWN, GREEN, BLUE, RED, PINK, ORANGE, SKY, YELLOW), strict=False))
ARCH_MARKERS = dict(zip(ARCHS, "XPsoDv^*>", strict=False))
LANE_COLOURS = dict(zip(LANES, (SKY, RED, BLUE, GREEN), strict=True))
KIND_COLOURS = dict(zip((*KINDS, "mixed", "read"), (SKY, RED, BLUE, GREEN, PINK, ORANGE, YELLOW), strict=True))
STEP_COLOURS = dict(zip(STEPS, (GREY, SKY, RED, YELLOW, BLUE, ROSE), strict=True))
OWN_COLOURS, OWN_MARKERS = ("#333333", ROSE, YELLOW), "pHd"  # of architectures of the user's own, by their name

AXIS_NAMES = {"concurrency": "Concurrent requests", "request_rate": "Request rate (req/s)", "trace": "Trace"}
NAMES = {
    "output_throughput": ("Output throughput", "tok/s", 1.0),
    "request_throughput": ("Request throughput", "req/s", 1.0),
    "total_token_throughput": ("Total token throughput", "tok/s", 1.0),
    "request_goodput": ("Request goodput", "req/s", 1.0),
    "spec_decode_acceptance_rate": ("Drafted tokens accepted", "%", 1.0),
    "spec_decode_judged_acceptance_rate": ("Judged tokens accepted", "%", 1.0),
    "spec_decode_acceptance_length": ("Tokens per round", "tokens", 1.0),
}
LATENCY = re.compile(r"(mean|std|median|p[\d.]+)_(ttft|tpot|itl|e2el)_ms")
LANE = re.compile(rf"lanes_({'|'.join(LANES)})_(utilisation|bandwidth_share|mean_queue_depth)")
LANE_NAMES = {
    "utilisation": ("busy", "%", 100.0),
    "bandwidth_share": ("share of copy bandwidth", "%", 100.0),
    "mean_queue_depth": ("queue", "requests", 1.0),
}


def name_of(column: str) -> tuple[str, str, float]:
    """What a column is called, its unit, and by what its values are multiplied to be in that unit."""
    if column in NAMES:
        return NAMES[column]
    if found := LATENCY.fullmatch(column):
        statistic, metric = found.groups()
        return f"{statistic.capitalize()} {metric.upper()}", "ms", 1.0
    if found := LANE.fullmatch(column):
        words, unit, scale = LANE_NAMES[found[2]]
        return f"{found[1].capitalize()} lane: {words}", unit, scale
    unit = "ms" if "_ms" in column else ""
    return column.replace("_ms", "").replace("_", " ").capitalize(), unit, 1.0


def arch_rank(arch: str) -> tuple[int, str]:
    """Where an architecture stands in a legend that has no order of its own: by the table, the user's own behind."""
    return (ARCHS.index(arch) if arch in ARCHS else len(ARCHS)), arch


def arch_colour(arch: str) -> str:
    """The colour of an architecture."""
    return ARCH_COLOURS.get(arch) or OWN_COLOURS[crc32(arch.encode()) % len(OWN_COLOURS)]


def arch_marker(arch: str) -> str:
    """The marker of an architecture."""
    return ARCH_MARKERS.get(arch) or OWN_MARKERS[crc32(arch.encode()) // len(OWN_COLOURS) % len(OWN_MARKERS)]


def paler(colour: str, share: float) -> str:
    """A colour with that share of white in it."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def lower_is_better(column: str) -> bool:
    """Whether less of a metric is more for the user: times are."""
    return column.endswith("_ms")


def grew(stability: object) -> bool:
    """Whether a label says that a queue was still growing, in any replication."""
    return "overloaded" in str(stability)


def tail(points: pd.DataFrame) -> str:
    """The highest percentile the rows hold, as its key; the median where they hold none."""
    given = [found[1] for c in points.columns if (found := re.fullmatch(r"(p[\d.]+)_ttft_ms", str(c)))]
    return max(given, key=lambda name: float(name[1:]), default="median")


def rests_on(points: pd.DataFrame) -> str:
    """Which GPU the figures are of, and what they are founded on."""
    pairs = points[["profile", "foundation"]].drop_duplicates()
    said = [
        f"{foundation}" if foundation == "measured run" else f"simulated, profile {profile}: {foundation}"
        for profile, foundation in zip(pairs["profile"], pairs["foundation"], strict=True)
    ]
    text = "; ".join(said)
    return text[:1].upper() + text[1:] + "."


def replications(points: pd.DataFrame, dims: Sequence[str] = ()) -> str:
    """How many replications stand behind each point; `dims` are the columns that tell settings apart."""
    return counted(points.groupby(["arch", "load_kind", "load", *dims], dropna=False)["seed"].nunique().tolist())


def counted(replications: Sequence[int]) -> str:
    """Numbers of replications as a sentence."""
    low, high = min(replications), max(replications)
    if high == 1:
        return "One replication: no interval, no significance."
    return f"{low if low == high else f'{low} to {high}'} replications."
