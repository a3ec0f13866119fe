"""Output of a command: text or JSON, a page (`--html FILE`), and files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pdvsim.bench import output
from pdvsim.cli.command import Command
from pdvsim.common.console import say
from pdvsim.common.files import write_whole
from pdvsim.common.progress import Progress
from pdvsim.common.version import __version__
from pdvsim.decide.report import Answer
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Experiment
from pdvsim.view.report.sheet import Sheet


@dataclass(frozen=True)
class AnswerCommand(Command):
    """A question, its answer by simulation, and the output."""

    unit: ClassVar[str] = "simulations"
    dated: ClassVar[bool] = False  # whether the document has the date, and files are written also without --output
    written: ClassVar[tuple[str, ...]] = ()  # names of the files of the answer, in the folder --output

    output: str | None = None
    html: str | None = None
    """Also write the answer, its plot and provenance as one page."""

    def question(self) -> Any:
        """The question of these options; a ValueError names what is wrong."""
        raise NotImplementedError

    def expected_runs(self, question: Any) -> int:
        """Estimated simulations; may warn before long ones."""
        raise NotImplementedError

    def answer(self, question: Any = None, progress: Callable[[int], None] | None = None) -> Answer:
        """The answer; `progress` is called with the number of simulations done."""
        raise NotImplementedError

    def files(self, question: Any, date: str) -> list[Path]:
        """The files of the answer, which can be written."""
        if not (self.output or self.dated):
            return []
        folder = output.check_folder(Path(self.output or f"results/{Path(self.written[0]).stem}-{date}"))
        return [output.check_file(folder / name) for name in self.written]

    def execute(self) -> int:
        """Answer, print, and write what is asked for; returns the exit code.

        Files of an answer without result are removed. Plots other than the main one are named after their heading.
        """
        question, date = self.question(), output.now()
        paths, page = self.files(question, date), output.optional_file(self.html)
        expected = self.expected_runs(question)
        with Progress(expected, self.unit, self.json, after_s=0, about=True) as progress:
            answer = self.answer(question, progress.update)
        report = answer.report()
        document = ({"date": date} if self.dated else {}) | report.document
        self.show(document, report.text)
        pictures = answer.pictures() if (paths or page) and not report.empty else {}
        if not report.empty:
            write_page(page, Sheet(report.title, report.lead, report.sections, pictures, facts_of(report.base)))
        content: dict[Path, bytes | None] = dict.fromkeys(paths)
        for path in () if report.empty else paths:
            if path.suffix == ".parquet":
                content[path] = output.parquet(answer.points)
            elif path.suffix == ".png":
                names = [path, *(path.with_name(f"{heading.lower()}.png") for heading in [*pictures][1:])]
                drawn = zip(names, pictures.values(), strict=False)
                content |= {name: output.picture(figure, name) for name, figure in drawn}
            else:
                content[path] = (output.dumps(document) + "\n").encode()
        return output.save(content, report.stopped)


def write_page(path: Path | None, sheet: Sheet) -> None:
    """Write the page, if requested, and report it."""
    if path is not None:
        write_whole(path, sheet.html().encode())
        say("pdvsim", f"saved {path}")


def facts_of(base: Experiment) -> dict[str, Any]:
    """Provenance of an answer: program, profile and its foundation, and all settings."""
    profile = covering_profile(base)
    return {
        "pdvsim": __version__,
        "date": output.now(),
        "gpu": profile.gpu.name,
        "profile": profile.name,
        "foundation": profile.foundation,
        "measured": profile.provenance,
        "settings": output.settings(base),
    }
