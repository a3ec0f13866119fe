"""Shell completion: `pdvsim --completion SHELL` prints a script, which calls `pdvsim --complete WORD ...`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pdvsim.cli import COMMANDS, command_class
from pdvsim.common.options import options
from pdvsim.sim.models.presets import PRESETS, same_vocabulary
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.prices.cards import GPUS

BASH = """\
_pdvsim() {
    local IFS=$'\\n'
    COMPREPLY=( $(pdvsim --complete "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null) )
}
complete -o default -F _pdvsim pdvsim realrun
"""
SCRIPTS = {
    "bash": BASH,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{BASH}",
    "fish": "".join(
        f"complete -c {program} -a '(pdvsim --complete (commandline -opc) (commandline -ct))'\n"
        for program in ("pdvsim", "realrun")
    ),
}
PAIRS = [
    f"{draft.name}:{target.name}"
    for draft in PRESETS.values()
    for target in PRESETS.values()
    if draft.params < target.params and same_vocabulary(draft, target)
]
NAMES = {"arch": ARCHS, "gpu": GPUS, "pair": PAIRS, "pairs": PAIRS, "models": PRESETS}  # of text options


def main(argv: list[str]) -> int:
    """Print the script for a shell, or the completions of a command line; returns the exit code."""
    first, *words = argv
    if first == "--completion" and " ".join(words) not in SCRIPTS:
        raise ValueError(f"--completion takes one of {', '.join(SCRIPTS)}, got {' '.join(words)!r}")
    print(SCRIPTS[words[0]] if first == "--completion" else "\n".join(completed(words)))
    return 0


def completed(words: Sequence[str]) -> list[str]:
    """Completions of the last word of a command line."""
    program, *before, typed = words
    before = ["realrun", *before] if Path(program).name == "realrun" else before
    head, comma, tail = typed.rpartition(",")
    return [head + comma + word for word in _offered(before, typed) if word.startswith(tail)]


def _offered(before: Sequence[str], typed: str) -> Iterable[str]:
    if not before or before[0] == "help":
        return [*COMMANDS, "help", "--help", "--version"]
    if before[0] not in COMMANDS:
        return []
    command: type = command_class(before[0])
    known = {flag: option for option in options(command).values() for flag in option.flags}
    if typed.startswith("-"):
        switches = (f"--no-{flag[2:]}" for flag, option in known.items() if option.one is bool)
        return [*known, *switches, "--help", "--help-all"]
    last = known.get(next((word for word in reversed(before) if word.startswith("-")), ""))
    return (last.values or NAMES.get(last.name, ())) if last is not None else ()
