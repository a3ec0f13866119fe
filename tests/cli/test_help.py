"""Help and completion: short by default, whole on request, true to what the commands take."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from pdvsim.cli import COMMANDS, args, main
from pdvsim.cli.args import flags
from pdvsim.cli.completion import command_class
from pdvsim.cli.help import options
from pdvsim.sim.config import Experiment

OWN = [name for name in COMMANDS if name != "help"]


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with contextlib.suppress(SystemExit):  # of a command's --help
        assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("command", OWN)
def test_help_fits_a_screen_or_two_and_help_all_has_every_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    short, whole = printed(capsys, command, "--help"), printed(capsys, command, "--help-all")
    assert short == printed(capsys, "help", command) == printed(capsys, command, "-h")
    assert whole == printed(capsys, "help", command, "--help-all")
    assert short.count("\n") <= 70
    assert all(len(line) <= 100 for line in (short + whole).splitlines())
    for option in options(command_class(command)):
        assert option.text, option.name
        if not option.placed:
            assert option.flag in whole or f"--no-{option.flag[2:]}" in whole


@pytest.mark.parametrize("command", OWN)
def test_help_lists_what_the_parser_takes(command: str) -> None:
    known = flags(command_class(command))
    assert {option.flag[2:] for option in options(command_class(command)) if not option.placed} <= set(known)


def test_options_are_those_of_the_dataclass() -> None:
    found = {option.name: option for option in options(Experiment)}
    assert {name.replace("-", "_") for name in flags(Experiment)} == set(found)
    assert found["band"].shown() == "--no-band"
    assert found["goodput"].shown() == "--goodput TEXT,..."
    assert found["priority"].values == ("none", "stream", "dynamic", "preemptive", "partition")
    assert found["seed"].described().endswith("(default: 0)")


def test_python_m_pdvsim(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "pdvsim", "help"], capture_output=True, text=True, check=True)
    assert done.stdout == printed(capsys, "--help") == printed(capsys, "help")


def test_realrun_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tiny" in printed(capsys, "realrun", "--help-all")
    assert main(["realrun", "--replicas", "2"]) == 2
    assert "realrun has one GPU" in capsys.readouterr().err


COMPLETED = [
    ("swe", ["sweep"]),
    ("help swe", ["sweep"]),
    ("run --arch pdv-", ["pdv-unified", "pdv-hybrid", "pdv-ahead"]),
    ("sweep --arch colocated,pdv-", ["colocated,pdv-unified", "colocated,pdv-hybrid", "colocated,pdv-ahead"]),
    ("run --gpu h1", ["h100-sxm", "h100-pcie", "h100-nvl"]),
    ("run --priority p", ["preemptive", "partition"]),
    ("run --request-", ["--request-rate"]),
    ("draft-table --max-k", ["--max-k"]),
    ("completion --he", ["--help", "--help-all"]),
]


@pytest.mark.parametrize(("typed", "offered"), COMPLETED)
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: str, offered: list[str]) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(printed(capsys, "completion", "bash"))
    words = ["pdvsim", *typed.split()]
    listed = " ".join(f"'{word}'" for word in words)
    at = f"COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}"
    code = f'source {script}; {at}; _pdvsim; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered


def test_the_other_shells_have_every_command_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
    zsh, fish = printed(capsys, "completion", "zsh"), printed(capsys, "completion", "fish")
    assert "compdef _pdvsim pdvsim realrun" in zsh
    for command in OWN:
        assert f"-a {command} " in fish
        for option in options(command_class(command)):
            if not option.placed:
                assert f"seen_subcommand_from {command}' -l {option.flag[2:]}" in fish
                assert option.flag in zsh


def test_a_command_line_reads_the_types_of_its_options_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for every flag, which took longer than everything else together."""
    count = itertools.count()
    monkeypatch.setattr(args, "get_type_hints", lambda *a, **k: (next(count), typing.get_type_hints(*a, **k))[1])
    args.parse(args.SweepCommand, ["--arch", "pdv"])
    assert next(count) < 60
