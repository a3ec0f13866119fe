"""`pdvsim validate --silicon`: measured servers of vLLM, SGLang and TensorRT-LLM against simulations of their load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdvsim.calibration.join import simulations, some_of
from pdvsim.calibration.validate import silicon
from pdvsim.calibration.validate.servers import ServerKind, SiliconRow, not_simulated, read_rows
from pdvsim.calibration.validate.silicon import LARGE, group_of, kind_of
from pdvsim.cli.validate.base import Compared, MeasuredEngine, MeasuredServers, both_cell, missed
from pdvsim.view.table import grid

TARGETS: dict[str, tuple[float, ...]] = {  # of TPOT: median, 95th percentile
    "dense": (0.05, 0.20),
    "mixtures of experts": (0.08, 0.30),
    LARGE["expert-parallel"]: (0.12,),
    LARGE["apart"]: (0.15,),
}


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
        left_out = Counter((group_of(row), kind_of(absent[row.id])) for row in rows if row.id in absent)
        rows = [row for row in rows if row.id not in absent]
        usual = some_of([row for row in rows if not row.odd], self.rows)
        done = simulations(_task, usual, "rows", self.jobs, self.json, cost)
        predicted = [silicon.joined(usual[at], times) for at, times in done.rows.items()]
        failures = {usual[at].id: reason for at, reason in done.failures.items()}
        odd = {row.id: row.odd for row in rows if row.odd}
        document = silicon.document(sorted(predicted, key=lambda one: one.of.id), odd, failures, self.held_out)
        document["not_simulated"] = [
            {"kind": of_kind, "reason": reason, "rows": count} for (of_kind, reason), count in left_out.most_common()
        ]
        return Compared(document, _text(document), done.unfinished)


def _task(index: int, row: SiliconRow) -> dict[str, float]:
    return dict(silicon.predict(row).predicted)


def cost(row: SiliconRow) -> float:
    """What the simulation of a row takes, roughly: its output tokens, those of ranks and prefill apart step by step."""
    traffic = row.experiment.traffic
    return float(traffic.num_prompts * (traffic.output_len or 1) * (1 if row.kind == "plain" else 10))


def _text(document: dict[str, Any]) -> str:
    blocks = []
    for name, parts in document["by"].items():
        rows = [[part, *_cells(part, errors)] for part, errors in parts.items()]
        if name == "kind":
            rows.append(["all", *_cells("all", document["all"])])
        header = [name, "rows", "TPOT", "target", "TTFT", "shared", "TPOT", "AIConfigurator", "TTFT", "AIConfigurator"]
        blocks.append(grid(header, rows))
    which = "held-out" if document["held_out"] else "visible"
    notes = [
        f"Errors as median / 95th percentile, of {document['all']['rows']} {which} rows; AIConfigurator's on the "
        "rows that it estimates",
        "Ratio of two rows that differ in concurrency, tensor parallelism or weights alone: "
        f"{both_cell(document['ratios'])}",
    ]
    reasons = Counter(kind_of(reason) for reason in (*document["odd"].values(), *document["failed"].values()))
    notes += ["no estimate by AIConfigurator: {rows} rows: {reason}".format(**one) for one in document["not_estimated"]]
    notes += [f"left out: {count} rows: {reason}" for reason, count in reasons.most_common()]
    notes += ["not simulated: {rows} rows, {kind}: {reason}".format(**one) for one in document["not_simulated"]]
    return "\n\n".join([*blocks, "\n".join(notes)])


def _cells(part: str, errors: Mapping[str, Any]) -> list[str]:
    limits = dict(zip(("median", "p95"), TARGETS.get(part, ()), strict=False))
    names = ("tpot_shared", "tpot_aiconfigurator", "ttft_shared", "ttft_aiconfigurator")
    others = [both_cell(errors[name]) for name in names]
    own = both_cell(errors["tpot"]), missed(errors["tpot"], limits), both_cell(errors["ttft"])
    return [str(errors["rows"]), *own, str(errors["shared"]), *others]
