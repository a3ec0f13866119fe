"""The functions of the Python API. Keywords are the flags of the command of the same name, with underscores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.cli.run import AskedExperiment
from pdvsim.cli.sweep import SweepOptions
from pdvsim.cli.traffic import TrafficOptions
from pdvsim.cli.validate import compared
from pdvsim.cli.validate.options import Comparison
from pdvsim.common.options import build
from pdvsim.common.signatures import signed
from pdvsim.study.inputs import checked
from pdvsim.study.sweep import frame_of, run_sweep
from pdvsim.view.run import Run
from pdvsim.view.setting import points_line

COMMANDS = {  # whose options are a function's keywords; imported with the function
    "advise": "advise.AdviseOptions",
    "capacity": "capacity.CapacityOptions",
    "draft_table": "draft_table.DraftTableOptions",
    "run": "run.AskedExperiment",
    "sweep": "sweep.SweepOptions",
    "traffic": "traffic.TrafficOptions",
    "validate": "validate.options.Comparison",
    "winner_map": "map.MapOptions",
}

if TYPE_CHECKING:
    from pdvsim.cli.validate.options import Compared
    from pdvsim.decide.advice import Advice
    from pdvsim.decide.capacity import Capacities
    from pdvsim.decide.draft_table import DraftTable
    from pdvsim.decide.winners import WinnerMap
    from pdvsim.view.points import SweepPoints
    from pdvsim.view.traffic import TraceAccount


def function(name: str) -> Callable[..., Any]:
    """The function of that name with its real signature."""
    module, _, command = COMMANDS[name].rpartition(".")
    plain: Callable[..., Any] = globals()[name]
    return signed(plain, getattr(import_module(f"pdvsim.cli.{module}"), command))


def run(**options: Any) -> Run:
    """Simulate one experiment; keywords are the flags of `pdvsim run`. A ValueError names what is wrong."""
    from pdvsim.sim.run import simulate
    from pdvsim.study.band import ends
    from pdvsim.study.length import long_enough

    asked = build(AskedExperiment, options).asked()
    checked(asked)
    experiment = long_enough(asked)
    return Run(simulate(experiment), ends(experiment))


def sweep(**options: Any) -> SweepPoints:
    """Simulate architectures x loads x replications; keywords are the flags of `pdvsim sweep`. One row per run.

    The frame prints as a summary and has `plot()`. `vary` is a dictionary: vary={"num_speculative_tokens": [2, 4]}.
    Nothing is written.
    """
    from pdvsim.study.output import tidy
    from pdvsim.view.points import SweepPoints

    chosen = build(SweepOptions, options)
    asked = chosen.sweep
    points = SweepPoints(tidy(frame_of(run_sweep(asked.points(), chosen.backend))))
    points.setting = points_line(points, [asdict(asked.base)])
    return points


def capacity(**options: Any) -> Capacities:
    """The highest rate each architecture holds; keywords are the flags of `pdvsim capacity`. Prints as a table."""
    from pdvsim.cli.capacity import CapacityOptions

    return build(CapacityOptions, options).answer()


def advise(**options: Any) -> Advice:
    """What to run for a load, with confidence; keywords are the flags of `pdvsim advise`. Prints as text.

    With `gpus` it also chooses how to use them.
    """
    from pdvsim.cli.advise import AdviseOptions

    return build(AdviseOptions, options).answer()


def draft_table(**options: Any) -> DraftTable:
    """The best draft length by batch size; keywords are the flags of `pdvsim draft-table`. Prints as a table."""
    from pdvsim.cli.draft_table import DraftTableOptions

    return build(DraftTableOptions, options).answer()


def winner_map(**options: Any) -> WinnerMap:
    """The best architecture over two axes; keywords are the flags of `pdvsim map`. Prints as a table."""
    from pdvsim.cli.map import MapOptions

    return build(MapOptions, options).answer()


def traffic(file: str | Path, **options: Any) -> TraceAccount:
    """Summarise a trace; keywords are the flags of `pdvsim traffic`. Prints as text and has `plot()`."""
    return build(TrafficOptions, {"file": file, **options}).account()


def validate(runs: str | Path | Sequence[str | Path] = (), **options: Any) -> Compared:
    """Compare measurements with predictions; keywords are the flags of `pdvsim validate`. Prints as tables.

    `validate(bench="bench.json", model="llama-3.1-8b", gpu="h100")` compares a result of `vllm bench serve`.
    """
    return compared(build(Comparison, {"runs": runs, **options}))
