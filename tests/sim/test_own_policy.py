"""A policy means what it says: a changed line has exactly its effect, and a deadlock names what waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import one_line

import pdvsim
from pdvsim.cli import main
from pdvsim.sim.config import Experiment, Server, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.policies import named, own_errors
from pdvsim.sim.policies.base import Process
from pdvsim.sim.policies.pdv import PDV
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate
from pdvsim.testing import check_policy

ROWS = 8


class Patient(PDV):
    """Verify waits for eight rows."""

    def needed(self) -> int:
        return ROWS

    def verify_worker(self) -> Process:
        while True:
            while len(self.verify_queue) < self.needed():
                yield self.verify_queue.wait()
            rows = self.verify_queue.take(self.settings.max_num_seqs)
            verdict = yield self.device.launch(self.verify(rows, rows.k))
            going = self.settle(rows, verdict)
            if going:
                self.decode.put(going)


class UntilTheEnd(Patient):
    """The same, or for all there are where fewer than eight are left."""

    def needed(self) -> int:
        return min(ROWS, max(1, self.in_flight - len(self.prefilling)))


def run(policy: type[PDV], concurrency: int, blocks: bool) -> Result:
    traffic = Traffic("random", input_len=64, output_len=40, num_prompts=64, max_concurrency=concurrency)
    return simulate(Experiment(named(policy), traffic, server=Server(verify_gather="never")), blocks=blocks)


@pytest.mark.parametrize("blocks", [True, False])
def test_a_changed_line_acts(blocks: bool) -> None:
    result = run(UntilTheEnd, 32, blocks)
    verifies = result.launches["rows"][result.launches["kind"] == KINDS.index("verify")]
    ending = result.requests["finish_s"].max() - 0.2
    ends = result.launches["end_s"][result.launches["kind"] == KINDS.index("verify")]
    assert len(verifies) > 20
    assert verifies[ends < ending].min() >= ROWS
    assert run(PDV, 32, blocks).launches["rows"].min() < ROWS


@pytest.mark.parametrize("blocks", [True, False])
def test_a_deadlock_says_who_waits(blocks: bool) -> None:
    with pytest.raises(RuntimeError) as stuck:
        run(Patient, 4, blocks)
    message = str(stuck.value)
    assert message.startswith("deadlock at 0.0")
    assert "waiting lanes: decode, prefill, verify" in message
    assert "requests inside: 0, 1, 2, 3 (4 in total, 64 of 64 not served)" in message


OWN = """
from pdvsim.sim.policies.colocated import Colocated
from pdvsim.sim.policies.base import Policy

class Same(Colocated):
    pass

class Lost(Colocated):
    def settle(self, rows, verdict):
        return super().settle(rows, verdict)[:-1] if self.env.now > 0.5 else super().settle(rows, verdict)

class Greedy(Colocated):
    def settle(self, rows, verdict):
        for row in rows[:1]:
            row.state.emitted += 1
        return super().settle(rows, verdict)

class NotOne:
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return str(tmp_path / "own.py")


def test_a_policy_from_a_file_is_what_it_is_derived_from(own: str) -> None:
    traffic = Traffic(num_prompts=30, max_concurrency=8)
    mine, theirs = simulate(Experiment(f"{own}:Same", traffic)), simulate(Experiment("colocated", traffic))
    for table in ("requests", "launches", "deliveries"):
        for name, column in getattr(mine, table).items():
            np.testing.assert_array_equal(column, getattr(theirs, table)[name])
    assert Experiment(f"{own}:Same").base_arch == "colocated"
    assert Experiment(f"{own}:Same").paged
    assert own in Experiment(f"{own}:Same").files


@pytest.mark.parametrize(("arch", "says"), [
    ("{own}:Missing", "has no policy Missing, a class derived from Policy; it has Same, Lost, Greedy"),
    ("{own}:NotOne", "has no policy NotOne"),
    ("/no/such.py:Mine", "cannot read /no/such.py: No such file"),
    ("own.txt:Mine", "unknown arch 'own.txt:Mine'; known: autoregressive"),
    ("pdv-hybird", "unknown arch 'pdv-hybird' (did you mean pdv-hybrid?)"),
])  # fmt: skip
def test_what_is_no_policy_is_refused_in_one_line(own: str, arch: str, says: str) -> None:
    with one_line(says):
        Experiment(arch.format(own=own))


def test_a_file_that_does_not_run_says_why(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("\nimport nothing_of_that_name\n", encoding="utf-8")
    with one_line("bad.py:2: ModuleNotFoundError: No module named 'nothing_of_that_name'"):
        Experiment(f"{tmp_path}/bad.py:Mine")
    (tmp_path / "worse.py").write_text("\n\ndef broken(:\n", encoding="utf-8")
    with one_line("worse.py:3: SyntaxError: "):
        Experiment(f"{tmp_path}/worse.py:Mine")


FAULTY = """\
from pdvsim.sim.policies.pdv import PDV

class Divides(PDV):
    def settle(self, rows, verdict):
        return 1 / 0  # line 5

class NoEvent(PDV):
    def verify_worker(self):
        while True:
            yield None  # line 10

class NoVerdict(PDV):
    def settle(self, rows, verdict):
        return super().settle(rows, None)  # line 14: the error is raised in the class it is derived from

class NoStart(PDV):
    def __init__(self, context):
        super().__init__(context)
        {}["missing"]  # line 19

class NoNumber(PDV):
    def settle(self, rows, verdict):
        return int("x")  # line 23

class Stuck(PDV):
    def verify_worker(self):
        while True:
            yield self.verify_queue.wait()
"""
FAULTS = {
    "Divides": ":5: ZeroDivisionError: division by zero",
    "NoEvent": ":10: RuntimeError: ",  # SimPy's words: invalid yield value
    "NoVerdict": ":14: TypeError: ",
    "NoStart": ":19: KeyError: 'missing'",
    "NoNumber": ":23: ValueError: invalid literal for int() with base 10: 'x'",
    "Stuck": ":Stuck: RuntimeError: deadlock at ",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bug_in_a_policy_is_named_by_its_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no error of pdvsim's: one line, exit code 2, and no file to report."""
    monkeypatch.chdir(tmp_path)
    Path("faulty.py").write_text(FAULTY, encoding="utf-8")
    assert main(["run", "--arch", f"faulty.py:{name}", "--num-prompts", "5"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"pdvsim: error: faulty.py{FAULTS[name]}")
    assert line.count("\n") == 1
    assert not [*tmp_path.glob("*crash*")]


def test_a_broken_law_of_ours_is_not_blamed_on_a_policy() -> None:
    """An error under a built-in architecture stays what it is: ours to mend."""
    with pytest.raises(ZeroDivisionError), own_errors("pdv"):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="no room") as refused, own_errors("mine.py:Mine"):
        raise ValueError("no room")
    assert type(refused.value) is ValueError


def test_the_laws_hold_for_a_good_policy_and_name_what_a_bad_one_breaks(own: str) -> None:
    check_policy(f"{own}:Same", real=True)
    with pytest.raises(AssertionError, match="deadlock at"):
        check_policy(f"{own}:Lost", real=False)
    with pytest.raises(AssertionError, match="concurrency 1: violated: a request gets exactly its output tokens"):
        check_policy(f"{own}:Greedy", real=False)


def test_a_sweep_takes_a_class_from_a_notebook() -> None:
    """One that no worker could import: it travels with the points."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("from pdvsim.sim.policies.pd import PD\nclass Mine(PD):\n    pass", space)
    load = {"concurrency": [1, 4], "num_prompts": 6, "output_len": 8}
    mine = pdvsim.sweep(arch=space["Mine"], jobs=2, **load)
    theirs = pdvsim.sweep(arch="pd", jobs=1, **load)
    assert mine["arch"].tolist() == ["Mine", "Mine"]
    assert mine["output_throughput"].tolist() == theirs["output_throughput"].tolist()
