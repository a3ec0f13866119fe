"""Records come back as they were written, bit for bit, and in parts they mean what they mean whole."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from pdvsim.sim.config import Experiment, Traffic
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.records import DELIVERY_DTYPES, LAUNCH_DTYPES, Deliveries, PackedTable, packed, parts, unpacked
from pdvsim.sim.run import simulate

DTYPES = sorted({*DELIVERY_DTYPES.values(), *LAUNCH_DTYPES.values()})
COLUMNS = st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, array_shapes(max_dims=1, min_side=0)))


@given(column=COLUMNS, times=st.integers(1, 5))
def test_a_packed_column_comes_back_bit_for_bit(column: np.ndarray[Any, Any], times: int) -> None:
    """Whatever its bits: the least and the greatest number, -0.0, nan; with runs of equal ones and without."""
    column = np.repeat(column, times)
    same = unpacked(*packed(column))
    assert same.dtype == column.dtype
    assert same.tobytes() == column.tobytes()


@given(
    columns=st.lists(arrays("f8", array_shapes(max_dims=1)), min_size=1, max_size=4),
    held_bytes=st.sampled_from((0, 20, 1 << 25)),
)
def test_a_packed_table_is_its_parts_in_order(columns: list[np.ndarray[Any, Any]], held_bytes: int) -> None:
    """Whether they are held in memory, or all or the last of them on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdvsim.sim.records.HELD_BYTES", held_bytes)
        table = PackedTable()
        for column in columns:
            table.append({"a": column, "b": np.arange(len(column))})
    assert list(table) == ["a", "b"]
    assert table["a"].tobytes() == np.concatenate(columns).tobytes()
    assert [len(part["b"]) for part in parts(table)] == [len(column) for column in columns]
    with pytest.raises(ValueError, match="read-only"):
        table["a"][0] = 0  # it would be lost


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.tuples(st.integers(1, 33), st.integers(0, 4)), min_size=1))))
def test_deliveries_come_out_by_time_and_request(written: list[tuple[int, list[tuple[int, int]]]]) -> None:
    """However they were written: as one row, as a request's rounds, or as the round of several requests."""
    deliveries, rows = Deliveries(), []
    for at, (request, rounds) in enumerate(written):
        tokens, times_s = [one for one, _ in rounds], sorted(float(time) for _, time in rounds)
        if at % 3 == 0:
            deliveries.extend_one(request, bytes(tokens), 1, array("d", times_s))
            tokens[-1] -= 1
            rows += zip([request] * len(tokens), tokens, times_s, strict=True)
        elif at % 3 == 1:
            deliveries.extend([request] * len(tokens), tokens, times_s[0])
            rows += zip([request] * len(tokens), tokens, [times_s[0]] * len(tokens), strict=True)
        else:
            deliveries.append((request, tokens[0], times_s[0]))
            rows.append((request, tokens[0], times_s[0]))
    assert len(deliveries) == len(rows)
    columns = deliveries.drain()
    expected = sorted(rows, key=lambda row: (row[2], row[0]))
    assert list(zip(*(columns[name].tolist() for name in DELIVERY_DTYPES), strict=True)) == expected
    assert {name: column.dtype.str[1:] for name, column in columns.items()} == DELIVERY_DTYPES
    assert not len(deliveries)


def test_how_often_a_log_is_emptied_changes_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic("random", num_prompts=40, input_len=200, output_len=30, random_range_ratio=0.9, request_rate=40.0)
    for arch in ARCHS:
        monkeypatch.setattr("pdvsim.sim.records.REQUESTS", 4096)
        whole = simulate(Experiment(arch, traffic))
        monkeypatch.setattr("pdvsim.sim.records.REQUESTS", 1)
        cut = simulate(Experiment(arch, traffic))
        for name in ("requests", "deliveries", "launches"):
            table, same = getattr(whole, name), getattr(cut, name)
            assert all(table[column].tobytes() == same[column].tobytes() for column in table), (arch, name)
        assert len(list(parts(cut.deliveries))) > 30
        assert len(list(parts(whole.deliveries))) == 1
