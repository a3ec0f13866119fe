"""`pdvsim speedup`: what drafting gains over plain decoding, by drafter, draft length and concurrency."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from pdvsim.cli.page import AnswerCommand
from pdvsim.common.options import options
from pdvsim.decide.figures import speedup_pictures
from pdvsim.decide.fleet import Contender, drafters
from pdvsim.decide.options import VariedOptions
from pdvsim.decide.runs import Bench
from pdvsim.decide.speedup import Speedup, SpeedupQuestion, find_speedup, usual_runs
from pdvsim.sim.config import Scoring, Server
from pdvsim.sim.limits import BatchLimit, Jobs, LeastDraft, NumRuns, Redefined, Requests


@dataclass(frozen=True)
class SpeedupCommand(AnswerCommand, VariedOptions):
    """Show what drafting gains over plain decoding: by drafter, draft length and load, and where it is a loss."""

    written: ClassVar = ("speedup.parquet", "speedup.json", "speedup.png")
    without: ClassVar[tuple[str, ...]] = (
        "request_rate", "max_concurrency", "burstiness", "use_trace_timestamps", "window",
        "num_speculative_tokens_per_batch_size", "adaptive_verification_profile_context_len", "controller",
        "min_speculative_tokens", "max_speculative_tokens", "band", *options(Scoring),
    )  # fmt: skip

    pair: Redefined[str] = Server.pair  # as given: a target alone has all its drafters compared
    concurrency: tuple[Requests, ...] = (1, 8, 64, 256)
    """Concurrent requests of closed loops."""
    num_speculative_tokens: Redefined[tuple[LeastDraft, ...]] = (1, 2, 3, 5)
    """Draft lengths."""
    num_runs: NumRuns = 3
    """Replications of each simulation, with the same seeds."""
    jobs: Jobs | None = None
    """Concurrent simulations; default: one per core."""
    max_num_seqs: Redefined[BatchLimit] = 256
    """Batch limit of the server."""
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
