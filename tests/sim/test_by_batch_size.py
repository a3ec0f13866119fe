"""A table of draft lengths by batch size in service, as vLLM applies it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pdvsim.sim.config import Acceptance, Experiment, Server, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.policies.controllers import ByBatchSize
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate


def served(concurrency: int = 6, tiers: str = "", prompt: int = 60, **server: Any) -> Experiment:
    traffic = Traffic(
        "random", num_prompts=5 * concurrency, input_len=prompt, output_len=60, max_concurrency=concurrency,
        random_range_ratio=0.5,
    )  # fmt: skip
    table = {"controller": "table", "num_speculative_tokens_per_batch_size": tuple(tiers.split())} if tiers else {}
    return Experiment("colocated", traffic, Acceptance(acceptance_rate=0.7), Server(**table | server))


def equal(one: Result, other: Result) -> None:
    for table in ("requests", "launches", "deliveries"):
        for name, column in getattr(one, table).items():
            np.testing.assert_array_equal(column, getattr(other, table)[name], f"{table}.{name}")


def widths(result: Result) -> set[int]:
    """New tokens per row of the target's forwards with rows."""
    launches = result.launches
    return {*launches["width"][(launches["role"] == 1) & (launches["rows"] > 0)].tolist()}


def test_a_table_of_one_length_is_a_fixed_length() -> None:
    equal(simulate(served(tiers="1:3")), simulate(served(num_speculative_tokens=3)))


def test_at_0_the_drafter_still_runs() -> None:
    """One forward of the drafter and one of the target in each step, and no draft is verified."""
    table = simulate(served(tiers="1:0"))
    assert widths(table) == {1}
    kinds = table.launches["kind"].tolist()
    assert kinds.count(KINDS.index("draft")) == kinds.count(KINDS.index("verify")) + kinds.count(KINDS.index("decode"))
    assert table.requests["drafted"].sum() == 0


def test_a_batch_counts_prefills() -> None:
    """Prompts of several chunks count in every step that carries one: drafts are shorter than the rows allow."""
    tiers = "1:4 4:1"
    alone = simulate(served(3, tiers, prompt=40))
    assert widths(alone) == {5}, "three requests never reach the second tier"
    crowded = replace(served(4, tiers, prompt=900), server=replace(served(4, tiers).server, max_num_batched_tokens=64))
    launches = simulate(crowded).launches
    with_rows = (launches["role"] == 1) & (launches["rows"] > 0)
    short = with_rows & (launches["width"] == 2)
    assert launches["rows"][short].min() < 4, "fewer rows than the border, and a prefill besides"


def test_the_length_is_looked_up_in_every_step() -> None:
    controller = ByBatchSize(served(tiers="1:4 5:2 9:0").server)
    looked_up = []
    for controller.scheduled in (1, 4, 5, 8, 9, 20, 8, 4):
        drafted = controller.draft_length(Batch(), 0, 0.0)
        looked_up.append((drafted, controller.k, controller.selects))
    assert looked_up == [
        (4, 4, False), (4, 4, False), (2, 2, False), (2, 2, False), (1, 0, True), (1, 0, True), (2, 2, False),
        (4, 4, False),
    ]  # fmt: skip


def test_a_jump_to_0_costs_far_more_than_one_to_the_next_length() -> None:
    """Issue 49548: at the border throughput falls below that of both a longer draft and plain decoding."""

    def speed(**server: Any) -> float:
        result = simulate(served(24, **server))
        return float(result.requests["output_tokens"].sum() / result.requests["finish_s"].max())

    longer, shorter, plain = (speed(num_speculative_tokens=k) for k in (2, 1, 0))
    assert speed(tiers="1:2 23:1") > 0.97 * max(longer, shorter)
    assert speed(tiers="1:2 23:0") < 0.95 * min(longer, plain)
