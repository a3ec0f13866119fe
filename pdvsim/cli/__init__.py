"""The `pdvsim` command. Tables on standard output, everything else on standard error.

Bad input is one line on standard error and exit code 2; Ctrl-C is one line and 130. Each command is a module of
this package with a `main(argv)`; only the one asked for is imported, and only its parser is built.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

from pdvsim.common.console import guarded
from pdvsim.common.version import __version__

COMMANDS = {  # name, that of a module of this package: one line of help
    "run": "one experiment: pdvsim run --arch pdv --request-rate 8",
    "sweep": "architectures x loads x replications: pdvsim sweep --arch pdv,pd --concurrency 1,8,64 --num-runs 5",
    "plot": "pictures of sweeps and runs: pdvsim plot results/sweep-DATE --against pd",
    "report": "one interactive page: pdvsim report results/sweep-DATE -o report.html",
    "check": "whether results on disk are whole: pdvsim check results/sweep-DATE",
    "capacity": "the highest rate each architecture holds: pdvsim capacity --goodput ttft:500 tpot:50 --attainment 0.9",
    "advise": "what to run, and how sure: pdvsim advise --request-rate 8 --goodput ttft:500 tpot:50",
    "draft-table": "the best draft length by batch size, for vLLM: pdvsim draft-table --pair draft:target --gpu h200",
    "map": "which architecture wins where: pdvsim map --y acceptance",
    "frontier": "first token against the others, over architectures and chunks: pdvsim frontier --request-rate 6",
    "compare": "model pairs x cards x architectures: pdvsim compare --pairs tinyllama-1.1b:llama-2-7b --gpus h200",
    "reproduce": "the published PD-Verify tables, simulated: pdvsim reproduce poisson-30s --fair",
    "profile": "measure models on this GPU: pdvsim profile --models llama-2-7b -o DIR",
    "calibrate": "a profile from measured samples: pdvsim calibrate DIR -o profile.json",
    "validate": "real serving runs against the same runs simulated: pdvsim validate [RUNS.jsonl]",
    "profiles": "the GPUs, models, profiles and samples that come with pdvsim",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded("pdvsim", lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)))


def _dispatch(argv: list[str]) -> int:
    first = argv[0] if argv else None
    if first in ("-h", "--help"):
        sys.stdout.write(help_text())
        return 0
    if first == "--version":
        print(f"pdvsim {__version__}")
        return 0
    if first is None or first not in COMMANDS:
        what = "no command" if first is None else f"unknown {'option' if first[:1] == '-' else 'command'} {first!r}"
        close = difflib.get_close_matches(first or "", COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; commands: {', '.join(COMMANDS)} (see pdvsim --help)"
        raise ValueError(what + hint)
    code: int = import_module(module_of(first)).main(argv[1:])
    return code


def module_of(command: str) -> str:
    """The module of a command."""
    return f"{__name__}.{command.replace('-', '_')}"


def help_text() -> str:
    """What `pdvsim --help` prints."""
    width = max(len(name) for name in COMMANDS) + 2  # `map` is a module of this package once it is loaded
    lines = "\n".join(f"  {name:<{width}}{line}" for name, line in COMMANDS.items())
    return f"""\
usage: pdvsim [-h] [--version] {{{",".join(COMMANDS)}}} ...

Which serving architecture for speculative decoding, on your GPU and load, and how sure.

commands:
{lines}

options:
  -h, --help   this text; `pdvsim COMMAND --help` lists a command's options
  --version    the version
"""
