"""The functions of the Python API. Keywords are the flags of the command of the same name, with underscores.

A function takes `**options` and builds its command from them. Its signature has them as keywords, for completion, help
and type checkers; `pdvsim/__init__.pyi` is written from the same signatures (`tests/stubfile.py`).
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.bench.inputs import checked
from pdvsim.bench.sweep import frame_of
from pdvsim.cli.run import AskedExperiment
from pdvsim.common.commandline import MOST_USED, described
from pdvsim.common.options import Option, build, by_name, options
from pdvsim.common.spelling import other_spellings
from pdvsim.view.run import Run
from pdvsim.view.setting import points_line

COMMANDS = {  # whose options are a function's keywords; imported with the function
    "advise": "advise.AdviseCommand",
    "capacity": "capacity.CapacityCommand",
    "draft_table": "draft_table.DraftTableCommand",
    "run": "run.AskedExperiment",
    "sweep": "sweep.SweepCommand",
    "traffic": "traffic.TrafficCommand",
    "validate": "validate.Comparison",
    "winner_map": "map.MapCommand",
}
PRINTED = (  # options of what is printed and written, and of a folder's sweep
    "check", "config", "continue_on_error", "csv", "dry_run", "html", "json", "output", "overwrite", "resume",
    "save_detailed", "verbose",
)  # fmt: skip
WIDTH = 120
TYPES = {int: "int", float: "float", bool: "bool"}
MAPPINGS = ("vary",)  # lists that may be given as dictionaries

if TYPE_CHECKING:
    from pdvsim.cli.validate.base import Compared
    from pdvsim.decide.advice import Advice
    from pdvsim.decide.capacity import Capacities
    from pdvsim.decide.draft_table import DraftTable
    from pdvsim.decide.winners import WinnerMap
    from pdvsim.view.points import SweepPoints
    from pdvsim.view.traffic import TraceAccount


def function(name: str) -> Callable[..., Any]:
    """The function of that name: its keywords are the options of its command, and its help has the main ones."""
    plain: Callable[..., Any] = globals()[name]
    _, known = command_of(name)
    others = [replace(known[name], name=other, default=None) for other, name in other_spellings(known)]
    given = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if option.placed else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if option.default is MISSING else option.default,
            annotation=python_type(option),
        )
        for option in sorted([*known.values(), *others], key=lambda option: not option.placed)
    ]
    returns = inspect.signature(plain).return_annotation
    plain.__signature__ = inspect.Signature(given, return_annotation=returns)  # type: ignore[attr-defined]
    main = (f"{name}: {described(known[name])}" for name in MOST_USED if name in known)
    filled = (textwrap.fill(text, WIDTH - 8, subsequent_indent="    ", break_on_hyphens=False) for text in main)
    plain.__doc__ = "\n".join([f"{inspect.getdoc(plain)}\n\nMain options:\n", *(f"- {text}" for text in filled)])
    return plain


def command_of(name: str) -> tuple[type, dict[str, Option]]:
    """The command of a function, and its options without those of what is printed and written."""
    module, _, command = COMMANDS[name].rpartition(".")
    kind = getattr(import_module(f"pdvsim.cli.{module}"), command)
    return kind, {name: option for name, option in options(kind).items() if name not in PRINTED}


def _asked(name: str, given: Mapping[str, Any]) -> Any:
    """The command of a function with these keywords."""
    kind, known = command_of(name)
    return build(kind, by_name(given, known, "unknown option"))


def python_type(option: Option) -> str:
    """The values that an option takes in Python, as an annotation."""
    one = TYPES.get(option.one, "str | PathLike[str]")
    if option.values:
        one = f"Literal[{', '.join(map(repr, option.values))}]"
    if option.name == "arch":
        one = "str | type[Policy]"
    if option.is_list:
        one += f" | Sequence[{one}]"
        one += " | Mapping[str, Any]" if option.name in MAPPINGS else ""
    return one if option.default is MISSING or option.default is not None else f"{one} | None"


def run(**options: Any) -> Run:
    """Simulate one experiment; keywords are the flags of `pdvsim run`. A ValueError names what is wrong."""
    from pdvsim.bench.band import ends
    from pdvsim.bench.length import long_enough
    from pdvsim.sim.run import simulate

    asked = build(AskedExperiment, options).asked()
    checked(asked)
    experiment = long_enough(asked)
    return Run(simulate(experiment), ends(experiment))


def sweep(**options: Any) -> SweepPoints:
    """Simulate architectures x loads x replications; keywords are the flags of `pdvsim sweep`. One row per run.

    The frame prints as a summary and has `plot()`. `vary` is a dictionary: vary={"num_speculative_tokens": [2, 4]}.
    Nothing is written.
    """
    from pdvsim.bench.output import tidy
    from pdvsim.bench.run import run as run_points
    from pdvsim.view.points import SweepPoints

    chosen = _asked("sweep", options)
    asked = chosen.sweep
    points = SweepPoints(tidy(frame_of(run_points(asked.points(), chosen.backend))))
    points.setting = points_line(points, [asdict(asked.base)])
    return points


def capacity(**options: Any) -> Capacities:
    """The highest rate each architecture holds; keywords are the flags of `pdvsim capacity`. Prints as a table."""
    answer: Capacities = _asked("capacity", options).answer()
    return answer


def advise(**options: Any) -> Advice:
    """What to run for a load, with confidence; keywords are the flags of `pdvsim advise`. Prints as text.

    With `gpus` it also chooses how to use them.
    """
    answer: Advice = _asked("advise", options).answer()
    return answer


def draft_table(**options: Any) -> DraftTable:
    """The best draft length by batch size; keywords are the flags of `pdvsim draft-table`. Prints as a table."""
    answer: DraftTable = _asked("draft_table", options).answer()
    return answer


def winner_map(**options: Any) -> WinnerMap:
    """The best architecture over two axes; keywords are the flags of `pdvsim map`. Prints as a table."""
    answer: WinnerMap = _asked("winner_map", options).answer()
    return answer


def traffic(file: str | Path, **options: Any) -> TraceAccount:
    """Summarise a trace; keywords are the flags of `pdvsim traffic`. Prints as text and has `plot()`."""
    account: TraceAccount = _asked("traffic", {"file": file, **options}).account()
    return account


def validate(runs: str | Path | Sequence[str | Path] = (), **options: Any) -> Compared:
    """Compare measurements with predictions; keywords are the flags of `pdvsim validate`. Prints as tables.

    `validate(bench="bench.json", model="llama-3.1-8b", gpu="h100")` compares a result of `vllm bench serve`.
    """
    comparison: Compared = _asked("validate", {"runs": runs, **options}).compared()
    return comparison
