"""What the samples say of works side by side, on samples made by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from pdvsim.calibration.overlap import WORK, carried, main, side_by_side


def work(kind: str, seconds: float, **more: object) -> dict[str, object]:
    """A sample; whatever is not given is the same for all."""
    blank: dict[str, object] = dict.fromkeys(WORK, 0) | {"model": "m", "pair": "a:b", "what": "gpu", "group": 0}
    return blank | {"section": "solo", "members": 1, "member": 0, "kind": kind, "seconds": seconds} | more


def test_two_works_that_each_take_twice_as_long_gain_nothing() -> None:
    alone = [work(kind, seconds, section="corun") for kind, seconds in (("draft", 1.0), ("verify", 3.0))]
    together = [
        work(kind, seconds, section="corun", members=2, member=i, group=1)
        for i, (kind, seconds) in enumerate([("draft", 2.0), ("verify", 6.0)])
    ]
    found = side_by_side(pd.DataFrame([*alone, *together]))
    assert found.to_dict("records") == [{"works": "draft + verify", "share": pytest.approx(1.0)}]
    together[0]["seconds"], together[1]["seconds"] = 1.0, 3.0  # as if alone: half the time
    assert side_by_side(pd.DataFrame([*alone, *together]))["share"].tolist() == pytest.approx([0.5])


def test_a_carried_chunk_is_set_against_both_on_their_own() -> None:
    samples = [
        work("verify", 2.0, rows=8, tokens=5, context=512),
        work("prefill", 1.0, chunk_tokens=256, chunks=1),
        work("mixed", 2.4, rows=8, tokens=5, context=512, chunk_tokens=256, chunks=1),
    ]
    assert carried(pd.DataFrame(samples))["share"].tolist() == pytest.approx([0.8])


def test_the_shipped_samples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "verify carries a chunk" in capsys.readouterr().out
