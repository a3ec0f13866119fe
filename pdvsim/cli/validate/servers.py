"""`pdvsim validate --silicon` and `--speculation`: measured servers of vLLM, SGLang and TensorRT-LLM, simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pdvsim.bench.join import grouped, simulations, some_of
from pdvsim.calibration.validate import silicon, speculation
from pdvsim.calibration.validate.servers import ServerKind, SiliconRow, not_simulated, read_rows
from pdvsim.calibration.validate.speculation import SIDES, MeasuredPair, PredictedPair, figures_of
from pdvsim.cli.validate.base import Compared, ValidationCommand
from pdvsim.sim.limits import Jobs, Range
from pdvsim.view.table import grid, percent_cell
from pdvsim.view.validation import silicon_text

MeasuredEngine = Literal["all", "vllm", "sglang", "trtllm"]
CONCURRENCIES = (1, 8, 32, 128)  # up to which a group of rows reaches


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
            for row in read_rows()
            if row.held_out == self.held_out and self.silicon in ("all", row.engine) and self.kind in (None, row.kind)
        ]
        absent = not_simulated(rows)
        left_out = Counter((silicon.group_of(row), silicon.kind_of(absent[row.id])) for row in rows if row.id in absent)
        rows = [row for row in rows if row.id not in absent]
        usual = some_of([row for row in rows if not row.odd], self.rows)
        done = simulations(_served, usual, "rows", self.jobs, self.json, cost)
        predicted = [silicon.joined(usual[at], times) for at, times in done.rows.items()]
        failures = {usual[at].id: reason for at, reason in done.failures.items()}
        odd = {row.id: row.odd for row in rows if row.odd}
        document = silicon.document(sorted(predicted, key=lambda one: one.of.id), odd, failures, self.held_out)
        document["not_simulated"] = [
            {"kind": of_kind, "reason": reason, "rows": count} for (of_kind, reason), count in left_out.most_common()
        ]
        return Compared(document, silicon_text(document), done.unfinished)


def _served(index: int, row: SiliconRow) -> dict[str, float]:
    return dict(silicon.predict(row).predicted)


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
        predictions = [speculation.joined(pairs[at], row["sides"]) for at, row in sorted(done.rows.items())]
        document = {
            "held_out": self.held_out,
            "pairs": [_row(one) for one in predictions],
            "groups": {
                name: {
                    key: speculation.error_cells(group) for key, group in sorted(grouped(predictions, label).items())
                }
                for name, label in GROUPS.items()
            },
            "lengths": speculation.best_lengths(predictions),
            "failures": {pairs[at].setting: reason for at, reason in done.failures.items()},
        }
        return Compared(document, _text(document), done.unfinished)


def _paired(index: int, pair: MeasuredPair) -> dict[str, Any]:
    return {"sides": (figures_of(pair.drafted.without), figures_of(pair.drafted))}


def _row(one: PredictedPair) -> dict[str, Any]:
    """A pair as the document has it."""
    pair, drafted = one.of, one.of.drafted
    return {
        "engine": pair.hardware.engine, "version": drafted.version, "card": pair.hardware.gpu,
        "pair": drafted.experiment.server.pair, "method": pair.method_class, "k": pair.k, "concurrency": pair.clients,
        "measured": one.measured["speedup"], "predicted": one.predicted["speedup"], "source": pair.source,
    }  # fmt: skip


def _concurrency(one: PredictedPair) -> str:
    groups = (f"up to {most}" for most in CONCURRENCIES if one.of.clients <= most)
    return next(groups, f"above {CONCURRENCIES[-1]}")


GROUPS: dict[str, Callable[[PredictedPair], str]] = {
    "engine and method": lambda one: f"{one.of.hardware.engine} {one.of.method_class}",
    "draft length": lambda one: f"k={one.of.drafted.experiment.longest_draft}",
    "concurrency": _concurrency,
    "all": lambda one: "all",
}


def _text(document: Mapping[str, Any]) -> str:
    """Errors of the ratio of measured pairs by group, its sign, and the best draft lengths."""
    which = "held-out" if document["held_out"] else "visible"
    tables = [f"Speed-up by speculation, predicted against measured: {len(document['pairs'])} {which} pairs of servers"]
    for name, parts in document["groups"].items():
        lines = []
        for key, cells in parts.items():
            figures = [cells[f"tpot_ms_{side}"] or cells[f"throughput_{side}"] for side in SIDES]
            lines.append([
                key, str(cells["pairs"]), percent_cell(cells["ratio_median"]), percent_cell(cells["ratio_95"]),
                percent_cell(cells["ratio_signed"], "+"), f"{cells['signs']} of {cells['pairs']}",
                *("" if figure is None else percent_cell(figure) for figure in figures),
            ])  # fmt: skip
        tables.append(grid((name, "pairs", "median", "95%", "signed", "sign right", *SIDES), lines))
    if choices := document["lengths"]:
        right = sum(choice["measured"] == choice["predicted"] for choice in choices)
        lost = f"the predicted one loses {max(choice['loss'] for choice in choices):.1%} at most"
        tables.append(f"Best draft length (0 among them): right in {right} of {len(choices)} settings; {lost}")
    tables += [f"not simulated: {setting}: {why}" for setting, why in document["failures"].items()]
    tables.append(
        "Errors of the ratio; of TPOT, else throughput, without and with speculation (medians of absolute values)"
    )
    return "\n\n".join(tables)
