"""Systems that draft on cards of their own: their settings can be run, and come out as the report says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pdvsim.cli import main
from pdvsim.published.overlap import OverlapCell, ShardedPair, minedraft, nano_pearl, overlap_text, saguaro, shipped
from pdvsim.sim.hardware.models import pair as named_pair


def test_models_that_are_no_presets_have_their_published_sizes() -> None:
    """32.8 and 0.6 billion parameters (the tied embedding counts once)."""
    models = named_pair(f"{shipped('qwen3-0.6b')}:{shipped('qwen3-32b')}")
    assert models.target.params == pytest.approx(32.8e9, rel=0.005)
    assert models.draft.params == pytest.approx(0.6e9, rel=0.02)


def test_a_target_that_is_faster_decodes_faster_by_that() -> None:
    """But for the host's part of a step."""
    ours = ShardedPair("llama-3.2-1b:llama-3.1-70b", "h200", 2, 20, 20)
    twice = replace(ours, faster=2.0)
    assert 1.9 < twice.plain(1) / ours.plain(1) <= 2.0


def test_nano_pearl_at_batch_1_follows() -> None:
    """Fitted on their plain decoding alone; a larger batch gains less, there and here."""
    source = nano_pearl(lengths=(14,), batches=(1, 32))
    first, last = source.cells
    assert first.verdict == "follows"
    assert last.most < first.most
    assert last.published is not None
    assert last.most == pytest.approx(last.published, rel=0.3)


def test_what_they_reach_is_not_exceeded() -> None:
    """Their figures are the best of all that they ran."""
    for source in (saguaro(rates=(0.8,)), minedraft(rates=(0.9,), lengths=(5,))):
        for cell in source.cells:
            assert cell.published is None or 1.0 < cell.most <= 1.1 * cell.published
        assert source.title in overlap_text([source])


def test_as_many_requests_in_one_batch_would_do_better_than_two_that_take_turns() -> None:
    """The weights are read once: what two batches gain is over half as many requests."""
    half, whole = minedraft(rates=(0.7,), lengths=(3,)).cells
    assert half.most > 1 > whole.most


def test_verdicts() -> None:
    assert OverlapCell("", 2.0, True, 1.0, 1.9).verdict == "reaches it"
    assert OverlapCell("", 2.0, True, 1.0, 1.5).verdict == "at most 1.50x"
    assert OverlapCell("", 2.0, False, 2.1, 2.1).verdict == "follows"
    assert OverlapCell("", 2.0, False, 1.5, 1.5).verdict == "-25%"
    assert OverlapCell("", None, False, 1.5, 1.5).verdict == ""


def test_the_command_prints_all_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "overlap", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [len(source["cells"]) for source in document["sources"]] == [4, 2, 2]
