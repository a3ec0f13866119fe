"""`pdvsim completion SHELL`: a script that completes commands, options and their values, for bash, zsh and fish."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from inspect import isclass
from typing import Literal

import tyro

from pdvsim.cli.args import parse
from pdvsim.cli.commands import COMMANDS, module_of
from pdvsim.cli.help import Option, options
from pdvsim.sim.doubts import same_vocabulary
from pdvsim.sim.hardware.models import GPUS, PRESETS
from pdvsim.sim.policies import ARCHS

PROGRAMS = ("pdvsim", "realrun")
PAIRS = [
    f"{draft.name}:{target.name}"
    for draft in PRESETS.values()
    for target in PRESETS.values()
    if draft.params < target.params and same_vocabulary(draft, target)
]


@dataclass(frozen=True)
class CompletionCommand:
    """Print a script that completes commands, options and values.

    bash: eval "$(pdvsim completion bash)" in ~/.bashrc. zsh: the same with zsh, in ~/.zshrc, behind compinit.
    fish: pdvsim completion fish > ~/.config/fish/completions/pdvsim.fish
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """Which shell the script is for."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    shell = parse(CompletionCommand, argv, "pdvsim completion").shell
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]({name: _flags(name) for name in COMMANDS}), end="")
    return 0


Flags = dict[str, tuple[str, ...]]  # the values that may be listed, by flag


def command_class(name: str) -> type:
    """The dataclass of a command."""
    module = import_module(module_of(name))
    found = [value for key, value in vars(module).items() if key.endswith("Command") and isclass(value)]
    return next((value for value in found if value.__module__ == module.__name__), found[0])


def _flags(command: str) -> Flags:
    found: Flags = {"--help": (), "--help-all": ()}
    if command == "help":
        return {}
    for option in options(command_class(command)):
        if option.placed:
            continue
        for flag in (option.flag, *option.aliases):
            found[flag] = _values(option)
        if option.is_switch:
            found[f"--no-{option.flag[2:]}"] = ()
    return found


def _values(option: Option) -> tuple[str, ...]:
    named = {"arch": ARCHS, "archs": ARCHS, "gpu": GPUS, "gpus": GPUS, "pair": PAIRS, "pairs": PAIRS, "models": PRESETS}
    return tuple(named.get(option.name, ())) if option.is_text else option.values


def _bash(commands: dict[str, Flags]) -> str:
    parts = []
    for name, flags in commands.items():
        listed = {flag: " ".join(values) for flag, values in flags.items() if values}
        parts += [f'        {name}\\ {flag}) words="{values}" ;;\n' for flag, values in listed.items()]
        parts.append(f'        {name}\\ *) words="{" ".join(flags)}" ;;\n')
    return f"""\
# completion of pdvsim for bash: eval "$(pdvsim completion bash)"
_pdvsim() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" first=1 words=""
    local command="${{COMP_WORDS[1]}}"
    if [[ "${{COMP_WORDS[0]##*/}}" == realrun ]]; then
        command=realrun first=0
    fi
    if (( COMP_CWORD == 1 && first )); then
        words="{" ".join(commands)} --help --version"
    elif [[ "$command" == help ]]; then
        words="{" ".join(commands)}"
    else
        case "$command $previous" in
{"".join(parts)}        esac
        case "$words" in
            -*) [[ "$current" == -* ]] || words="" ;;
        esac
    fi
    COMPREPLY=( $(compgen -W "$words" -- "${{current##*,}}") )
    if [[ "$current" == *,* ]]; then
        COMPREPLY=( "${{COMPREPLY[@]/#/${{current%,*}},}}" )
    fi
    if (( ${{#COMPREPLY[@]}} == 0 )); then
        compopt -o default 2>/dev/null
    fi
}}
complete -F _pdvsim {" ".join(PROGRAMS)}
"""


def _zsh(commands: dict[str, Flags]) -> str:
    parts = []
    for name, flags in commands.items():
        listed = {flag: " ".join(values) for flag, values in flags.items() if values}
        parts += [f'        ("{name} {flag}") found=({values}) ;;\n' for flag, values in listed.items()]
        parts.append(f'        ("{name} "*) found=({" ".join(flags)}) ;;\n')
    return f"""\
# completion of pdvsim for zsh: eval "$(pdvsim completion zsh)"
_pdvsim() {{
    local command="$words[2]" previous="$words[CURRENT-1]"
    local -a found
    if [[ "$service" == realrun ]]; then
        command=realrun
    elif (( CURRENT == 2 )); then
        compadd -- {" ".join(commands)} --help --version
        return
    elif [[ "$command" == help ]]; then
        compadd -- {" ".join(commands)}
        return
    fi
    case "$command $previous" in
{"".join(parts)}    esac
    if [[ "$found[1]" == -* && "$words[CURRENT]" != -* ]]; then
        _files
    else
        compset -P '*,'
        compadd -- $found
    fi
}}
compdef _pdvsim {" ".join(PROGRAMS)}
"""


def _fish(commands: dict[str, Flags]) -> str:
    lines = ["# completion of pdvsim for fish: pdvsim completion fish > ~/.config/fish/completions/pdvsim.fish"]
    for name, text in COMMANDS.items():
        lines.append(f"complete -c pdvsim -n __fish_use_subcommand -f -a {name} -d {_quoted(text)}")
    lines.append(f"complete -c pdvsim -n '__fish_seen_subcommand_from help' -f -a {_quoted(' '.join(commands))}")
    for name, flags in commands.items():
        for flag, values in flags.items():
            spelt = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            taken = f" -x -a {_quoted(' '.join(values))}" if values else ""
            lines.append(f"complete -c pdvsim -n '__fish_seen_subcommand_from {name}' {spelt}{taken}")
            if name == "realrun":
                lines.append(f"complete -c realrun {spelt}{taken}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
