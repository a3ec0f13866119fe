"""`pdvsim draft-table`: the best draft length for each batch size, in the format of vLLM's `--speculative-config`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pdvsim.bench import output
from pdvsim.cli.page import AnswerCommand
from pdvsim.common.options import options
from pdvsim.decide.draft_lengths import find_table, usual_runs
from pdvsim.decide.draft_table import TABLED, DraftQuestion, DraftTable, EngineName
from pdvsim.decide.options import VariedOptions
from pdvsim.decide.runs import Bench
from pdvsim.decide.space import LENGTHS, LONG_LENGTHS
from pdvsim.sim.config import Scoring
from pdvsim.sim.limits import BatchLimit, DraftLength, Jobs, LeastDraft, NumRuns, PartialShare, Redefined


@dataclass(frozen=True)
class DraftTableCommand(AnswerCommand, VariedOptions):
    """Find the best draft length for each batch size by simulation, as a table for vLLM, SGLang or TensorRT-LLM."""

    without: ClassVar[tuple[str, ...]] = (
        "request_rate", "max_concurrency", "burstiness", "use_trace_timestamps", "window", "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size", "adaptive_verification_profile_context_len", "controller",
        "min_speculative_tokens", "max_speculative_tokens", "band", "padding", *options(Scoring),
    )  # fmt: skip

    max_k: LeastDraft | None = None
    """Longest draft length; default: 8, or 15 of a drafter that drafts in parallel."""
    against: DraftLength | None = None
    """A fixed draft length to compare with; default: 4."""
    engine: EngineName = "vllm"
    """Engine of the table: sets its times, the padding of a step and the lowest k."""
    indifference: PartialShare = 0.02
    """Relative gains below this start no new range; 0: the best length at every batch size."""
    num_runs: NumRuns = 3
    """Replications of each simulation, with the same seeds."""
    jobs: Jobs | None = None
    """Concurrent simulations; default: one per core."""
    max_num_seqs: Redefined[BatchLimit] = 256
    """Largest batch size of the table."""
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
        return usual_runs(question)

    def answer(
        self, question: DraftQuestion | None = None, progress: Callable[[int], None] | None = None
    ) -> DraftTable:
        return find_table(question or self.question(), Bench(self.jobs, progress))

    def files(self, question: DraftQuestion, date: str) -> list[Path]:
        file = output.optional_file(self.output)
        if file is not None and any(file.resolve() == Path(path).resolve() for path in question.base.files):
            raise ValueError(f"{file} cannot be overwritten: it is an input")
        return [] if file is None else [file]
