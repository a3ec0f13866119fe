"""The comparison with transformers: models of the same shape, tokens counted, and the shipped table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdvsim.calibration.validate import peers
from pdvsim.realrun.engine.arch import from_config
from pdvsim.realrun.site import TINY

SHIPPED = Path(peers.__file__).parents[1] / "data" / "h200" / "peers.json"


def test_the_reference_has_the_same_shape() -> None:
    for arch in TINY.values():
        model = peers.reference(arch, torch.device("cpu"), torch.float32)
        found = from_config(model.config.to_dict(), arch.spec.name).spec
        assert replace(found, max_position_embeddings=arch.spec.max_position_embeddings) == arch.spec


def test_every_way_of_transformers_gives_the_tokens_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "TOKENS", 6)
    said: list[str] = []
    archs = {str(role): arch for role, arch in TINY.items()}
    rows = peers.transformers_rows(archs, torch.device("cpu"), 2, 1, said.append)
    assert [row.get("failed") for row in rows] == [None, None, None], said
    assert [row["tokens"] for row in rows] == [12, 6, 24]
    assert rows[0]["target_forwards"] == 6  # one for the prompts, which gives the first token
    assert rows[1]["target_forwards"] <= 6


def test_the_shipped_comparison_is_complete() -> None:
    document = json.loads(SHIPPED.read_text(encoding="utf-8"))
    assert {row["name"] for row in document["rows"]} >= set(peers.ORDER)
    assert all(row.get("graphs_captured_late", 0) == 0 for row in document["rows"])
    pd = next(row for row in document["rows"] if row["name"] == "pd")
    line = next(line for line in peers.table({**document, "rows": [pd]}).splitlines() if line.startswith("pd "))
    measured, predicted, ceiling = (float(word) for word in line.split()[1:4])
    assert measured < ceiling
    assert predicted < ceiling
