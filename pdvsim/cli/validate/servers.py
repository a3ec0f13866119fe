"""`pdvsim validate --silicon` and `--speculation`: measured servers of vLLM, SGLang and TensorRT-LLM, simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pdvsim.bench.join import simulations, some_of
from pdvsim.calibration.validate import servers, speculation
from pdvsim.calibration.validate.servers import LARGE, ServerKind, SiliconRow, kind_of
from pdvsim.calibration.validate.speculation import FIGURES, SIDES, MeasuredPair, figures_of
from pdvsim.cli.validate.base import Compared, ValidationCommand
from pdvsim.sim.limits import Jobs, Range
from pdvsim.view.table import percent_cell
from pdvsim.view.validation import Shown, both_cell, error_tables, missed, sizes_of

SILICON_TARGETS: dict[str, tuple[float, ...]] = {  # of TPOT: median, 95th percentile
    "dense": (0.05, 0.20),
    "mixtures of experts": (0.08, 0.30),
    LARGE["expert-parallel"]: (0.12,),
    LARGE["apart"]: (0.15,),
}
MeasuredEngine = Literal["all", "vllm", "sglang", "trtllm"]


@dataclass(frozen=True)
class MeasuredServers(ValidationCommand):
    """Measured servers of other engines"""

    held_out: bool = False
    """Use the rows that were held out: no constant was fitted to them."""
    rows: Annotated[int, Range(1, 1_000_000)] | None = None
    """Predict at most this number of rows, spread over all."""
    jobs: Jobs | None = None
    """Concurrent simulations; default: one per core."""


@dataclass(frozen=True)
class ValidateSilicon(MeasuredServers):
    """Compare measured servers of vLLM, SGLang and TensorRT-LLM (--silicon)"""

    key = "silicon"

    silicon: MeasuredEngine | None = None
    """Instead of recorded runs: compare measured servers of this engine, or of all, with simulations of their load."""
    kind: ServerKind | None = None
    """Only servers with tensor parallelism alone (plain), with expert or data parallelism, or with prefill apart."""

    def answer(self) -> Compared:
        """Measured servers, of one engine or all, and their predictions."""
        rows = [
            row
            for row in servers.read_rows()
            if row.held_out == self.held_out and self.silicon in ("all", row.engine) and self.kind in (None, row.kind)
        ]
        absent = servers.not_simulated(rows)
        usual = some_of([row for row in rows if row.id not in absent and not row.odd], self.rows)
        done = simulations(_served, usual, "rows", self.jobs, self.json, cost)
        times = {usual[at].id: row for at, row in done.rows.items()}
        failures = {usual[at].id: reason for at, reason in done.failures.items()}
        document = servers.document(rows, times, failures, self.held_out)
        return Compared(document, _silicon_text(document), done.unfinished)


def _served(index: int, row: SiliconRow) -> dict[str, float]:
    return dict(servers.predict(row).predicted)


def cost(row: SiliconRow) -> float:
    """What the simulation of a row takes, roughly: its output tokens, those of ranks and prefill apart step by step."""
    traffic = row.experiment.traffic
    return float(traffic.num_prompts * (traffic.output_len or 1) * (1 if row.kind == "plain" else 10))


@dataclass(frozen=True)
class ValidateSpeculation(MeasuredServers):
    """Compare measured pairs of servers, without and with speculation (--speculation)"""

    key = "speculation"

    speculation: MeasuredEngine | None = None
    """Instead of recorded runs: compare measured pairs of servers of this engine, or of all, with simulations."""

    def answer(self) -> Compared:
        """Measured pairs, of one engine or all, and what is predicted for them."""
        engines = ("vllm", "sglang", "trtllm") if self.speculation == "all" else (self.speculation,)
        pairs = [pair for pair in speculation.read_pairs() if pair.held_out == self.held_out]
        pairs = list(some_of([p for p in pairs if p.hardware.engine in engines], self.rows))
        done = simulations(_paired, pairs, "pairs", self.jobs, self.json, speculation.cost)
        sides = {at: row["sides"] for at, row in done.rows.items()}
        document = speculation.document(pairs, sides, done.failures, self.held_out)
        return Compared(document, _text(document), done.unfinished)


def _paired(index: int, pair: MeasuredPair) -> dict[str, Any]:
    return {"sides": (figures_of(pair.drafted.without), figures_of(pair.drafted))}


def _silicon_text(document: Mapping[str, Any]) -> str:
    """Errors by kind, engine, model and concurrency next to AIConfigurator's, and what was left out."""

    def target(kind: str, part: str, cells: Mapping[str, Any]) -> str:
        limits = dict(zip(("median", "p95"), SILICON_TARGETS.get(part, ()), strict=False))
        return missed(cells["tpot_ms"], limits)

    columns = [
        ("rows", lambda kind, part, cells: str(cells["tpot_ms"]["rows"])),
        ("TPOT", sizes_of("tpot_ms")),
        ("target", target),
        ("TTFT", sizes_of("ttft_ms")),
        ("shared", lambda kind, part, cells: str(cells["shared_tpot_ms"]["rows"])),
        ("TPOT", sizes_of("shared_tpot_ms")),
        ("AIConfigurator", sizes_of("aiconfigurator_tpot_ms")),
        ("TTFT", sizes_of("shared_ttft_ms")),
        ("AIConfigurator", sizes_of("aiconfigurator_ttft_ms")),
    ]
    which = "held-out" if document["held_out"] else "visible"
    notes = [
        f"Errors as median / 95th percentile, of {len(document['rows'])} {which} rows; AIConfigurator's on the "
        "rows that it estimates",
        "Ratio of two rows that differ in concurrency, tensor parallelism or weights alone: "
        f"{both_cell(document['ratios'])}",
    ]
    reasons = Counter(kind_of(reason) for reason in (*document["odd"].values(), *document["failed"].values()))
    notes += ["no estimate by AIConfigurator: {rows} rows: {reason}".format(**one) for one in document["not_estimated"]]
    notes += [f"left out: {count} rows: {reason}" for reason, count in reasons.most_common()]
    notes += ["not simulated: {rows} rows, {kind}: {reason}".format(**one) for one in document["not_simulated"]]
    return "\n\n".join([*error_tables(document, columns), "\n".join(notes)])


def _text(document: Mapping[str, Any]) -> str:
    """Errors of the ratio of measured pairs by group, its sign, and the best draft lengths."""
    which = "held-out" if document["held_out"] else "visible"

    def side_error(side: str) -> Shown:
        def text(kind: str, part: str, cells: Mapping[str, Any]) -> str:
            known = (cells[f"{name}_{side}"] for name in FIGURES)
            return next((percent_cell(errors["median"]) for errors in known if errors["rows"]), "")

        return text

    columns = [
        ("pairs", lambda kind, part, cells: str(cells["speedup"]["rows"])),
        ("median / 95%", sizes_of("speedup")),
        ("signed", lambda kind, part, cells: percent_cell(cells["speedup"]["signed"], "+")),
        ("sign right", lambda kind, part, cells: f"{cells['signs']} of {cells['speedup']['rows']}"),
        *((side, side_error(side)) for side in SIDES),
    ]
    blocks = [
        f"Speed-up by speculation, predicted against measured: {len(document['pairs'])} {which} pairs of servers",
        *error_tables(document, columns),
    ]
    if choices := document["lengths"]:
        right = sum(choice["measured"] == choice["predicted"] for choice in choices)
        lost = f"the predicted one loses {max(choice['loss'] for choice in choices):.1%} at most"
        blocks.append(f"Best draft length (0 among them): right in {right} of {len(choices)} settings; {lost}")
    blocks += [f"not simulated: {setting}: {why}" for setting, why in document["failures"].items()]
    blocks.append(
        "Errors of the ratio; of TPOT, else throughput, without and with speculation (medians of absolute values)"
    )
    return "\n\n".join(blocks)
