"""A mixture of experts is served, with a draft model or a head, in 16 and in 8 bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import CPU
from torch import Tensor

from pdvsim.cli import main
from pdvsim.realrun.engine import reference_ops
from pdvsim.realrun.engine.arch import from_config
from pdvsim.realrun.engine.batch import ForwardBatch, Pinned
from pdvsim.realrun.engine.cache import Sequences
from pdvsim.realrun.engine.model import Transformer
from pdvsim.sim.models.presets import quantised
from studies.engine_check import put

DRAFT = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 512,
}  # fmt: skip
MIXTURE = DRAFT | {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
LOAD = ["--dataset-name", "random", "--input-len", "24", "--output-len", "8"]
LOAD += ["--num-prompts", "3", "--max-concurrency", "2"]


@pytest.mark.parametrize("drafter", ["draft", "eagle3"])
@pytest.mark.parametrize("bits", [16, 8])
def test_a_mixture_is_served(
    drafter: str, bits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights are served with pinned routing, as they are profiled."""
    target, draft = tmp_path / "mixture.json", tmp_path / "draft.json"
    target.write_text(json.dumps(MIXTURE), encoding="utf-8")
    draft.write_text(json.dumps(DRAFT), encoding="utf-8")
    pair = f"{draft}:{target}" if drafter == "draft" else f"eagle3-{target}:{target}"
    fewer = ["--quantization", "fp8", "--kv-cache-dtype", "fp8"] if bits == 8 else []
    command = ["realrun", "--device", "cpu", "--pair", pair, "--num-speculative-tokens", "2", *LOAD, *fewer]
    pins, route = [], reference_ops.route

    def routed(logits: Tensor, taken: int, pinned: Pinned | None, *places: Any) -> tuple[Tensor, Tensor]:
        pins.append(pinned)
        return route(logits, taken, pinned, *places)

    monkeypatch.setattr(reference_ops, "route", routed)
    assert main([*command, "--json"]) == 0
    served = json.loads(capsys.readouterr().out)
    assert served["completed"] == 3
    assert served["total_output_tokens"] == 24
    assert served["pair"].endswith("-fp8") == (bits == 8)
    assert pins
    assert all(pins)


def test_a_checkpoint_is_quantised_when_it_is_loaded(tmp_path: Path) -> None:
    """Logits of 8-bit weights are near those of 16 bits and not the same, and the layers take about half the bytes."""
    import transformers

    config = transformers.Qwen3MoeConfig(**{k: v for k, v in MIXTURE.items() if k != "model_type"})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    arch = from_config(tmp_path)
    logits = []
    for of in (arch, replace(arch, spec=quantised(arch.spec))):
        model = Transformer.load(tmp_path, 64, CPU, torch.float32, of)
        sequences = Sequences(2, 64, CPU)
        put(sequences, 0, list(range(5, 25)), settled=True)
        ints = lambda *v: torch.tensor(v, dtype=torch.int32)  # noqa: E731
        batch = ForwardBatch(0, 0, 32, ints(), ints(0), ints(0), ints(0, 20), sequences.pages, sequences.scratch)
        logits.append(model.logits(model.forward(batch, model.new_cache(sequences.pool), sequences).stream)[:20])
    exact, eight = logits
    assert 0.001 < float((exact - eight).std() / exact.std()) < 0.2
