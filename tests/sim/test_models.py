"""Models from the config.json files that Hugging Face publishes, and those that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdvsim.cli import main
from pdvsim.sim.config import Server
from pdvsim.sim.doubts import Doubt, vet
from pdvsim.sim.hardware.models import from_config, model_or_config, pair

PUBLISHED: dict[str, tuple[str, dict[str, Any], float]] = {  # sizes, and billions of parameters by the makers' account
    "mistral-7b-v0.3": ("Mistral", {"vocab_size": 32768, "sliding_window": None}, 7.25),
    "qwen2.5-3b": ("Qwen2", {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
        "tie_word_embeddings": True}, 3.09),
    "qwen3-8b": ("Qwen3", {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}, 8.2),
    "qwen3-0.6b": ("Qwen3", {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True}, 0.6),
    "phi-3-mini": ("Phi3", {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}, 3.82),
    "llama-3.2-3b": ("Llama", {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True}, 3.21),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    """Its parameters are those of transformers' own model, but for norms and biases, and those of its makers."""
    import torch
    import transformers

    family, sizes, billions = PUBLISHED[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    config.save_pretrained(tmp_path)
    found = model_or_config(str(tmp_path))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for p in theirs.parameters() if p.dim() > 1)
    assert found.params == matrices
    assert found.params / 1e9 == pytest.approx(billions, rel=0.01)
    assert found.kv_heads == config.num_key_value_heads
    assert pair(f"{tmp_path}:{tmp_path}").draft == found


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("Mixtral", "mixture of experts"),
        ("Qwen3Moe", "mixture of experts"),
        ("DeepseekV3", "compressed KV cache"),
        ("Gemma2", "alternate between a sliding window"),
        ("T5", "an encoder and a decoder"),
        ("GPT2", "no gate"),
        ("Mamba", "a state instead of a KV cache"),
    ],
)
def test_what_is_no_dense_decoder_is_refused_by_name(
    family: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")()
    config.save_pretrained(tmp_path)
    assert main(["run", "--pair", f"tinyllama-1.1b:{tmp_path}"]) == 2
    line = capsys.readouterr().err
    assert f"model family '{config.model_type}' is not supported: " in line
    assert why in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"kv_lora_rank": 512}, "compressed KV cache"),
        ({"model_type": "llava", "text_config": {}}, "text_config"),
        ({"model_type": "brand_new"}, "unknown family"),
    ],
)
def test_an_unknown_family_is_refused_for_what_it_has(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        from_config({"model_type": "llama", **more}, "m")


SHAPE = {
    "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, "fp8"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}, "torch_dtype": "bfloat16"}, "compressed-ten"),
        ({"quantization_config": ["fp8"]}, "quantization_config"),
        ({"compression_config": {"format": "float-quantized"}}, "compression_config"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"dtype": 8}, "dtype 8"),
    ],
)
def test_quantised_weights_are_refused(
    more: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would be served as 16-bit ones, which move twice as many bytes."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | more))
    assert main(["run", "--pair", f"llama-3.2-1b:{tmp_path}", "--num-prompts", "2"]) == 2
    line = capsys.readouterr().err
    assert "quantised weights (" in line
    assert named in line
    assert line.count("\n") == 1


def test_a_quantisation_in_a_file_of_its_own_is_refused(tmp_path: Path) -> None:
    """As NVIDIA publishes fp8 checkpoints: config.json alone says bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"torch_dtype": "bfloat16"}))
    assert model_or_config(str(tmp_path)).dtype_bytes == 2
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    for name in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ValueError, match=r"quantised weights \(modelopt\)"):
            model_or_config(str(name))


def test_a_sliding_window_that_matters_is_a_doubt(tmp_path: Path) -> None:
    from pdvsim.sim.config import Experiment

    shape = {"model_type": "mistral", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    shape |= {"intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000}
    path = tmp_path / "config.json"
    for window, longest, seen in ((4096, 32768, 4096), (None, 32768, None), (4096, 4096, None)):
        path.write_text(json.dumps({**shape, "sliding_window": window, "max_position_embeddings": longest}))
        assert model_or_config(str(path)).sliding_window == seen
    path.write_text(json.dumps({**shape, "sliding_window": 4096, "max_position_embeddings": 32768}))
    with pytest.warns(Doubt, match="attends to its last 4,096 tokens"):
        vet([Experiment(server=Server(pair=f"tinyllama-1.1b:{path}"))])
