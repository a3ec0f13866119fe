"""Cards: specifications that can be true, with sources; a user's own in TOML; bad ones refused in one line; names."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import one_line

from pdvsim.calibration.fit.build import save
from pdvsim.cli import main
from pdvsim.sim.config import Hardware, Server
from pdvsim.sim.models import names
from pdvsim.sim.models.presets import MODELS, PRESETS, model
from pdvsim.sim.models.specs import Pair
from pdvsim.sim.prices.cards import GPUS, card_file, gpu
from pdvsim.sim.prices.profile import builtin

CARD = """\
name = "my-card"
bandwidth_bytes_per_s = 1.8e12
flops_per_s = 210e12
memory_bytes = 34e9
source = "data sheet of 2025"
"""


@pytest.mark.parametrize("name", GPUS)
def test_a_card_is_a_plausible_one_with_a_source(name: str) -> None:
    card = GPUS[name]
    assert card.name == name
    assert len(card.source) > 20
    assert 3e11 <= card.bandwidth_bytes_per_s <= 1e13
    # what a multiprocessor multiplies a second, and flops a byte, hardly move between generations
    assert card.sms is not None
    assert 0.5e12 < card.flops_per_s / card.sms < 20e12
    assert 35 < card.flops_per_s / card.bandwidth_bytes_per_s < 500  # the H20's arithmetic is cut
    assert 20 * 2**30 < card.memory_bytes < 288.5 * 2**30  # 288 GB are the most that a card is sold with, AMD's in GiB


@pytest.mark.parametrize("name", GPUS)
def test_every_card_has_a_profile_that_says_what_it_is_founded_on(name: str) -> None:
    profile = builtin(name)
    labels = ("measured", "published kernels + transfer", "transferred")
    assert profile.foundation.startswith(labels)
    others = set(builtin("h200").models) - set(MODELS)  # heads and shards
    assert set(MODELS) <= set(profile.models) <= set(MODELS) | others
    if profile.foundation.startswith("measured"):
        assert not profile.uncertainty
    else:
        assert set(profile.uncertainty) == set(profile.models)
        assert all(0.05 < bar < 0.5 for bar in profile.uncertainty.values())
        assert profile.provenance["host"] == profile.provenance["contention"] == "h200-measured"


@pytest.mark.parametrize("name", [name for name, card in GPUS.items() if card.sister])
def test_a_card_is_no_faster_than_its_larger_sister(name: str) -> None:
    """They have the same chip, of which one was measured: the other is predicted from that, not from the H200."""
    card, sister = builtin(name), builtin(str(GPUS[name].sister))
    for spec in map(model, ("tinyllama-1.1b", "llama-3.1-8b", "codellama-34b", "qwen3-8b", "mixtral-8x7b")):
        mine, other = (profile.covering(Pair(spec, spec)).cost_model(spec) for profile in (card, sister))
        for rows in (1, 8, 64, 256):
            assert mine.price(rows).seconds(500 * rows) >= other.price(rows).seconds(500 * rows)
        for tokens in (64, 512, 1024, 4096):
            prompts = ((0, tokens),)
            assert mine.price(0, prompts=prompts).seconds_0 >= other.price(0, prompts=prompts).seconds_0


def test_five_lines_of_toml_are_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "card.toml"
    path.write_text(CARD)
    card = gpu(str(path))
    assert (card.name, card.measured, card.flops_per_s) == ("my-card", False, 210e12)
    small = ["--num-prompts", "8", "--output-len", "8", "--input-len", "16", "--json"]
    assert main(["run", "--engine", "pdvsim", "--gpu", str(path), *small]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["foundation"].startswith("transferred")
    assert document["output_throughput_low"] < document["output_throughput"] < document["output_throughput_high"]
    assert document["forward_error_bar"] > 0


@pytest.mark.parametrize(("old", "new", "says"), [
    ("source =", "sauce =", "sauce: unknown key"),
    ('source = "data sheet of 2025"\n', "", "source: Field required"),
    ("1.8e12", "nan", "bandwidth_bytes_per_s: must be"),
    ("210e12", '"fast"', "flops_per_s: Input should be a valid number"),
    ("34e9", "34", "memory_bytes: must be 1e+09"),
    ("my-card", "h200", "name: h200 is a built-in card"),
    ("name =", "name", "is not TOML"),
])  # fmt: skip
def test_a_bad_card_is_refused_in_one_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "card.toml"
    path.write_text(CARD.replace(old, new))
    with one_line(f"card {path}", says):
        card_file(path)


def test_a_profile_of_another_card_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    save(builtin("a100-80gb"), tmp_path / "p.json")
    argv = ["run", "--gpu", "l40s", "--profile", str(tmp_path / "p.json"), "--num-prompts", "4"]
    assert "is for a100-80gb, not for --gpu l40s" in refused(argv)


# names ---------------------------------------------------------------------------------------------------------------


def test_every_other_name_is_of_a_preset_and_of_one_only() -> None:
    assert set(names.CARDS) <= set(GPUS)
    assert set(names.MODELS) == set(PRESETS)
    for table, presets in ((names.CARDS, GPUS), (names.MODELS, PRESETS)):
        others = [name.lower() for mine in table.values() for name in mine]
        assert len(set(others)) == len(others)
        assert not set(others) & set(presets)


@pytest.mark.parametrize(("typed", "taken", "noted"), [
    ("h100", "h100-sxm", True),
    ("A100-80GB", "a100-80gb", False),
    ("rtx_4090", "rtx-4090", False),
    ("NVIDIA H100 80GB HBM3", "h100-sxm", True),  # as nvidia-smi says
    ("NVIDIA GeForce RTX 4090", "rtx-4090", True),
])  # fmt: skip
def test_cards(typed: str, taken: str, noted: bool) -> None:
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        assert Hardware(gpu=typed).gpu == taken
    assert [str(note.message) for note in notes] == [f"{typed} is read as {taken}"] * noted


@pytest.mark.parametrize(("typed", "taken"), [
    ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
    ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b"),
    ("unsloth/Qwen3-14B", "qwen3-14b"),  # a copy
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::pdvsim.sim.models.names.Note")
def test_models(typed: str, taken: str) -> None:
    assert model(typed) is PRESETS[taken]
    assert Server(pair=f"{typed}:{typed}").pair == f"{taken}:{taken}"
