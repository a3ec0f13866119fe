"""The study of adaptive verification: its committed cells, and what the docs say of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from studies import adaptive_verification as study

ROOT = Path(__file__).parents[2]
ROWS = {
    "at 8,192 tokens (vLLM's default)": "adaptive 8192",
    "at the served context (suggested by vLLM's documentation)": "adaptive served",
    "at 256 tokens": "adaptive 256",
    "`goodput` controller": "goodput",
}


def test_the_docs_have_the_figures_of_the_cells() -> None:
    cells = json.loads(study.DATA.read_text(encoding="utf-8"))
    assert sorted(cells) == sorted(study.CELLS)
    assert len(cells) == 60
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    for label, way in ROWS.items():
        cells_text = []
        for over in ("k=7", "best fixed"):
            gains = 100 * np.array(study.gains(cells, over, way))
            mean = f"{gains.mean():+.0f}%" if round(gains.mean()) else "0%"
            cells_text.append(f"{gains.min():+.0f}% to {gains.max():+.0f}%, mean {mean}")
        assert "| " + " | ".join([label, *cells_text]) + " |" in text


def test_a_cell_comes_out_again() -> None:
    name = "llama-3.1-8b 65536 4 0.75"
    known = json.loads(study.DATA.read_text(encoding="utf-8"))[name]
    assert study.cell(name) == pytest.approx(known, rel=1e-3)
