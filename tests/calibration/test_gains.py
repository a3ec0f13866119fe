"""What the samples say of works side by side, on samples made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pdvsim.calibration.fit.corun import SHAPE
from pdvsim.calibration.overlap import WORK, carried, main, side_by_side
from pdvsim.sim.hardware.profile import builtin

COOL = replace(builtin("h200"), power=None)


def work(kind: str, seconds: float, **more: object) -> dict[str, object]:
    """A sample; whatever is not given is the same for all."""
    blank: dict[str, object] = dict.fromkeys([*WORK, *SHAPE, "priority", "context_total"], 0)
    blank |= {"model": "tinyllama-1.1b", "pair": "a:b", "what": "gpu", "group": 0, "steps": 1, "bucket_rows": 1}
    return blank | {"section": "solo", "members": 1, "member": 0, "kind": kind, "seconds": seconds} | more


def test_two_works_that_each_take_twice_as_long_gain_nothing() -> None:
    alone = [work(kind, seconds, section="corun") for kind, seconds in (("draft", 1.0), ("verify", 3.0))]

    def together(slower: float) -> pd.DataFrame:
        """Both again and again for 12 s, each so many times slower than alone."""
        rows = [
            work(kind, s, section="corun", members=2, member=i, group=1, start_s=at, end_s=at + s)
            for i, (kind, s) in enumerate([("draft", slower), ("verify", 3 * slower)])
            for at in np.arange(0, 12, s)
        ]
        return side_by_side(pd.DataFrame([*alone, *rows]), COOL)

    assert together(2.0).to_dict("records") == [{"works": "draft + verify", "share": pytest.approx(1.0)}]
    assert together(1.0)["share"].tolist() == pytest.approx([0.5])  # as if alone: half the time


def test_a_carried_chunk_is_set_against_both_on_their_own() -> None:
    samples = [
        work("verify", 2.0, rows=8, tokens=5, context=512),
        work("prefill", 1.0, chunk_tokens=256, chunks=1),
        work("mixed", 2.4, rows=8, tokens=5, context=512, chunk_tokens=256, chunks=1),
    ]
    assert carried(pd.DataFrame(samples))["share"].tolist() == pytest.approx([0.8])


def test_the_shipped_samples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    table = capsys.readouterr().out.splitlines()[2:]
    medians = {line[: line.index("  ")]: float(line.split()[-2]) for line in table}
    assert "verify carries a chunk" in medians
    for works in ("draft + prefill", "prefill + verify"):
        assert medians[f"{works}, with room"] < medians[works] - 0.05
