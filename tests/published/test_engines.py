"""Published figures of engines: two of each source are fitted and given back, the others are predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdvsim.cli import main
from pdvsim.published.engines import WITHIN, forward_ms, reproduce_engines


def test_at_most_two_figures_are_fitted_and_given_back() -> None:
    for source in reproduce_engines().sources:
        fitted = [cell for cell in source.cells if cell.fitted]
        assert len(fitted) <= 2
        assert source.predicted
        for cell in fitted:
            assert cell.ours == pytest.approx(cell.published, rel=1e-6)


def test_a_reason_is_given_where_a_figure_does_not_follow_and_only_there() -> None:
    for source in reproduce_engines().sources:
        far = [cell.what for cell in source.predicted if not 0.9 <= cell.ours / cell.published <= 1.1]
        assert bool(far) == bool(source.why), (source.title, far)
        assert far == [cell.what for cell in source.predicted if not cell.follows]


def test_draft_lengths_at_batch_1_follow() -> None:
    """A straight line in the draft length, through two of them, meets the others; as the issue's own figures do."""
    for source in reproduce_engines().sources:
        lengths = [cell for cell in source.predicted if cell.what.startswith("k=")]
        assert all(abs(cell.error) < 0.05 for cell in lengths)


def sharded() -> dict[str, float]:
    """Errors of the predicted speed-ups of Llama-3-70B over four H100s, with tokens per round from batch 1."""
    sources = [source for source in reproduce_engines().sources if "four GPUs" in source.title]
    assert [len(source.predicted) for source in sources] == [3, 3]
    return {f"{source.title.split()[-1]}, {cell.what}": cell.error for source in sources for cell in source.predicted}


def test_speed_ups_of_a_sharded_target_follow_over_batch_size() -> None:
    errors = sharded()
    del errors["gsm8k, batch 64"]
    assert {what: error for what, error in errors.items() if abs(error) >= 0.05} == {}


@pytest.mark.xfail(reason="aim: 5%; 8.0% too high", strict=True, raises=AssertionError)
def test_the_speed_up_of_a_sharded_target_follows_on_gsm8k_at_64() -> None:
    assert abs(sharded()["gsm8k, batch 64"]) < 0.05


def over_several_gpus() -> dict[str, float]:
    """Errors of plain decoding in gpt-fast; nothing is fitted."""
    source = next(source for source in reproduce_engines().sources if source.title.startswith("gpt-fast"))
    return {cell.what: cell.error for cell in source.cells}


def test_plain_decoding_over_several_gpus_follows_but_where_nccl_decides() -> None:
    """All-reduces by NCCL, which is not what is modelled, weigh most for small models and many GPUs."""
    errors = over_several_gpus()
    for name in ("llama-2-70b", "llama-2-7b", "llama-3.1-8b"):
        assert abs(errors[f"{name}, 2 GPUs"]) < 0.05
    for name in ("llama-2-70b", "llama-3.1-70b"):
        assert abs(errors[f"{name}, 4 GPUs"]) < 0.05
    for small, large in (("llama-2-7b", "llama-2-70b"), ("llama-3.1-8b", "llama-3.1-70b")):
        assert errors[f"{small}, 8 GPUs"] > max(0.2, errors[f"{large}, 8 GPUs"])


@pytest.mark.xfail(reason="aim: 9 of 12 within 10%; 6 are", strict=True, raises=AssertionError)
def test_nine_of_twelve_over_several_gpus_follow() -> None:
    assert sum(abs(error) <= WITHIN for error in over_several_gpus().values()) >= 9


@pytest.mark.xfail(reason="aim: 5%; 7.2% too fast", strict=True, raises=AssertionError)
def test_llama_2_70b_over_eight_gpus_follows() -> None:
    assert abs(over_several_gpus()["llama-2-70b, 8 GPUs"]) < 0.05


def test_a_forward_is_the_profiles() -> None:
    assert forward_ms("h200", 64, 3, 500) > forward_ms("h200", 64, 0, 500) > forward_ms("h200", 1, 0, 500) > 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "engines", "-o", str(tmp_path / "out")]) == 0
    assert "figures that were not fitted follow within 10%" in capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "engines.json").read_text(encoding="utf-8"))
    assert sum(len(source["cells"]) for source in document["sources"]) == 57
    assert main(["reproduce", "engines", "--fair"]) == 2
