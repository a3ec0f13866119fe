"""Reports of all decision commands: question and answer as data, and as text, JSON document and page.

An answer provides its sections (tables and sentences) and its document (for JSON). Printing, pages and saving are
shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from pdvsim.bench.pool import Row
from pdvsim.bench.stats import Interval
from pdvsim.calibration.validate.speculation import MeasuredPair, read_pairs
from pdvsim.common.version import __version__
from pdvsim.sim.config import BY_SEED, Experiment, Traffic
from pdvsim.sim.engines import ENGINES
from pdvsim.sim.models.presets import model
from pdvsim.sim.workload.requests import BLOCKS, resamples
from pdvsim.sim.workload.usual import drafter_name
from pdvsim.sim.workload.windows import time_text
from pdvsim.view.comparison import founded, most_outside
from pdvsim.view.report.sheet import PageSection, parts_html
from pdvsim.view.setting import acceptance_source, lengths_text
from pdvsim.view.table import cell

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

EXPANDED = 3  # sections, in a notebook
MANY = 32  # requests from which drafts make a mixture read many more experts
NO_DRAFTS = "do not enable speculation"


@dataclass(frozen=True)
class Report:
    """An answer as it is shown."""

    title: str
    lead: str  # one sentence on the question
    base: Experiment
    sections: Sequence[PageSection]
    document: dict[str, Any]
    stopped: str = ""  # state of an interrupted answer
    empty: bool = False  # no result: no file is written

    @property
    def text(self) -> str:
        """All sections that have lines, the headings underlined."""
        blocks = (
            [*([title, "-" * len(title)] if title else []), *map(str, parts)] for title, parts in self.sections if parts
        )
        return "\n\n".join(map("\n".join, blocks))


class Answer:
    """Result of a decision command. Prints as text; a notebook shows its sections."""

    interrupted: bool = False
    drawn_by: Callable[[Any], Mapping[str, Figure]] | None = None  # by heading; set where it is returned to the user

    def report(self) -> Report:
        """The answer as sections of text and tables."""
        raise NotImplementedError

    @property
    def points(self) -> pd.DataFrame:
        """One row per run or search."""
        import pandas as pd

        return pd.DataFrame(getattr(self, "rows", []))

    def pictures(self) -> Mapping[str, Figure]:
        """Plots of the answer by the heading of their section, the main one first."""
        return {} if self.drawn_by is None else self.drawn_by(self)

    def plot(self) -> Figure:
        """Main plot of the answer; a ValueError if there is none."""
        for figure in self.pictures().values():
            return figure
        raise ValueError("this answer has no plot")

    def document(self, **parts: Any) -> dict[str, Any]:
        """The answer's parts with the header that all documents share."""
        return {"pdvsim_version": __version__, "interrupted": self.interrupted, **parts}

    def __repr__(self) -> str:
        return self.report().text

    def _repr_html_(self) -> str:
        report = self.report()
        shown = [(f"<h4>{escape(title)}</h4>" if title else "") + parts_html(parts) for title, parts in report.sections]
        folded = f"<details><summary>more</summary>{''.join(shown[EXPANDED:])}</details>" if shown[EXPANDED:] else ""
        return "".join(shown[:EXPANDED]) + folded


def plural(count: int, what: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{count} {what}{'s' if count > 1 else ''}"


def gpus_text(count: int, card: str = "") -> str:
    """`1 GPU`, `2 GPUs`, `2 GPUs (h200)`."""
    return plural(count, "GPU") + (f" ({card})" if card else "")


def served_as_text(candidate: Experiment, given: int | None = None) -> str:
    """GPUs and servers: `2 of your 4 GPUs (h200) as one vLLM server (TP 2)`."""
    hardware, engine = candidate.hardware, ENGINES[candidate.hardware.predicted_engine].title
    count = hardware.replicas * candidate.gpus
    of = (
        f"{count} of your {gpus_text(given, hardware.gpu)}"
        if given and given > count
        else gpus_text(count, hardware.gpu)
    )
    sizes = {"TP": hardware.tensor_parallel_size, "DP": hardware.data_parallel_size}
    inside = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    inside += ["EP"] if hardware.enable_expert_parallel else []
    if hardware.disaggregate is not None:
        inside = [f"prefill apart, {hardware.disaggregate}", *inside]
    elif candidate.arch not in ("autoregressive", "colocated"):
        inside = [str(candidate.arch), *inside]
    servers = f"one {engine} server" if hardware.replicas == 1 else f"{hardware.replicas} {engine} servers"
    return f"{of} as {servers}" + (f" ({', '.join(inside)})" if inside else "")


def asked_lines(best: Experiment, compared: Iterable[Experiment], rows: Sequence[Row]) -> list[str]:
    """The header of an answer: engine, card, models, lengths, acceptance with its source, and the profile."""
    engine, row = ENGINES[best.hardware.predicted_engine].title, rows[0]
    each = float(row["completed"]) or 1.0
    lengths = f"{float(row['total_input_tokens']) / each:.0f} in, {float(row['total_output_tokens']) / each:.0f} out"
    drafting = {drafter_name(c.server.pair): c.acceptance for c in compared if c.has_drafter}
    sources = "; ".join(f"{name}: {acceptance_source(accepted)}" for name, accepted in drafting.items())
    return [
        f"{engine} on {best.hardware.gpu}, {best.pair.target.name}",
        f"{lengths_text(asdict(best.traffic))}: {lengths} on average",
        *([f"acceptance of {sources}"] if sources else []),
        *replay_note(best.traffic),
        *dict.fromkeys(map(founded, rows)),
        *most_outside(rows),
    ]


def rests_on(traffic: Traffic, rows: Sequence[Row]) -> list[str]:
    """Notes on given lengths, a replayed trace, profiles, and values outside their measured range."""
    return [*lengths_note(traffic), *replay_note(traffic), *dict.fromkeys(map(founded, rows)), *most_outside(rows)]


def replay_note(traffic: Traffic) -> list[str]:
    """How a file is replayed; empty if arrivals are not its own."""
    if not traffic.use_trace_timestamps:
        return []
    windows, number = traffic.windows(), traffic.window_number()
    requests = traffic.num_prompts
    what, rows = "all its requests in order", len(traffic.replayed())
    if requests < rows:
        what = f"the first {requests:,} of {rows:,} requests"
    elif requests > rows:
        what += f", {requests / rows:.3g} times"
    if resamples(traffic):
        seeds = f"; seeds after 0 replay other days: its {BLOCKS} parts of equal length, drawn at random"
    elif number is None or len(windows.parts) == 1:
        seeds = "; seeds differ in acceptance"
    elif traffic.window == BY_SEED:
        seeds = f"; seeds use the busiest {len(windows.busy)} of {len(windows.parts)} windows in turn"
    else:
        seeds = f"; {windows.described(number)}"
    part = traffic.replayed()
    times = traffic.request_rate / part.request_rate if part.request_rate else 1.0
    spans = f"{time_text(part.span_s)} in {time_text(part.span_s / times)}"
    scaled = "as it was" if times == 1 else f"scaled to the rate ({spans}: {times:.3g} times as fast, bursts too)"
    return [f"arrivals: {traffic.dataset_path} replayed, {scaled}, {what}{seeds}"]


def positive(value: Interval, decimals: int = 2, scale: float = 1.0) -> str:
    """A cell of a non-negative value: an interval that would reach below 0 is printed as (0 to ...)."""
    if not vague(value):
        return cell(value, decimals, scale)
    return f"{cell(value.mean, decimals, scale)} (0 to {cell(value.mean + value.half_width, decimals, scale)})"


def vague(value: Interval) -> bool:
    """Whether the interval reaches below 0."""
    return value.half_width > value.mean


def lengths_note(traffic: Traffic) -> list[str]:
    """How given lengths vary; empty if they are a data set's own."""
    equal = ", all equal: in a closed loop requests start and end together"
    how = " (--random-range-ratio)" if traffic.random_range_ratio else equal
    return [f"lengths: {lengths_text(vars(traffic))}{how}"] if traffic.fixed_lengths else []


def nearest_pair(candidate: Experiment | None, clients: float) -> list[str]:
    """The measured pair of servers that is most like a candidate that drafts for so many requests, as lines."""
    if candidate is None or candidate.hardware.predicted_engine == "pdvsim":  # measured by real runs of its own
        return []
    hardware, method, k = candidate.hardware, candidate.server.drafted_by, max(1, candidate.longest_draft)
    every, target = read_pairs(), candidate.pair.target
    pairs = [pair for pair in every if (pair.hardware.engine, pair.method) == (hardware.predicted_engine, method)]

    def distance(pair: MeasuredPair) -> tuple[bool, bool, float]:
        off = abs(math.log(pair.k / k)) + abs(math.log(pair.clients / max(1.0, clients)))
        return pair.target != target.name, pair.hardware.gpu != hardware.gpu, off

    lines = [f"no pair of {hardware.predicted_engine} servers with and without {method} drafts was measured"]
    for pair in sorted(pairs, key=distance)[:1]:
        other, models = "" if pair.target == target.name else "of another model, ", pair.drafted.experiment.server.pair
        engine = f"{pair.hardware.engine} {pair.drafted.version} on {pair.hardware.gpu}"
        fast = f"{pair.measured['speedup']:.2f} times as fast with drafts"
        where = f"{engine}, {models}, k={pair.k}, concurrency {pair.clients}"
        lines = [f"measured nearest to this: {other}{where}: {fast} ({pair.source})"]
    if target.experts is not None and clients >= MANY:
        alike = [
            pair for pair in every if pair.method == method and pair.clients >= MANY and model(pair.target).experts
        ]
        gains = [pair.measured["speedup"] for pair in alike]
        known = f"{min(gains):.2f} to {max(gains):.2f} times ({len(gains)} pairs)" if gains else "not known"
        lines.append(f"a mixture of experts: gains measured with {method} drafts at {MANY} and more requests: {known}")
    return lines


def clients_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Requests in the server on average, by Little's law."""
    return float(sum(row["request_throughput"] * row["mean_e2el_ms"] / 1e3 for row in rows) / len(rows))
