"""`pdvsim validate --silicon`: measured servers of vLLM, SGLang and TensorRT-LLM against simulations of their load."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pdvsim.bench.join import simulations, some_of
from pdvsim.calibration.validate import silicon
from pdvsim.calibration.validate.servers import ServerKind, SiliconRow, not_simulated, read_rows
from pdvsim.calibration.validate.silicon import group_of, kind_of
from pdvsim.cli.validate.base import Compared, MeasuredEngine, MeasuredServers
from pdvsim.view.validation import silicon_text


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
        return Compared(document, silicon_text(document), done.unfinished)


def _task(index: int, row: SiliconRow) -> dict[str, float]:
    return dict(silicon.predict(row).predicted)


def cost(row: SiliconRow) -> float:
    """What the simulation of a row takes, roughly: its output tokens, those of ranks and prefill apart step by step."""
    traffic = row.experiment.traffic
    return float(traffic.num_prompts * (traffic.output_len or 1) * (1 if row.kind == "plain" else 10))
