"""The original question end to end, as one page: does PDV beat PD and plain batching, at which load?

As published: three pairs, 14 levels of concurrency, draft length 4, each pair's published acceptance, and Poisson
arrivals at 0.05 C per second. Different from the publication: ShareGPT's lengths, served to the end, by an engine
that batches on a measured GPU; and also closed loops of C. Every architecture has the same settings: nothing is tuned.

`python studies/original.py`, or `make original`, writes results/original: the five published plots, and where each
architecture succeeds and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdvsim.bench import output
from pdvsim.bench.pool import Backend, Row, finished
from pdvsim.bench.run import PointFailed, labelled, row_of
from pdvsim.bench.sweep import LoadKind, Point, frame_of
from pdvsim.cli.page import facts_of
from pdvsim.common.progress import Progress
from pdvsim.published.models import ALL_COMPLETED, POISSON_TOKENS, RATE_PER_CONCURRENCY
from pdvsim.published.program import K, coin_for
from pdvsim.published.tables import Key, Published, load_published
from pdvsim.sim.config import Acceptance, Arch, Experiment, Scoring, Server, Traffic
from pdvsim.sim.metrics.launches import busy_share
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.view.charts import Chart, Tile
from pdvsim.view.differences import colour_of
from pdvsim.view.figure import chart_figure, new_figure, styled
from pdvsim.view.report.sheet import Sheet
from pdvsim.view.style import arch_colour, arch_marker
from pdvsim.view.table import TextTable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = Path("results/original")
LEAD_TEXT = (
    "Does a verify lane pay? The published architectures and today's usual one on pdvsim's engine: ShareGPT's lengths, "
    "draft length 4, each pair's published acceptance, the same settings for all."
)
PAIRS = {
    "TinyLlama-TinyLlama": "tinyllama-1.1b:tinyllama-1.1b",
    "TinyLlama-Llama7B": "tinyllama-1.1b:llama-2-7b",
    "TinyLlama-CodeLlama34B": "tinyllama-1.1b:codellama-34b",
}
ARCHS: tuple[Arch, ...] = ("baseline", "colocated", "pd", "pdv", "pdv-unified", "pdv-hybrid", "adaptive")
AGAINST: Arch = "pd"  # baseline of the published improvement
LEAD = 0.04  # smaller leads may be the simulator's own error in throughput
STRONGEST = 0.3  # lead with the strongest colour
KINDS: tuple[LoadKind, ...] = ("concurrency", "request_rate")
REQUESTS_PER_LEVEL, FEWEST = 1.5, 12  # the arrivals of 30 s at 0.05 C per second


def levels(published: Published) -> tuple[int, ...]:
    """The published levels of concurrency."""
    return tuple(sorted({row[2] for row in published.rows("poisson_30s")}))


def acceptance(published: Published, label: str) -> float:
    """Acceptance probability of one draft token, from a pair's published acceptance where every request completed."""
    shown = published.input(Key("poisson_30s", label, "pd", ALL_COMPLETED, "acceptance_mean"))
    return coin_for(shown, POISSON_TOKENS)


def points(published: Published, levels: tuple[int, ...]) -> Iterator[Point]:
    """Every run: pairs x kinds of load x levels x architectures; the same requests for all architectures."""
    for label, pair in PAIRS.items():
        base = Experiment(
            acceptance=Acceptance(acceptance(published, label)),
            server=Server(pair, num_speculative_tokens=K),
            scoring=Scoring(metric_percentiles=(99.0,)),
        )
        for kind in KINDS:
            for level in levels:
                count = max(FEWEST, round(REQUESTS_PER_LEVEL * level))
                traffic = Traffic(num_prompts=count)
                if kind == "concurrency":
                    traffic = replace(traffic, max_concurrency=level)
                else:
                    traffic = replace(traffic, request_rate=RATE_PER_CONCURRENCY * level)
                for arch in ARCHS:
                    yield Point(kind, float(level), 0, applicable(replace(base, arch=arch, traffic=traffic)))


def run_original(
    asked: list[Point], jobs: int | None = None, progress: Callable[[int], None] | None = None
) -> pd.DataFrame:
    """One row per point, in order; a PointFailed names a point without one."""
    rows: dict[int, Row] = {}
    # longest first, so that all processes finish at about the same time
    items = sorted(enumerate(asked), key=lambda item: -item[1].load)
    for outcome in finished(run_one, items, Backend(jobs=jobs)):
        if outcome.row is None:
            raise PointFailed(asked[outcome.index], outcome)
        rows[outcome.index] = outcome.row
        if progress:
            progress(len(rows))
    return frame_of(rows[index] for index in sorted(rows))


def run_one(index: int, point: Point) -> Row:
    """A point's row, with the share of time in which the GPU was busy."""
    result = simulate(point.experiment)
    return labelled(index, point, row_of(point.experiment, result)) | {"gpu_busy": busy_share(result.launches)}


def changes(rows: pd.DataFrame, metric: str) -> dict[tuple[str, str, str], pd.Series[float]]:
    """Relative change of each architecture from `AGAINST` by level; by pair, kind of load and architecture."""
    ratios = {}
    for (pair, kind), group in rows.groupby(["pair", "load_kind"], sort=False):
        by_arch = {arch: mine.set_index("load")[metric] for arch, mine in group.groupby("arch")}
        for arch in ARCHS:
            ratios[str(pair), str(kind), arch] = by_arch[arch] / by_arch[AGAINST] - 1
    return ratios


LOADS = {"concurrency": "concurrency C", "request_rate": "Poisson, 0.05 C per second"}
TICKS = (1, 2, 4, 8, 16, 32, 64, 128)


def original_figures(rows: pd.DataFrame, caption: str) -> dict[str, Figure]:
    """The five plots by their headings."""
    return {
        "Throughput": _lines(rows, [("output_throughput", "tok/s", 1.0)], caption),
        "Latency": _lines(
            rows, [("mean_e2el_ms", "mean, seconds", 1e-3), ("p99_e2el_ms", "P99, seconds", 1e-3)], caption, log=True
        ),
        "GPU utilisation": _lines(
            rows, [("gpu_busy", "% of the time", 100.0)], f"{caption} Busy: at least one work is running."
        ),
        "Acceptance": _lines(
            rows, [("spec_decode_acceptance_rate", "% of the drafts", 1.0)],
            f"{caption} The same coins for all: what differs is how long adaptive drafts.",
        ),
        f"Improvement over {AGAINST}": _heatmap(rows, caption),
    }  # fmt: skip


@styled()
def _lines(rows: pd.DataFrame, metrics: Sequence[tuple[str, str, float]], caption: str, log: bool = False) -> Figure:
    """A row of panels for each load and metric, a column for each pair."""
    shown = [(kind, *metric) for kind in KINDS for metric in metrics]
    figure = new_figure(15, 3.3 * len(shown), caption)
    panels = figure.subplots(len(shown), len(PAIRS), squeeze=False, sharex=True)
    for line, (kind, metric, unit, scale) in zip(panels, shown, strict=True):
        for axes, (label, pair) in zip(line, PAIRS.items(), strict=True):
            of_pair = rows[(rows["pair"] == pair) & (rows["load_kind"] == kind)]
            for arch in ARCHS:
                of_arch = of_pair[of_pair["arch"] == arch]
                axes.plot(
                    of_arch["load"], of_arch[metric] * scale, marker=arch_marker(arch), color=arch_colour(arch),
                    markersize=5, linewidth=1.5, label=arch,
                )  # fmt: skip
            _axes(axes, f"{label}, {LOADS[kind]}", unit)
            if log:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            else:
                axes.set_ylim(bottom=0)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(ARCHS), frameon=False)
    return figure


def _axes(axes: Axes, title: str, unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(TICKS, [str(tick) for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlabel("C")
    axes.set_ylabel(unit)
    axes.set_title(title, fontweight="bold", loc="left", fontsize=10)


def _heatmap(rows: pd.DataFrame, caption: str) -> Figure:
    """Change of throughput over `AGAINST`, in percent: blue is faster, red slower."""
    table = changes(rows, "output_throughput")
    others = [arch for arch in ARCHS if arch != AGAINST]
    lines: list[list[Chart]] = []
    for kind in KINDS:
        lines.append([])
        for label, pair in PAIRS.items():
            tiles = [
                Tile(y, x, colour_of(value, STRONGEST), f"{100 * value:+.0f}")
                for y, arch in enumerate(others)
                for x, value in enumerate(table[pair, kind, arch])
            ]
            levels = [f"{level:g}" for level in table[pair, kind, AGAINST].index]
            lines[-1].append(Chart(f"{label}, {LOADS[kind]}", "", "C", rows=others, columns=levels, cells=tiles))
    return chart_figure(lines, f"{caption} Percent of {AGAINST}'s tokens per second; colours end at 30.")


def original_text(rows: pd.DataFrame) -> str:
    """The comparison with `AGAINST`: leads and lags of each architecture, and what they say of the published claim."""
    speed, tail = changes(rows, "output_throughput"), changes(rows, "p99_e2el_ms")
    labels = {pair: label for label, pair in PAIRS.items()}
    shown = {key: row for key, row in speed.items() if key[2] != AGAINST}
    lines = [
        {
            "pair": labels[key[0]],
            "load": LOADS[key[1]],
            "arch": key[2],
            "leads at C": _levels(row[row > LEAD]),
            "lags at C": _levels(row[row < -LEAD]),
            "tok/s": f"{row.min():+.1%} to {row.max():+.1%}",
            "P99": f"{tail[key].min():+.1%} to {tail[key].max():+.1%}",
        }
        for key, row in shown.items()
    ]
    every = [change for key, row in shown.items() if key[2] in ("pdv", "pdv-unified") for change in row]
    claim = (
        f"pdv and pdv-unified lead {AGAINST} by more than {LEAD:.0%} in {sum(x > LEAD for x in every)} "
        f"of {len(every)} cells and lag by more in {sum(x < -LEAD for x in every)}: "
        f"{min(every):+.1%} to {max(every):+.1%}."
    )
    about = f"Throughput and P99 latency against {AGAINST}; a lead or a lag is over {LEAD:.0%}"
    return "\n\n".join([claim, about, str(TextTable(lines))])


def _levels(row: pd.Series[float]) -> str:
    return ",".join(f"{level:g}" for level in row.index) or "none"


def main(folder: Path = FOLDER, only: tuple[int, ...] = (), jobs: int | None = None) -> None:
    """Write the page and its points, of all published levels or of some."""
    folder = output.check_folder(folder)
    page, table = (output.check_file(folder / name) for name in ("original.html", "points.parquet"))
    published = load_published()
    asked = list(points(published, only or levels(published)))
    with Progress(len(asked), "runs") as progress:
        rows = run_original(asked, jobs, progress.update)
    text = original_text(rows)
    print(text)
    facts = facts_of(asked[0].experiment)
    caption = f"Simulated, h200 ({facts['foundation']}), seed 0."
    sheet = Sheet("The original question", LEAD_TEXT, [("", [text])], original_figures(rows, caption), facts)
    output.save({page: sheet.html().encode(), table: output.parquet(rows)})


if __name__ == "__main__":
    main()
