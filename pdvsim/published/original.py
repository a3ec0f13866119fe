"""The original question, asked of pdvsim's own policies: does PDV beat PD and plain batching, at which load?

As published: three pairs, 14 levels of concurrency, drafts of four, each pair's published acceptance, and Poisson
arrivals at 0.05 C a second. Otherwise than published: ShareGPT's lengths, served to the end, by an engine that batches
on a measured card; and also closed loops of C.

Not done here: tuning. Every architecture has the same settings; `pdvsim compare` and `pdvsim advise` tune each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdvsim.common.outcomes import Row
from pdvsim.published.job import K, coin_for
from pdvsim.published.poisson_fit import ALL_COMPLETED, OUTPUT_TOKENS, RATE_PER_CONCURRENCY
from pdvsim.published.tables import Key, Published
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Scoring, Server, Traffic
from pdvsim.sim.metrics.works import busy_share
from pdvsim.sim.relevance import suited
from pdvsim.sim.run import simulate
from pdvsim.study.backends import Backend, finished
from pdvsim.study.sweep import LoadKind, Point, PointFailed, frame_of, row_of

if TYPE_CHECKING:
    import pandas as pd

PAIRS = {
    "TinyLlama-TinyLlama": "tinyllama-1.1b:tinyllama-1.1b",
    "TinyLlama-Llama7B": "tinyllama-1.1b:llama-2-7b",
    "TinyLlama-CodeLlama34B": "tinyllama-1.1b:codellama-34b",
}
ARCHS: tuple[Arch, ...] = ("baseline", "colocated", "pd", "pdv", "pdv-unified", "pdv-hybrid", "adaptive")
AGAINST: Arch = "pd"  # what the published improvement is over
LEAD = 0.04  # a smaller one may be the simulator's own error: 3.5% in throughput
KINDS: tuple[LoadKind, ...] = ("concurrency", "request_rate")
REQUESTS_PER_LEVEL, FEWEST = 1.5, 12  # as many as 30 s of 0.05 C a second bring


@dataclass(frozen=True)
class Fare:
    """How one architecture fares against `AGAINST` over the levels of one pair and kind of load."""

    pair: str
    kind: str
    arch: str
    levels: int
    ahead: tuple[int, ...]  # levels at which it leads by more than `LEAD`
    behind: tuple[int, ...]
    least: float  # change of throughput, over the levels
    most: float
    least_p99: float  # of the P99 latency
    most_p99: float


def levels(published: Published) -> tuple[int, ...]:
    """The published levels of concurrency."""
    return tuple(sorted({row[2] for row in published.rows("poisson_30s")}))


def acceptance(published: Published, label: str) -> float:
    """The chance of one draft behind a pair's published acceptance, where every request completed."""
    shown = published.input(Key("poisson_30s", label, "pd", ALL_COMPLETED, "acceptance_mean"))
    return coin_for(shown, OUTPUT_TOKENS)


def points(published: Published, levels: tuple[int, ...], gpu: str = "h200", seed: int = 0) -> Iterator[Point]:
    """Every run: pairs x kinds of load x levels x architectures; the same requests for all architectures."""
    for label, pair in PAIRS.items():
        base = Experiment(
            acceptance=Acceptance(acceptance(published, label)),
            server=Server(pair, num_speculative_tokens=K),
            hardware=Hardware(gpu),
            scoring=Scoring(percentile_metrics=("ttft", "e2el"), metric_percentiles=(99.0,)),
        )
        for kind in KINDS:
            for level in levels:
                count = max(FEWEST, round(REQUESTS_PER_LEVEL * level))
                traffic = Traffic(num_prompts=count, seed=seed)
                if kind == "concurrency":
                    traffic = replace(traffic, max_concurrency=level)
                else:
                    traffic = replace(traffic, request_rate=RATE_PER_CONCURRENCY * level)
                for arch in ARCHS:
                    yield Point(kind, float(level), 0, suited(replace(base, arch=arch, traffic=traffic)))


def run_original(
    asked: list[Point], jobs: int | None = None, progress: Callable[[int], None] | None = None
) -> pd.DataFrame:
    """One row a point, in their order; a PointFailed names one that has none."""
    rows: dict[int, Row] = {}
    # the longest first: nobody waits for the last one alone
    items = sorted(enumerate(asked), key=lambda item: -item[1].load)
    for outcome in finished(run_one, items, Backend(jobs=jobs)):
        if outcome.row is None:
            raise PointFailed(asked[outcome.index], outcome)
        rows[outcome.index] = outcome.row
        if progress:
            progress(len(rows))
    return frame_of(rows[index] for index in sorted(rows))


def run_one(index: int, point: Point) -> Row:
    """A point's row, with the share of time in which its GPU was busy."""
    result = simulate(point.experiment)
    return row_of(index, point, result) | {"gpu_busy": busy_share(result.launches)}


def changes(rows: pd.DataFrame, metric: str) -> dict[tuple[str, str, str], pd.Series[float]]:
    """What each architecture changes over `AGAINST`, by level, as a share; by pair, kind of load and architecture."""
    found = {}
    for (pair, kind), group in rows.groupby(["pair", "load_kind"], sort=False):
        by_arch = {arch: mine.set_index("load")[metric] for arch, mine in group.groupby("arch")}
        for arch in ARCHS:
            found[str(pair), str(kind), arch] = by_arch[arch] / by_arch[AGAINST] - 1
    return found


def tallies(rows: pd.DataFrame) -> list[Fare]:
    """Success and failure: who is ahead of `AGAINST`, who behind, and where."""
    speed, tail = changes(rows, "output_throughput"), changes(rows, "p99_e2el_ms")
    found = []
    for pair in PAIRS.values():
        for kind in KINDS:
            for arch in ARCHS:
                if arch == AGAINST:
                    continue
                row, late = speed[pair, kind, arch], tail[pair, kind, arch]
                ahead = tuple(int(level) for level in row.index[row > LEAD])
                behind = tuple(int(level) for level in row.index[row < -LEAD])
                ends = (float(row.min()), float(row.max()), float(late.min()), float(late.max()))
                found.append(Fare(pair, kind, arch, len(row), ahead, behind, *ends))
    return found


def best(rows: pd.DataFrame, pair: str, kind: str) -> dict[int, str]:
    """The architecture with the most tokens per second at each level."""
    chosen = rows[(rows["pair"] == pair) & (rows["load_kind"] == kind)]
    first = chosen.loc[chosen.groupby("load")["output_throughput"].idxmax()]
    return {int(level): str(arch) for level, arch in zip(first["load"], first["arch"], strict=True)}
