"""Help and completion: short by default, whole on request, true to what the commands take."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from pdvsim.cli import COMMANDS, command_class, main
from pdvsim.cli.sweep import SweepCommand
from pdvsim.common.commandline import parse
from pdvsim.common.options import options
from pdvsim.sim import limits as layer


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with contextlib.suppress(SystemExit):  # of a command's --help
        assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_or_two_and_help_all_has_every_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    short, whole = printed(capsys, command, "--help"), printed(capsys, command, "--help-all")
    assert short == printed(capsys, "help", command) == printed(capsys, command, "-h")
    assert whole == printed(capsys, "help", command, "--help-all")
    assert short.count("\n") <= 70
    assert all(len(line) <= 100 for line in (short + whole).splitlines())
    for option in options(command_class(command)).values():
        assert option.text, option.name
        assert option.placed or option.flag in whole or f"--no-{option.flag[2:]}" in whole


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
    ("report --he", ["--help", "--help-all"]),
]


@pytest.mark.parametrize(("typed", "offered"), COMPLETED)
def test_completion(capsys: pytest.CaptureFixture[str], typed: str, offered: list[str]) -> None:
    assert printed(capsys, "--complete", "pdvsim", *typed.split()).split() == offered


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(printed(capsys, "--completion", "bash"))
    at = "COMP_WORDS=(realrun --arch pdv-h); COMP_CWORD=2"
    program = f'pdvsim() {{ {sys.executable} -m pdvsim "$@"; }}'
    code = f'{program}; source {script}; {at}; _pdvsim; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["pdv-hybrid"]


def test_a_command_line_reads_the_types_of_its_options_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for every flag, which took longer than everything else together."""
    count = itertools.count()
    monkeypatch.setattr(layer, "get_type_hints", lambda *a, **k: (next(count), typing.get_type_hints(*a, **k))[1])
    parse(SweepCommand, ["--arch", "pdv"])
    assert next(count) < 60
