"""Tables fit the terminal: what is folded loses no word, and what is left out is detail, and named."""

from __future__ import annotations

import re
import shlex

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pdvsim
from pdvsim.view.plots import sweep_table
from pdvsim.view.style import number_text
from pdvsim.view.table import DETAIL, TextTable, continued, fitted_table

WORDS = st.lists(st.text("abcdef=", min_size=1, max_size=9), min_size=1, max_size=9).map(" ".join)
FIGURES = st.floats(0, 9999).map(lambda value: f"{value:.2f} ±{value / 9:.2f}")


@pytest.fixture(scope="module")
def points() -> pd.DataFrame:
    small = {"dataset_name": "random", "input_len": 32, "output_len": 8, "num_prompts": 12}
    archs = ["autoregressive", "colocated", "pdv"]
    return pdvsim.sweep(arch=archs, request_rate=[8, 400], num_runs=2, goodput=["ttft:500"], jobs=1, **small)


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_a_narrow_terminal_keeps_the_tail_and_the_label(
    points: pd.DataFrame, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = sweep_table(points)
    lines = fitted_table(table.rows, table.spare)
    rule = next(at for at, line in enumerate(lines) if set(line) == {"-"})
    assert max(map(len, lines[:-1])) <= columns
    head = " ".join(" ".join(lines[:rule]).split())
    assert head.count("P99") == 2
    assert "stability" in head
    shown = " ".join(lines[rule + 1 :]).split()
    for row in table.rows:
        assert {row["arch"], *row["stability"].split()} <= set(shown)
        assert any(word.startswith(row["P99 TTFT ms"].split(".")[0]) for word in shown)
    assert f" {columns} columns: req/s" in lines[-1]


def test_brackets_that_are_left_out_are_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"arch": "pd", "tok/s": "5651.23 (±2.0%)", "ms": "3.21 (0 to 4.00)"}]
    table = TextTable(rows, (DETAIL,), ("error range in brackets: of real runs", "±: of seeds"))
    assert "in brackets" in str(table)
    monkeypatch.setenv("COLUMNS", "24")
    *_, left_out, note = str(table).splitlines()
    assert left_out.endswith(f" 24 columns: {DETAIL}")
    assert note == "±: of seeds"


def test_a_wide_terminal_has_everything(points: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    table = sweep_table(points)
    lines = fitted_table(table.rows, table.spare)
    assert len(lines) == 2 + len(table.rows)
    assert all(" ".join(row.values()).split() == line.split() for row, line in zip(table.rows, lines[2:], strict=True))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.fixed_dictionaries({"settings of it": WORDS, "out tok/s": FIGURES}), min_size=1, max_size=5))
def test_folding_loses_no_word(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, str]]) -> None:
    monkeypatch.setenv("COLUMNS", "45")
    lines = fitted_table(rows, ())
    rule = next(at for at, line in enumerate(lines) if set(line) == {"-"})
    assert len(lines[rule]) <= 45
    assert sorted(" ".join(lines[:rule]).split()) == sorted(["settings", "of", "it", "out", "tok/s"])
    shown = " ".join(lines[rule + 1 :]).split()
    assert sorted(shown) == sorted(word for row in rows for value in row.values() for word in value.split())


def test_detail_is_intervals_and_decimals_but_not_those_of_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    row = {"arch": "pd", "tok/s": "5651.23 ±12.10 (±2.0%)", "ms": "3.21 (0 to 4.00)", "gain %": "+2.31 ±0.20"}
    *_, line, left_out = fitted_table([row], (DETAIL,))
    assert line.split() == ["pd", "5651", "3.21", "+2.31", "±0.20"]
    assert left_out.endswith(f" 40 columns: {DETAIL}")


def test_a_table_on_a_page_is_whole_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    html = TextTable([{"who": "<b>", "ms": "5651.23 ±12.10"}], ("ms",), ["a <note>"]).html()
    assert '<td style="text-align:left">&lt;b&gt;</td>' in html
    assert "5651.23 ±12.10" in html
    assert "a &lt;note&gt;" in html


@pytest.mark.parametrize(
    ("value", "text"),
    [(1070.4, "1,070"), (99.96, "100"), (12.34, "12.3"), (0.0123, "0.0123"), (46043.2, "46,043"), (0, "0")],
)
def test_numbers_are_plain(value: float, text: str) -> None:
    assert number_text(value) == text


@given(words=st.lists(st.text("abc-{' ", min_size=1, max_size=30), min_size=1, max_size=20))
def test_a_long_command_is_continued_and_stays_the_same(words: list[str]) -> None:
    """As a shell joins its lines; only a flag or a word with its value that are too long alone exceed the width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "60")
        lines = continued(shlex.join(words)).split(" \\\n")
    assert shlex.split(" ".join(lines)) == words
    for line in lines:
        assert len(line) <= 60 - 2 or len(shlex.split(line)) <= 2 or len(lines) == 1


def test_headings_stand_above_the_first_of_their_rows_printed_and_on_a_page() -> None:
    rows = [{"arch": arch, "tok/s": str(n)} for n, arch in enumerate(("pd", "pdv", "pd"))]
    table = TextTable(rows, headings=("0.5 & less", "0.5 & less", "0.9"))
    assert [line.split()[0] for line in str(table).splitlines()] == ["arch", "-" * 11, "0.5", "pd", "pdv", "0.9", "pd"]
    cells = re.findall(r">([^<>]+)<", table.html())
    assert cells == ["arch", "tok/s", "0.5 &amp; less", "pd", "0", "pdv", "1", "0.9", "pd", "2"]


def test_a_run_says_which_service_levels_it_meets() -> None:
    load = {"arch": "pdv", "num_prompts": 40, "request_rate": 4}
    text = pdvsim.run(goodput=["ttft:500", "tpot:1.5"], **load).table()
    assert "misses ttft:500 tpot:1.5 (0.0% of the requests)" in " ".join(text.split())
    run = pdvsim.run(goodput=["p99_ttft:400"], **load)
    assert f"meets p99_ttft:400 ({run.metrics['p99_ttft_ms']:.1f} ms)" in " ".join(run.table().split())
