"""A real run that is listened to: its rows reach the page's process, and the run's own result is what it was."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdvsim.common.commandline import experiment_from
from pdvsim.live import wire
from pdvsim.live.gauge import KEPT_S, SLOT_S
from pdvsim.live.pace import ERRORS, errors, setup_beside
from pdvsim.live.session import Session
from pdvsim.live.wire import Broadcast, Heard, connected, socket_path
from pdvsim.realrun.machine import Machine
from pdvsim.realrun.site import serve
from pdvsim.sim.config import Experiment, Scoring, Server, Traffic
from pdvsim.study.output import settings

EXPERIMENT = Experiment(
    arch="pdv",
    traffic=Traffic(dataset_name="random", num_prompts=12, max_concurrency=4, input_len=12, output_len=8),
    server=Server(num_speculative_tokens=2, max_num_seqs=4),
    scoring=Scoring(goodput=("ttft:100",)),
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(wire, "EVERY_S", 0.0)


def test_what_a_page_hears_is_what_happened() -> None:
    pages: list[socket.socket] = []

    def watched_by(site: Any, client: Any) -> Broadcast:
        found = Broadcast(site, client)
        pages.append(connected())
        return found

    result = serve(EXPERIMENT, Machine(device="cpu", tiny=True), watched_by=watched_by)
    page = Heard(pages[0])
    while not page.over:
        page.listen()
    gauge = page.gauge
    assert gauge.total_finished == len(result.requests["id"]) == 12
    assert gauge.total_tokens == result.deliveries["tokens"].sum() == 12 * 8
    figures = gauge.figures(KEPT_S)
    assert sum(len(part["kind"]) for slot in gauge.slots for part in slot.launches) == len(result.launches["kind"])
    ends_s = [slot.start_s + SLOT_S for slot in gauge.slots]
    whens_s, tokens = result.deliveries["time_s"], result.deliveries["tokens"]
    in_slots = np.bincount(np.searchsorted(ends_s, whens_s), tokens, len(ends_s))  # each in the slot of its time
    assert [slot.tokens for slot in gauge.slots] == in_slots.tolist()
    assert figures["in_system"] == 0
    assert len(gauge._chunks._open["request"]) == len(gauge._unanswered) == 0
    assert figures["marks_ms"]["e2el"][2] > 0
    assert not socket_path().exists()
    assert page.experiment.traffic == result.experiment.traffic
    simulated = setup_beside(page.experiment, "tinyllama-1.1b:llama-2-7b")
    session = Session(simulated)
    session.advance(gauge.now_s + 5)
    [other] = session.figures(KEPT_S)
    assert other["total_finished"] == 12  # the same requests, and no more
    assert other["total_tokens"] == 12 * 8
    assert len(errors(figures, other)) == len(ERRORS)


def test_an_experiment_comes_through() -> None:
    assert experiment_from(settings(EXPERIMENT)) == EXPERIMENT
    other = replace(EXPERIMENT, traffic=Traffic(request_rate=3.5), server=Server(max_verify_batch=8))
    assert experiment_from(settings(other)) == other


def test_a_folder_that_others_can_open_is_refused() -> None:
    socket_path().parent.chmod(0o755)
    with pytest.raises(OSError, match="only you"):
        socket_path()


def test_a_run_that_is_looked_on_needs_no_bokeh() -> None:
    modules = "pdvsim.cli.realrun, pdvsim.live.wire, pdvsim.live.pace"
    code = f"import sys; sys.modules['bokeh'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
