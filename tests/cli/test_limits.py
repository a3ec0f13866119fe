"""Limits are stated, kept before any work is done, and the same wherever a value comes from."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import fuzzcases
import pytest

from pdvsim import cli
from pdvsim.bench.inputs import cost, forewarning
from pdvsim.bench.sweep import Sweep
from pdvsim.common import console
from pdvsim.sim.config import Experiment, Traffic
from pdvsim.sim.limits import ranges
from pdvsim.sim.models.specs import GpuSpec
from pdvsim.sim.prices import profile
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.host import HostCost
from pdvsim.sim.prices.power import PowerFit
from pdvsim.sim.prices.reach import Reach

ROOT = Path(cli.__file__).parents[2]
CONFIGS = ("pdvsim.cli.run", "pdvsim.sim.config", "pdvsim.sim.workload.options", "pdvsim.sim.policies.options",
           "pdvsim.sim.prices.options", "pdvsim.realrun.machine", "pdvsim.cli.realrun",
           "pdvsim.decide.options", *(cli.command_class(name).__module__ for name in cli.COMMANDS),
           *(f"pdvsim.cli.validate.{name}" for name in ("base", "bench", "runs", "serve", "servers")),
           *(f"pdvsim.decide.{name}" for name in ("capacity", "advice", "draft_table", "winners", "goal",
                                                  "space")))  # fmt: skip
ANSWERS = {
    "Advice", "Case", "Capacities", "Bracket", "WinnerMap", "Cell", "Differences", "Border", "DraftTable", "Tier",
}  # fmt: skip


def numeric(hint: Any) -> bool:
    parts = get_args(hint)
    return hint in (int, float) or any(numeric(part) for part in parts)


def configurations() -> list[type]:
    modules = [import_module(name) for name in CONFIGS]
    classes = [c for m in modules for c in vars(m).values() if dataclasses.is_dataclass(c) and isinstance(c, type)]
    return [c for c in dict.fromkeys(classes) if c.__name__ not in ANSWERS and c.__module__ in CONFIGS]


def test_every_number_that_can_be_given_has_a_range() -> None:
    """The declaration of a numeric field of a configuration has its range."""
    named = {(c, f.name): get_type_hints(c)[f.name] for c in configurations() for f in dataclasses.fields(c)}
    assert len(named) > 100
    missing = [(c.__name__, name) for (c, name), hint in named.items() if numeric(hint) and name not in ranges(c)]
    assert not missing, f"no range: {missing}"


def test_every_range_is_kept_by_its_configuration() -> None:
    """Just outside is refused by name with the range, by everything that can be made of its defaults."""
    kept = 0
    for group in configurations():
        try:
            group()
        except (TypeError, ValueError):
            continue
        for part in dataclasses.fields(group):
            if part.name not in ranges(group):
                continue
            span, flag, hint = ranges(group)[part.name], part.name.replace("_", "-"), get_type_hints(group)[part.name]
            listed = any(get_origin(one) is tuple for one in (hint, *get_args(hint)))
            for bad in (span.low - 1, span.high * 2 + 1, math.nan if "float" in str(hint) else int(span.low) - 10**400):
                with pytest.raises(ValueError, match=f"^{flag} must be (.* to |one of )") as refused:
                    group(**{part.name: (bad,) if listed else bad})
                assert "\n" not in str(refused.value)
                assert len(str(refused.value)) < 200
                kept += 1
    assert kept > 400


def test_every_figure_of_a_profile_has_a_range() -> None:
    texts = {"name", "source", "sister", "measured", "foundation", "gpu", "models", "host", "contention", "power"}
    texts |= {"provenance", "measured_together", "whole_steps"}
    for part in (GpuSpec, ForwardTerms, Reach, PowerFit, HostCost, profile.ContentionFit, profile.Profile):
        for name in (field.name for field in dataclasses.fields(part)):
            assert name in ranges(part) or name.endswith(profile.KNOTS) or name in texts, name


@pytest.mark.parametrize("name", [name for name in fuzzcases.USES if "/" not in name])
def test_only_regular_files_of_a_stated_size_are_read(name: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    """A pipe would hang, a device never end, a deep file overflow the stack."""
    path = tmp_path / name
    argv = [part.replace("{}", str(path)) for part in fuzzcases.USES[name]]
    os.mkfifo(path)
    assert "regular file" in refused(argv)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "regular file" in refused(argv)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "MiB are read" in refused(argv)
    path.write_text("a = " + "[" * 3000 if name.endswith(".toml") else '{"schema_version": ' + "[" * 3000)
    assert name in refused(argv)


def test_what_nobody_foresaw_is_one_line_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise ZeroDivisionError("a\nsurprise")

    monkeypatch.chdir(tmp_path)
    assert console.guarded("pdvsim", command) == 70
    [file] = tmp_path.glob("pdvsim-crash-*.txt")
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "ZeroDivisionError: a surprise" in err
    assert str(file) in err
    report = file.read_text()
    assert "Please report it" in report
    assert "raise ZeroDivisionError" in report
    assert "Python" in report


def test_no_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise MemoryError

    assert console.guarded("pdvsim", command) == 2
    assert "out of memory" in capsys.readouterr().err


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    whole = os.environ | {"PYTHONPATH": str(ROOT)} | env
    line = command.replace("pdvsim", f"{sys.executable} -m pdvsim")
    return subprocess.run(["bash", "-c", line], env=whole, capture_output=True, text=True, check=False)


def test_closed_full_and_plain_standard_output(tmp_path: Path) -> None:
    """A closed output leads nowhere, a full one is one line, and what it cannot encode is replaced."""
    closed = shell("pdvsim profile --list >&-")
    assert (closed.returncode, closed.stderr) == (0, "")
    silent = shell("pdvsim run --num-prompts 0 2>&-")
    assert (silent.returncode, silent.stdout) == (2, "")
    full = shell("pdvsim profile --list >/dev/full")
    assert (full.returncode, full.stderr) == (2, "pdvsim: error: No space left on device\n")
    config = tmp_path / "é.toml"
    config.write_text('gpu = "é"')
    plain = shell(f"pdvsim run --config {config}", PYTHONIOENCODING="ascii")
    assert (plain.returncode, plain.stderr.count("\n")) == (2, 1)
    assert "unknown gpu '?'" in plain.stderr
    assert "---" not in plain.stderr  # of a box


def test_a_name_never_splits_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("pdvsim", "saved a\nb.json")
    assert capsys.readouterr().err == "pdvsim: saved a b.json\n"


def one_run(**traffic: Any) -> list[Experiment]:
    return [Experiment(traffic=Traffic(request_rate=8.0, **traffic))]


def test_long_and_large_runs_say_so_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forewarning(one_run(num_prompts=1000), 1) == ""
    assert forewarning([point.experiment for point in Sweep(num_runs=3).points()], 2) == ""
    long = one_run(num_prompts=10_000_000)
    assert re.search("[0-9]+ (minutes|hours) on 1 core", forewarning(long, 1))
    assert "GB" in forewarning(long, 1)
    # beyond the few that are timed, requests cost what they cost: ten times as many, ten times as much
    one, ten = (cost(one_run(num_prompts=n, dataset_name="random", output_len=40)).run_bytes for n in (10**5, 10**6))
    assert ten == pytest.approx(10 * one)
    # long requests are cut for the timing, and count for what they are; what they record goes to disk
    short, longer = (cost(one_run(num_prompts=50, dataset_name="random", output_len=n)) for n in (900, 9000))
    assert longer.core_s > 3 * short.core_s
    assert longer.run_bytes == short.run_bytes
    monkeypatch.setattr("pdvsim.bench.inputs.memory_bytes", lambda: 10**6)
    assert "GB" in forewarning(one_run(num_prompts=50_000), 1)


def test_the_ranges_of_cards_are_those_of_the_cards_that_are_known() -> None:
    for card in GPUS.values():
        for name, span in ranges(GpuSpec).items():
            assert span.holds(getattr(card, name))
