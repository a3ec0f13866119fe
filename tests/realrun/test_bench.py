"""The floor against figures worked out by hand, and what the GPU commands do without one."""

from __future__ import annotations

import pytest
import torch

from pdvsim.realrun import bench
from pdvsim.sim.hardware.models import model

CARD = bench.Ceilings("H200", 4.27e12, 790e12)


@pytest.mark.parametrize(
    ("name", "tokens", "rows", "context", "floor_ms"),
    [
        ("tinyllama-1.1b", 1, 1, 512, 0.48),
        ("tinyllama-1.1b", 1, 32, 512, 0.57),
        ("llama-2-7b", 5, 1, 512, 3.14),
        ("llama-2-7b", 5, 32, 512, 5.07),
        ("llama-2-7b", 5, 64, 512, 9.35),
    ],
)
def test_floor_of_rows(name: str, tokens: int, rows: int, context: int, floor_ms: float) -> None:
    known = rows * context
    floor = bench.floor_s(model(name), CARD, rows * tokens, rows * tokens, known * tokens, known)
    assert 1000 * floor == pytest.approx(floor_ms, rel=0.02)


def test_floor_of_a_prompt() -> None:
    floor = bench.floor_s(model("llama-2-7b"), CARD, 1024, 1, 1024 * 1025 / 2, 1024)
    assert 1000 * floor == pytest.approx(17.1, rel=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 1
    assert capsys.readouterr().err == "no CUDA device: this benchmark measures one\n"
