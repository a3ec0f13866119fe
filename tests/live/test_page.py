"""The live page in a real browser: it opens, follows its controls, and belongs to the user who started it."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from liveserver import ARCHS, Served, ended, served

from pdvsim.cli import main

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATIENCE_MS = 120_000  # with a browser on a busy machine
QUIET = ("log", "info")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--speed", "10", "--request-rate", "4", "--max-num-seqs", "8", "--goodput", "ttft:300", "tpot:30")
    running = served(tmp_path_factory.mktemp("live"), *options)
    yield running
    assert ended(running) == "pdvsim: live ended\n"
    assert running.process.returncode == 0


def opened(browser: Browser, url: str, width: int = 1280) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 3000})
    page.set_default_timeout(PATIENCE_MS)
    page.complaints = []  # type: ignore[attr-defined]
    page.on("console", lambda m: page.complaints.append(m.text) if m.type not in QUIET else None)  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: page.complaints.append(str(error)))  # type: ignore[attr-defined]
    page.goto(url)
    page.wait_for_function("() => document.getElementById('table')?.innerHTML.includes('TTFT')")
    return page


@pytest.fixture(scope="module")
def page(browser: Browser, live: Served) -> Page:
    shown = opened(browser, live.url)
    for group in ("batches", "rates"):  # whose rows the tests read
        shown.locator(f"[data-group={group}]").dispatch_event("pointerdown")
    return shown


def text(page: Page, name: str) -> str:
    return page.locator(f"#{name}").inner_html()


def now_s(page: Page) -> float:
    return float(re.findall(r"<b>([\d.]+) s</b>", text(page, "status"))[0])


def figures(page: Page, name: str) -> list[float]:
    """A line of the table."""
    [line] = re.findall(rf"<tr[^>]*><td[^>]*>{re.escape(name)}</td>(.*?)</tr>", text(page, "table"))
    cells = [re.sub(r"<small.*?</small>|<[^>]+>", "", cell) for cell in re.findall(r"<td.*?</td>", line)]
    return [float(cell) if cell.strip() != "–" else float("nan") for cell in cells]


def until(page: Page, holds: Any) -> None:
    """Wait for something to be so, as long as it takes on a busy machine."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while not holds():
        assert time.monotonic() < end
        page.wait_for_timeout(50)


def press(page: Page, label: str) -> None:
    page.get_by_role("button", name=label, exact=True).click()


def pause(page: Page) -> None:
    """Press until it is so: a click is lost where the page replaces the button under it."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while "paused" not in text(page, "status"):
        assert time.monotonic() < end
        if (button := page.get_by_role("button", name="Pause", exact=True)).count():
            button.click()
        for _ in range(30):
            if "paused" not in text(page, "status"):
                page.wait_for_timeout(100)


def slide(page: Page, name: str, key: str, times: int) -> None:
    """Move a slider with the keys, as a person may."""
    page.locator(f"#{name}").focus()
    for _ in range(times):
        page.keyboard.press(key)


def value(page: Page, name: str) -> Any:
    shown = page.locator(f"#{name}").input_value()
    return float(shown) if re.fullmatch(r"[\d.]+", shown) else shown


def test_it_opens_without_complaint_and_goes_on(page: Page) -> None:
    page.get_by_label("Window").select_option("10 s")
    until(page, lambda: "the last 10 s" in text(page, "status"))
    began_s = now_s(page)
    until(page, lambda: now_s(page) > began_s + 5)
    until(page, lambda: figures(page, "Output token throughput (tok/s)")[0] > 0)
    assert page.locator("svg.plot").count() >= 8
    assert page.complaints == []  # type: ignore[attr-defined]
    for arch in ARCHS:
        assert f">{arch}</th>" in text(page, "table")


def test_pausing_pauses_and_a_second_is_a_second(page: Page) -> None:
    pause(page)
    stood_s = now_s(page)
    page.wait_for_timeout(600)
    assert now_s(page) == stood_s
    press(page, "Advance 1 s")
    until(page, lambda: now_s(page) != stood_s)
    assert now_s(page) == pytest.approx(stood_s + 1.0, abs=0.11)  # shown to a tenth
    press(page, "Continue")
    until(page, lambda: now_s(page) > stood_s + 2)


def test_groups_of_the_table_unfold_and_stay_so(page: Page) -> None:
    shown = page.locator("#table tr:visible")
    assert shown.count() < 30
    assert not page.get_by_text("P95 ITL (ms)").is_visible()
    page.locator("[data-group=latencies]").dispatch_event("pointerdown")
    page.get_by_text("P95 ITL (ms)").wait_for()
    began_s = now_s(page)
    until(page, lambda: now_s(page) > began_s + 5)  # through updates, each of which replaces the table
    assert page.get_by_text("P95 ITL (ms)").is_visible()
    page.locator("[data-group=latencies]").dispatch_event("pointerdown")
    page.get_by_text("P95 ITL (ms)").wait_for(state="hidden")


def test_levels_are_drawn_and_a_constant_line_is_not(page: Page) -> None:
    titles = page.locator("section:visible h2").all_text_contents()
    assert {"TTFT: share of requests", "Drafts accepted (%)"} <= set(titles)
    assert "Draft length" not in titles  # fixed
    assert page.locator("svg text", has_text="service level").count() == 2  # ttft:300 and tpot:30


def test_a_burst_shows_up_in_the_queues(page: Page) -> None:
    pause(page)
    before = figures(page, "Requests in the system")
    press(page, "Burst of 50")
    press(page, "Advance 1 s")
    until(page, lambda: min(figures(page, "Requests in the system")) > max(before) + 20)
    for lane, at in (("Main", 1), ("Prefill", 0)):  # eight are served concurrently
        until(page, lambda lane=lane, at=at: figures(page, f"{lane} lane: queue now (requests)")[at] > 10)
    press(page, "Continue")


def test_a_slider_changes_the_load_for_two_browsers(browser: Browser, page: Page, live: Served) -> None:
    """In force as the other browser shows: a telephone."""
    other, rate = opened(browser, live.url, 400), value(page, "request_rate")
    slide(page, "request_rate", "ArrowRight", 1)
    until(other, lambda: value(other, "request_rate") == pytest.approx(rate + 0.5))
    slide(page, "request_rate", "ArrowLeft", 1)
    until(other, lambda: value(other, "request_rate") == pytest.approx(rate))
    slide(page, "request_rate", "PageUp", 2)  # five steps each
    until(other, lambda: value(other, "request_rate") > rate + 3)
    came_s, more = now_s(page), value(page, "request_rate")
    until(page, lambda: now_s(page) > came_s + 10 and figures(page, "Request arrivals (req/s)")[0] > 0.7 * more)
    slide(other, "acceptance_rate", "ArrowLeft", 2)
    until(page, lambda: value(page, "acceptance_rate") == pytest.approx(0.5))
    assert other.evaluate("() => document.documentElement.scrollWidth") <= 400
    other.wait_for_function("() => [...document.querySelectorAll('svg.plot')].every(v => v.clientWidth > 250)")
    assert page.complaints == other.complaints == []  # type: ignore[attr-defined]
    seen_s = now_s(page)
    other.close()  # stops nothing
    until(page, lambda: now_s(page) > seen_s + 3)


def test_an_impossible_setting_is_refused_with_a_message(page: Page) -> None:
    page.evaluate("() => document.getElementById('input_len').append(new Option('9000000'))")
    page.locator("#input_len").select_option("9000000")
    until(page, lambda: "tokens" in text(page, "status") and "refused" in text(page, "status"))
    until(page, lambda: value(page, "input_len") == "data set's")
    page.wait_for_timeout(2000)  # the control that was set back gives no order, which would clear the message
    assert "refused" in text(page, "status")


def test_a_session_is_saved_as_an_ordinary_result(page: Page, live: Served) -> None:
    pause(page)
    press(page, "Restart")
    until(page, lambda: now_s(page) == 0.0)
    for label in ("Advance 1 s", "Advance 1 s", "Burst of 50", "Advance 1 s"):
        press(page, label)
    until(page, lambda: now_s(page) == 3.0)
    press(page, "Save")
    until(page, lambda: "saved" in page.inner_text("#saved pre"))
    command = page.inner_text("#saved pre")
    assert "a burst of requests" in command
    [folder] = (live.folder / "results").iterdir()
    for arch in ARCHS:
        document = json.loads((folder / f"{arch}.json").read_text())
        assert document["arch"] == arch
        assert document["completed"] > 50
    assert main(["sweep", "--check", str(folder / "pdv.json")]) == 0
    assert "report" in (folder / "report.html").read_text()


def test_without_the_extra_it_says_so(monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    for name in [name for name in sys.modules if name.startswith("pdvsim.live.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tornado.httpserver", None)
    assert "'pdvsim[live]'" in refused(["live", "--no-browser"])
