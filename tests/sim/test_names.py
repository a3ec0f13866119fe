"""Names that people type: what they mean, the note about it, and the error for unknown names."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from pdvsim.cli import main
from pdvsim.sim.config import Hardware, Server
from pdvsim.sim.hardware import names
from pdvsim.sim.hardware.cards import GPUS
from pdvsim.sim.hardware.models import PRESETS, model


def test_every_other_name_is_of_a_preset_and_of_one_only() -> None:
    assert set(names.CARDS) <= set(GPUS)
    assert set(names.MODELS) == set(PRESETS)
    for table, presets in ((names.CARDS, GPUS), (names.MODELS, PRESETS)):
        others = [name.lower() for mine in table.values() for name in mine]
        assert len(set(others)) == len(others)
        assert not set(others) & set(presets)


@pytest.mark.parametrize(("typed", "taken", "noted"), [
    ("h100", "h100-sxm", True),
    ("H100", "h100-sxm", True),
    ("a100", "a100-80gb", True),
    ("A100-80GB", "a100-80gb", False),
    ("rtx_4090", "rtx-4090", False),
    ("NVIDIA H100 80GB HBM3", "h100-sxm", True),  # as nvidia-smi says
    ("NVIDIA A100-SXM4-40GB", "a100-40gb", True),
    ("NVIDIA GeForce RTX 4090", "rtx-4090", True),
])  # fmt: skip
def test_cards(typed: str, taken: str, noted: bool) -> None:
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        assert Hardware(gpu=typed).gpu == taken
    assert [str(note.message) for note in notes] == [f"{typed} is read as {taken}"] * noted


@pytest.mark.parametrize(("typed", "taken"), [
    ("Llama-3.1-8B", "llama-3.1-8b"),
    ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ("Qwen/Qwen2-7B", "qwen2-7b"),
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
    ("google/gemma-2b-it", "gemma-2b"),
    ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b"),
    ("Qwen/Qwen3-14B", "qwen3-14b"),
    ("unsloth/Qwen3-14B", "qwen3-14b"),  # a copy
    ("google/gemma-3-27b-it", "gemma-3-27b"),
    ("microsoft/phi-4", "phi-4"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::pdvsim.sim.hardware.names.Note")
def test_models(typed: str, taken: str) -> None:
    assert model(typed) is PRESETS[taken]
    assert Server(pair=f"{typed}:{typed}").pair == f"{taken}:{taken}"


def test_a_folder_of_that_name_comes_before_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Qwen" / "Qwen2-7B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert Server(pair="qwen2-1.5b:Qwen/Qwen2-7B").pair == "qwen2-1.5b:Qwen/Qwen2-7B"


def test_the_command_says_what_it_took_once_and_prints_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--pair", "meta-llama/Llama-3.2-1B:meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100", "--no-band"]
    assert main(["run", *argv, "--num-prompts", "2"]) == 0
    out, err = capsys.readouterr()
    assert "llama-3.2-1b:llama-3.1-8b" in out
    for line in ("meta-llama/Llama-3.2-1B is read as llama-3.2-1b", "h100 is read as h100-sxm"):
        assert err.count(line) == 1
