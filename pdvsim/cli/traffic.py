"""`pdvsim traffic`: summarise a trace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pdvsim.cli.command import Command
from pdvsim.sim.limits import Placed
from pdvsim.view.figure import DPI

if TYPE_CHECKING:
    from pdvsim.view.traffic import TraceAccount

REGULAR = 1e6  # burstiness that is as good as equal gaps, and the highest that a run takes


@dataclass(frozen=True)
class TrafficCommand(Command):
    """Summarise and plot a trace: rates over time, burstiness, lengths, acceptance and sessions."""

    file: Placed[str]
    """CSV or JSONL of requests: your own, or an Azure, BurstGPT or Mooncake trace."""
    dataset_name: Literal["custom", "azure", "burstgpt", "mooncake"] | None = None
    """Kind of the trace; default: inferred from its columns."""
    columns: tuple[str, ...] = ()
    """Columns whose names are not recognised: prompt=NAME,output=NAME,time=NAME (also acceptance, session, turn,
    text)."""
    tokenizer: str | None = None
    """Folder of a local Hugging Face tokenizer, for a file that holds prompts as text."""
    output: str | None = None
    """Also plot it to this file (PNG or SVG)."""
    overwrite: bool = False
    """Replace the plot if it exists already."""

    @cached_property
    def kind(self) -> str:
        from pdvsim.sim.workload.own import kind_of

        return self.dataset_name or kind_of(self.file, self.columns)

    def answer(self) -> TraceAccount:
        """The trace and its statistics, which print as text and have `plot()`."""
        from pdvsim.sim.workload.own import read_own
        from pdvsim.view.traffic import TraceAccount

        trace = read_own(self.file, self.tokenizer, self.kind, self.columns)
        return TraceAccount.of(Path(self.file).name, trace)

    def execute(self) -> int:
        from pdvsim.bench.output import optional_file, picture, save

        path = optional_file(self.output, self.overwrite)
        statistics = self.answer()
        summary, notes = statistics.summary(), statistics.trace.notes
        named = f"--dataset-name {self.kind} --dataset-path {self.file}"
        named += f" --columns {','.join(self.columns)}" if self.columns else ""
        lines = [*notes, str(statistics)]
        if statistics.window_s:
            lines.append(f"replay it: pdvsim run {named} --use-trace-timestamps")
            rate, shape = summary["request_rate"], min(summary["burstiness"], REGULAR)
            load = f"--request-rate {rate:.3g} --burstiness {shape:.2g}"
            lines.append(f"use its lengths at any rate: pdvsim run {named} {load}")
        self.show({"file": self.file, "dataset_name": self.kind, "notes": notes, **summary}, "\n".join(lines))
        if path is not None:
            return save({path: picture(statistics.plot(), path, DPI)})
        return 0
