"""Progress says how far a search is, and at its end how much it took."""

from __future__ import annotations

import re
import time

import pytest

from pdvsim.common.progress import Progress


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [re.sub(r"\d+ s\b", "N s", line) for line in capsys.readouterr().err.splitlines()]


def test_the_last_line_of_a_search_is_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1500, "simulations", after_s=0, bound="at most") as progress:
        time.sleep(2.05)  # a line comes from the second second on, where there is no terminal
        progress.update(100)
        progress.update(208)
    assert lines(capsys) == [
        "pdvsim: 100 of at most 1500 simulations after N s, at most N s left", "pdvsim: 208 simulations in N s",
    ]  # fmt: skip


def test_the_time_left_is_in_proportion(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(40, "runs", after_s=0) as progress:
        time.sleep(2.05)
        progress.update(10)
    took, left = map(int, re.findall(r"(\d+) s\b", capsys.readouterr().err.splitlines()[0]))
    assert left == pytest.approx(3 * took, abs=3)


def test_what_was_too_short_to_show_has_no_end_either(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, "runs") as progress:
        progress.update(10)
    assert lines(capsys) == []


def test_what_failed_did_not_end(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with Progress(10, "runs", after_s=0) as progress:
            time.sleep(2.05)
            progress.update(3)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert lines(capsys) == ["pdvsim: 3 of 10 runs after N s, about N s left"]
