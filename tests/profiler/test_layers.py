"""Layers without attention, on the CPU: which sizes are measured, and that measuring continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import options, tiny

from pdvsim.profiler import layers
from pdvsim.profiler.measure import Profiler
from pdvsim.profiler.samples import load

CPU = torch.device("cpu")


def test_sizes_that_are_known_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = tiny("tiny-a")
    for sizes in ([40, 64, 100], [40, 64, 100, 128]):
        monkeypatch.setattr(layers, "sizes", lambda sizes=sizes: sizes)
        profiler = Profiler(options(tmp_path), tiny, lambda text: None)
        assert layers.measure_layers(profiler.recorder.part(profiler.header("tiny-a", [arch])), arch, CPU, 0, 1e6)
        profiler.recorder.save()
    columns = load(tmp_path).frame
    assert sorted(set(columns["chunk_tokens"])) == [40, 64, 100, 128]
    assert len(columns) == 4
    assert set(columns["section"]) == {"layers"}
    assert (columns["seconds"] > 0).all()


def test_the_seconds_are_those_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers run; a model of twenty takes ten times as long."""
    clock = iter(range(100))
    monkeypatch.setattr(layers, "perf_counter", lambda: float(next(clock)))
    deep = replace(tiny("tiny-a"), spec=replace(tiny("tiny-a").spec, layers=20))
    assert layers.Stack(deep, CPU, 0).seconds(8) == [pytest.approx(10.0)]
