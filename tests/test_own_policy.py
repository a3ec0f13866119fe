"""A policy means what it says: whoever changes a line of one gets exactly that, and a deadlock says who waits."""

from __future__ import annotations

import pytest

from pdvsim.sim.config import Experiment, Server, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.policies import named
from pdvsim.sim.policies.base import Process
from pdvsim.sim.policies.pdv import PDV
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

ROWS = 8


class Patient(PDV):
    """Verify waits for eight rows."""

    def needed(self) -> int:
        return ROWS

    def verify_worker(self) -> Process:
        while True:
            while len(self.verify_queue.queue) < self.needed():
                yield self.verify_queue.wait()
            rows = self.verify_queue.take(self.settings.max_num_seqs)
            verdict = yield self.device.launch(self.verify(rows, max(row.k for row in rows)))
            going = self.settle(rows, verdict)
            if going:
                self.decode.put(going)


class UntilTheEnd(Patient):
    """The same, or for all there are where fewer than eight are left."""

    def needed(self) -> int:
        return min(ROWS, max(1, self.in_flight - len(self.prefilling)))


def run(policy: type[PDV], concurrency: int, direct: bool) -> Result:
    traffic = Traffic("random", input_len=64, output_len=40, num_prompts=64, max_concurrency=concurrency)
    return simulate(Experiment(named(policy), traffic, server=Server(verify_gather="never")), direct=direct)


@pytest.mark.parametrize("direct", [True, False])
def test_a_changed_line_acts(direct: bool) -> None:
    result = run(UntilTheEnd, 32, direct)
    verifies = result.launches["rows"][result.launches["kind"] == KINDS.index("verify")]
    ending = result.requests["finish_s"].max() - 0.2
    ends = result.launches["end_s"][result.launches["kind"] == KINDS.index("verify")]
    assert len(verifies) > 20
    assert verifies[ends < ending].min() >= ROWS
    assert run(PDV, 32, direct).launches["rows"].min() < ROWS


@pytest.mark.parametrize("direct", [True, False])
def test_a_deadlock_says_who_waits(direct: bool) -> None:
    with pytest.raises(RuntimeError) as stuck:
        run(Patient, 4, direct)
    said = str(stuck.value)
    assert said.startswith("deadlock at 0.0")
    assert "lanes that wait: decode, prefill, verify" in said
    assert "requests inside: 0, 1, 2, 3 (4 in all, 64 of 64 not served)" in said
