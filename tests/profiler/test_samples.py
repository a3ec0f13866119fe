"""Samples are loaded as they were written, and refused in one line when they cannot be what a card gave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small import SOFTWARE, part_header, recorded

import pdvsim.calibration
from pdvsim.profiler.samples import ARROW, HEADER, POINT, SAMPLES, Recorder, load

FLOATS = ("seconds", "start_s", "end_s")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    recorded(folder)
    return folder


def copied(shelf: Path, folder: Path) -> Path:
    for name in (SAMPLES, HEADER):
        (folder / name).write_bytes((shelf / name).read_bytes())
    return folder


def rewrite(folder: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    table = pq.ParquetFile(folder / SAMPLES).read()
    pq.write_table(change(table), folder / SAMPLES)


def reheader(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((folder / HEADER).read_text())
    change(data)
    (folder / HEADER).write_text(json.dumps(data))


def put(name: str, values: list[Any]) -> Callable[[pa.Table], pa.Table]:
    """`values` in the first rows of a column, of its own type."""

    def change(table: pa.Table) -> pa.Table:
        field = table.schema.field(name)
        plain = [*values, *table[name].to_pylist()[len(values) :]]
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        array = pa.array(plain, kind)
        array = array.dictionary_encode() if pa.types.is_dictionary(field.type) else array
        return table.set_column(table.column_names.index(name), name, array)

    return change


def test_samples_of_a_folder_are_continued(tmp_path: Path) -> None:
    """Of some of the shipped ones no row is lost or changed, and a part knows what it has."""
    source = Path(pdvsim.calibration.__file__).parent / "data" / "h200"
    shipped, recorder, names = load(source), Recorder(source), ("tinyllama-1.1b", "llama-2-7b")
    names = (*names, ":".join(names))
    recorder.folder, recorder.parts = tmp_path, {name: recorder.parts[name] for name in names}
    recorder.save()
    again = load(tmp_path)
    assert [part.name for part in again.header.parts] == sorted(names)
    assert all(part in shipped.header.parts for part in again.header.parts)
    pair, model = (shipped.frame[name].astype(str) for name in ("pair", "model"))
    rows = shipped.frame[(pair == names[2]) | ((pair == "") & model.isin(names))]
    order = ["model", "pair", "section", "group", "member", "start_s", "repeat", "seconds", "kind", "context_total"]
    before, after = (one.astype(dict.fromkeys(order[:3], str)).sort_values(order) for one in (rows, again.frame))
    for name in ("seconds", "power_w", "context_total", "rows", "chunk_tokens", "priority"):
        assert np.array_equal(before[name], after[name], equal_nan=True), name
    shared = recorder.parts["llama-2-7b"].header
    ground = {"device": shared.device, "software": shared.software}
    part = Recorder(tmp_path).part(part_header("llama-2-7b", **ground))
    assert len(part.done("solo", *POINT)) > 150


def scaled(factor: float, what: str | None = None) -> Callable[[pa.Table], pa.Table]:
    """Times in another unit: of the device, or of one of the host's."""

    def change(table: pa.Table) -> pa.Table:
        chosen = [(w == what) if what else w == "gpu" for w in table["what"].to_pylist()]
        for name in FLOATS:
            values = [
                v * factor if c and v is not None else v for v, c in zip(table[name].to_pylist(), chosen, strict=True)
            ]
            table = table.set_column(table.column_names.index(name), name, pa.array(values, pa.float32()))
        return table

    return change


def check_refused(folder: Path, file: str, field: str) -> None:
    """In one line that names the field."""
    with pytest.raises(ValueError, match="samples") as refusal:
        load(folder)
    assert str(refusal.value).startswith(f"samples {folder / file}: {field}")
    assert "\n" not in str(refusal.value)


def test_loads_what_was_measured(tmp_path: Path) -> None:
    parts, samples = recorded(tmp_path), load(tmp_path)
    for name in ARROW:
        expected = pd.Series([value for _, part in sorted(parts.items()) for value in part.table()[name].to_pandas()])
        got = pd.Series(samples.frame[name].tolist())
        pd.testing.assert_series_equal(got, expected, check_dtype=False, check_names=False)
    assert samples.header.specs()["llama-2-7b"].layers == 32
    assert [part.points for part in samples.header.parts] == [3, 4]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda t: t.drop_columns(["rows"]), "rows: column is missing"),
        (lambda t: t.set_column(list(ARROW).index("rows"), "rows", t["rows"].cast(pa.int64())), "rows: is int64"),
        (lambda t: t.slice(0, 5), "samples: has 5 rows"),
        (put("seconds", [float("nan")]), "seconds: is empty in row 0"),
        (put("seconds", [-0.001]), "seconds: -0.001"),
        (put("seconds", [4000.0]), "seconds: 4000"),
        (put("kind", ["verifi"]), "kind: unknown value 'verifi'"),
        (put("model", [None]), "model: is empty in row 0"),
        (put("steps", [0]), "steps: is 0"),
        (put("bucket_rows", [2]), "bucket_rows: is smaller than rows"),
        (lambda t: put("start_s", [0.5] * len(t))(t), "end_s: is not start_s"),
        (scaled(1e3), "seconds: "),
        (scaled(1e-3), "seconds: "),
        (scaled(1e3, "launch_idle"), "seconds: launch_idle"),
    ],
)
def test_broken_samples_are_refused(
    shelf: Path, tmp_path: Path, change: Callable[[pa.Table], pa.Table], field: str
) -> None:
    rewrite(copied(shelf, tmp_path), change)
    check_refused(tmp_path, SAMPLES, field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda h: h.update(schema_version=3), "schema_version: is 3, this version reads 2"),
        (lambda h: h.pop("device"), "device: Field required"),
        (lambda h: h["device"].update(bandwidth_bytes_per_s=4.27), "device.bandwidth_bytes_per_s: "),
        (lambda h: h["parts"][0].update(colour="red"), "parts.0.colour: "),
        (lambda h: h["parts"][0]["models"]["llama-2-7b"].pop("layers"), "layers: "),
    ],
)
def test_broken_headers_are_refused(
    shelf: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], field: str
) -> None:
    reheader(copied(shelf, tmp_path), change)
    check_refused(tmp_path, HEADER, field)


def test_a_kill_between_two_files_loses_nothing(shelf: Path, tmp_path: Path) -> None:
    """The rows are continued with their own header, whatever the file of the other says."""
    copied(shelf, tmp_path)
    (tmp_path / HEADER).unlink()
    recorder = Recorder(tmp_path)
    recorder.save()
    assert load(tmp_path).header == load(shelf).header


def test_samples_of_different_ground_do_not_mix(shelf: Path) -> None:
    with pytest.raises(ValueError, match=r"software\.torch was 2\.11, is now 2\.12; choose another folder"):
        Recorder(shelf).part(part_header("gemma-2b", software=SOFTWARE | {"torch": "2.12"}))
