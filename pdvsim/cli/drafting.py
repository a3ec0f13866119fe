"""`pdvsim speedup` and `pdvsim draft-table`: what drafting gains, and the best draft length for each batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pdvsim.bench import output
from pdvsim.cli.page import AnswerCommand
from pdvsim.common.options import options
from pdvsim.decide.draft_lengths import find_table
from pdvsim.decide.draft_lengths import usual_runs as usual_runs_of_table
from pdvsim.decide.draft_table import TABLED, DraftQuestion, DraftTable, EngineName
from pdvsim.decide.figures import speedup_pictures
from pdvsim.decide.fleet import Contender, drafters
from pdvsim.decide.options import VariedOptions
from pdvsim.decide.runs import Bench
from pdvsim.decide.space import LENGTHS, LONG_LENGTHS
from pdvsim.decide.speedup import Speedup, SpeedupQuestion, find_speedup, usual_runs
from pdvsim.sim.config import Scoring, Server
from pdvsim.sim.limits import BatchLimit, DraftLength, Jobs, LeastDraft, NumRuns, PartialShare, Redefined, Requests

LOADS = ("request_rate", "max_concurrency", "burstiness", "use_trace_timestamps", "window")
CONTROLLED = (
    "num_speculative_tokens_per_batch_size", "adaptive_verification_profile_context_len", "controller",
    "min_speculative_tokens", "max_speculative_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class DraftingCommand(AnswerCommand, VariedOptions):
    """Simulations of full batches, with each draft length."""

    without: ClassVar[tuple[str, ...]] = (*LOADS, *CONTROLLED, "band", *options(Scoring))

    num_runs: NumRuns = 3
    """Replications of each simulation, with the same seeds."""
    jobs: Jobs | None = None
    """Concurrent simulations; default: one per core."""
    max_num_seqs: Redefined[BatchLimit] = 256
    """Batch limit of the server; of draft-table the largest batch size."""


@dataclass(frozen=True)
class SpeedupCommand(DraftingCommand):
    """Show what drafting gains over plain decoding: by drafter, draft length and load, and where it is a loss."""

    written: ClassVar = ("speedup.parquet", "speedup.json", "speedup.png")

    pair: Redefined[str] = Server.pair  # as given: a target alone has all its drafters compared
    concurrency: tuple[Requests, ...] = (1, 8, 64, 256)
    """Concurrent requests of closed loops."""
    num_speculative_tokens: Redefined[tuple[LeastDraft, ...]] = (1, 2, 3, 5)
    """Draft lengths."""
    output: str | None = None
    """Folder for speedup.parquet, speedup.json and speedup.png; default: nothing is saved."""

    def question(self) -> SpeedupQuestion:
        base = self.experiment("colocated", self.varied_traffic())
        base = base.with_settings(num_speculative_tokens=max(self.num_speculative_tokens, default=1))
        compared: tuple[Contender, ...] = ()
        if ":" in self.pair or self.server.drafter is not None:
            compared = (Contender("", "colocated", pair=base.server.pair, acceptance=base.acceptance),)
        else:
            compared = drafters(base, self.pair, ["colocated"], None if self.acceptance_open else base.acceptance)
        given = (self.num_speculative_tokens, self.concurrency, self.num_runs, self.num_prompts)
        return SpeedupQuestion(base, tuple(one for one in compared if one.of(base).has_drafter), *given)

    def expected_runs(self, question: SpeedupQuestion) -> int:
        return usual_runs(question)

    def answer(self, question: SpeedupQuestion | None = None, progress: Callable[[int], None] | None = None) -> Speedup:
        speedup = find_speedup(question or self.question(), Bench(self.jobs, progress))
        speedup.drawn_by = speedup_pictures
        return speedup


@dataclass(frozen=True)
class DraftTableCommand(DraftingCommand):
    """Find the best draft length for each batch size by simulation, as a table for vLLM, SGLang or TensorRT-LLM."""

    without: ClassVar = (*DraftingCommand.without, "num_speculative_tokens", "padding")

    max_k: LeastDraft | None = None
    """Longest draft length; default: 8, or 15 of a drafter that drafts in parallel."""
    against: DraftLength | None = None
    """A fixed draft length to compare with; default: 4."""
    engine: EngineName = "vllm"
    """Engine of the table: sets its times, the padding of a step and the lowest k."""
    indifference: PartialShare = 0.02
    """Relative gains below this start no new range; 0: the best length at every batch size."""
    output: str | None = None
    """Write the table to this file, as JSON."""

    def question(self) -> DraftQuestion:
        base = self.experiment("colocated", self.varied_traffic())
        if not self.hardware.is_own:
            base = base.with_settings(engine=TABLED[self.engine].name)
        longest = self.max_k or max((*LENGTHS, *LONG_LENGTHS) if base.pair.draft.drafts_long else LENGTHS)
        given = (longest, self.against, self.engine, self.indifference, self.num_runs, self.num_prompts)
        return DraftQuestion(base, *given)

    def expected_runs(self, question: DraftQuestion) -> int:
        return usual_runs_of_table(question)

    def answer(
        self, question: DraftQuestion | None = None, progress: Callable[[int], None] | None = None
    ) -> DraftTable:
        return find_table(question or self.question(), Bench(self.jobs, progress))

    def files(self, question: DraftQuestion, date: str) -> list[Path]:
        file = output.optional_file(self.output)
        if file is not None and any(file.resolve() == Path(path).resolve() for path in question.base.files):
            raise ValueError(f"{file} cannot be overwritten: it is an input")
        return [] if file is None else [file]
