"""The live page in a real browser: it opens, follows its controls, and belongs to whoever started it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import websocket_connect

from pdvsim.cli import main

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATIENCE_MS = 60_000  # with a browser on a busy machine
ARCHS = ("pdv", "colocated")
QUIET = ("log", "info")


@dataclass
class Served:
    """A `pdvsim live` under way."""

    process: subprocess.Popen[str]
    url: str
    folder: Path


def served(folder: Path, *more: str) -> Served:
    argv = ["-m", "pdvsim.cli", "live", "--arch", ",".join(ARCHS), "--port", "0", "--no-browser", *more]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, *argv], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"live at (\S+)", line)
    assert found, line + process.stderr.read()
    return Served(process, found[1], folder)


def ended(found: Served) -> str:
    """After Ctrl-C: what it says."""
    found.process.send_signal(signal.SIGINT)
    try:
        return found.process.communicate(timeout=60)[1]
    finally:
        found.process.kill()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--speed", "10", "--request-rate", "4", "--max-num-seqs", "8", "--goodput", "ttft:300", "tpot:30")
    found = served(tmp_path_factory.mktemp("live"), *options)
    yield found
    assert ended(found) == "pdvsim: live ended\n"
    assert found.process.returncode == 0


def opened(browser: Browser, url: str, width: int = 1280) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    page.complaints = []  # type: ignore[attr-defined]
    page.on("console", lambda m: page.complaints.append(m.text) if m.type not in QUIET else None)  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: page.complaints.append(str(error)))  # type: ignore[attr-defined]
    page.goto(url)
    page.wait_for_function("() => window.Bokeh?.documents[0]?.get_model_by_name('table')?.text?.includes('TTFT')")
    return page


@pytest.fixture(scope="module")
def page(browser: Browser, live: Served) -> Page:
    return opened(browser, live.url)


def text(page: Page, name: str) -> str:
    found: str = page.evaluate("name => Bokeh.documents[0].get_model_by_name(name).text", name)
    return found


def now_s(page: Page) -> float:
    return float(re.findall(r"<b>([\d.]+) s</b>", text(page, "status"))[0])


def figures(page: Page, name: str) -> list[float]:
    """A line of the table."""
    [line] = re.findall(rf"<tr><td[^>]*>{re.escape(name)}</td>(.*?)</tr>", text(page, "table"))
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


def slide(page: Page, name: str, key: str, times: int) -> None:
    """Move a slider with the keys, as a person may."""
    page.locator(".noUi-handle").nth({"request_rate": 0, "burstiness": 1, "acceptance_rate": 2}[name]).focus()
    for _ in range(times):
        page.keyboard.press(key)


def value(page: Page, name: str) -> Any:
    return page.evaluate("name => Bokeh.documents[0].get_model_by_name(name).value", name)


def test_it_opens_without_complaint_and_goes_on(page: Page) -> None:
    page.get_by_role("combobox").first.select_option("10 s")
    until(page, lambda: "the last 10 s" in text(page, "status"))
    began_s = now_s(page)
    until(page, lambda: now_s(page) > began_s + 5)
    until(page, lambda: figures(page, "output tokens/s")[0] > 0)
    assert page.locator("canvas").count() >= 8
    assert page.complaints == []  # type: ignore[attr-defined]
    for arch in ARCHS:
        assert f">{arch}</th>" in text(page, "table")


def test_pausing_pauses_and_a_second_is_a_second(page: Page) -> None:
    press(page, "Pause")
    until(page, lambda: "paused" in text(page, "status"))
    stood_s = now_s(page)
    page.wait_for_timeout(600)
    assert now_s(page) == stood_s
    press(page, "One second on")
    until(page, lambda: now_s(page) != stood_s)
    assert now_s(page) == pytest.approx(stood_s + 1.0, abs=0.11)  # shown to a tenth
    press(page, "Go on")
    until(page, lambda: now_s(page) > stood_s + 2)


def test_a_burst_shows_up_in_the_queues(page: Page) -> None:
    press(page, "Pause")
    until(page, lambda: "paused" in text(page, "status"))
    before = figures(page, "requests in system")
    press(page, "Burst of 50")
    press(page, "One second on")
    until(page, lambda: min(figures(page, "requests in system")) > max(before) + 20)
    assert figures(page, "main queue now")[1] > 10  # eight at once are served
    assert figures(page, "prefill queue now")[0] > 10
    press(page, "Go on")


def test_a_slider_changes_the_load_for_two_browsers_at_once(browser: Browser, page: Page, live: Served) -> None:
    """In force within a second, as the other browser tells: a telephone."""
    other = opened(browser, live.url, 400)
    took_s, rate, tries = 60.0, value(page, "request_rate"), 0
    while took_s > 1.0:  # a busy machine may be late, but not every time
        tries += 1
        assert tries <= 24
        up = tries % 2  # and down again: the load stays what it is
        began, rate = time.monotonic(), rate + (0.5 if up else -0.5)
        slide(page, "request_rate", "ArrowRight" if up else "ArrowLeft", 1)
        until(other, lambda rate=rate: value(other, "request_rate") == pytest.approx(rate))
        took_s = time.monotonic() - began
    slide(page, "request_rate", "PageUp", 2)  # five steps each
    until(other, lambda: value(other, "request_rate") > rate + 3)
    came_s, more = now_s(page), value(page, "request_rate")
    until(page, lambda: now_s(page) > came_s + 10 and figures(page, "requests/s arriving")[0] > 0.7 * more)
    slide(other, "acceptance_rate", "ArrowLeft", 2)
    until(page, lambda: value(page, "acceptance_rate") == pytest.approx(0.5))
    assert other.evaluate("() => document.documentElement.scrollWidth") <= 400
    other.wait_for_function("() => [...Bokeh.index.roots].every(v => v.el.clientWidth > 250)")
    assert page.complaints == other.complaints == []  # type: ignore[attr-defined]
    seen_s = now_s(page)
    other.close()  # stops nothing
    until(page, lambda: now_s(page) > seen_s + 3)


def test_what_cannot_be_is_said_and_not_done(page: Page) -> None:
    page.evaluate("() => { Bokeh.documents[0].get_model_by_name('input_len').options.push('9000000') }")
    page.evaluate("() => { Bokeh.documents[0].get_model_by_name('input_len').value = '9000000' }")
    until(page, lambda: "tokens" in text(page, "status") and "#b00020" in text(page, "status"))
    until(page, lambda: value(page, "input_len") == "data set's")


def test_a_session_is_saved_as_an_ordinary_result(page: Page, live: Served) -> None:
    for label in ("Pause", "Restart", "One second on", "One second on", "Burst of 50", "One second on"):
        press(page, label)
    until(page, lambda: now_s(page) == 3.0)
    press(page, "Save")
    until(page, lambda: "saved" in page.inner_text("main pre"))
    said = page.inner_text("main pre")
    assert "a burst of requests" in said
    [folder] = (live.folder / "results").iterdir()
    for arch in ARCHS:
        document = json.loads((folder / f"{arch}.json").read_text())
        assert document["arch"] == arch
        assert document["completed"] > 50
        assert json.loads((folder / f"{arch}.trace.json").read_text())["traceEvents"]
    assert main(["check", str(folder / "pdv.json")]) == 0
    assert "report" in (folder / "report.html").read_text()


def answer(url: str, path: str, host: str, *more: str) -> str:
    """The first line that the server answers to a request with these headers."""
    port = int(re.findall(r":(\d+)/", url)[0])
    lines = [f"GET {path} HTTP/1.1", f"Host: {host.replace('PORT', str(port))}", *more, "", ""]
    heard = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall("\r\n".join(lines).encode())
        while b"\r\n" not in heard and (part := connection.recv(1000)):
            heard += part
    return heard.partition(b"\r\n")[0].decode()


UPGRADE = (
    "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)  # fmt: skip


@pytest.mark.parametrize("path", ["/", "/ws", "/static/js/bokeh.min.js"])
def test_a_foreign_name_that_leads_here_gets_nothing(path: str, live: Served) -> None:
    """As of a page whose name was bound to this machine after it was loaded (DNS rebinding)."""
    more = UPGRADE if path == "/ws" else ()
    good = "HTTP/1.1 101 Switching Protocols" if path == "/ws" else "HTTP/1.1 200 OK"
    for host in ("127.0.0.1:PORT", "localhost:PORT", "LOCALHOST:8080", "localhost"):  # a tunnel has another port
        assert answer(live.url, path, host, *more) == good, host
    foreign = ("evil.com", "evil.com:PORT", "localhost.evil.com", "127.0.0.1.evil.com:PORT", "192.168.0.7:PORT", "[::1")
    for host in foreign:
        assert answer(live.url, path, host, *more).split()[1] in ("403", "400"), host


def test_foreign_origins_are_refused(live: Served) -> None:
    def status(origin: str, host: str = "127.0.0.1:PORT") -> str:
        return answer(live.url, "/ws", host, *UPGRADE, f"Origin: {origin}").split()[1]

    here = live.url.rstrip("/")
    assert status(here) == "101"
    assert status(here.replace("127.0.0.1", "localhost"), "localhost:PORT") == "101"
    assert status("http://evil.example") == "403"
    assert status("http://127.0.0.1:1") == "403"
    assert status("null") == "403"


ORDERS = (
    "", "x", "{}", "[]", "[1]", "[1, 2, 3]", "null", '["no such order", 1]', '["turn", 1]', '["turn", ["x", 1]]',
    '["turn", ["request_rate", "x"]]', '["turn", ["request_rate", NaN]]', '["turn", ["request_rate", [1]]]',
    '["turn", ["input_len", {}]]', '["turn", ["dataset_name", "/etc/passwd"]]', '["turn", ["controller", null]]',
    '["turn", ["__class__", 1]]', '["speed", 99]', '["speed", -1]', '["window", "x"]', '["drawn", "x"]',
    '["drawn", {}]', '["drawn", Infinity]', "[" * 5000, "x" * 70_000, b"\x00\xff", b"\xff\xfe[]",
)  # fmt: skip


def test_malformed_orders_close_their_connection_and_nothing_else(page: Page, live: Served) -> None:
    """What they print would show at the end: `live ended` is all that a session says (the fixture's check)."""

    async def refused(order: str | bytes) -> None:
        connection = await websocket_connect(live.url.replace("http", "ws") + "ws")
        await connection.write_message(order, binary=isinstance(order, bytes))
        while await asyncio.wait_for(connection.read_message(), 60) is not None:
            pass

    async def every() -> None:
        for order in ORDERS:
            await refused(order)
        port = int(re.findall(r":(\d+)/", live.url)[0])
        for junk in (b"\0" * 100, b"GET / HTTP/1.1\r\nHost: [\r\n\r\n", b"\xc1\xff\xff\xff"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(junk)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 60)
            writer.close()

    asyncio.run(every())
    before_s = now_s(page)
    until(page, lambda: now_s(page) > before_s + 1)
    assert "#b00020" not in text(page, "status")


def test_a_hundred_pages_cost_little_and_leave_nothing(live: Served) -> None:
    """One page is made for all: 72 s of processor time were spent on a hundred when each had its own."""

    def spent_s() -> float:
        words = Path(f"/proc/{live.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def held_mib() -> float:
        [kib] = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{live.process.pid}/status").read_text())
        return int(kib) / 1024

    async def opened_page() -> Any:
        found = await AsyncHTTPClient().fetch(live.url, request_timeout=60)
        assert b"pdvsim live" in found.body
        connection = await websocket_connect(live.url.replace("http", "ws") + "ws")
        news = json.loads(await asyncio.wait_for(connection.read_message(), 60))
        assert {"launches", "fast", "slow", "spreads"} <= news["sources"].keys()
        return connection

    async def hundred() -> float:
        connections = [await opened_page() for _ in range(100)]
        open_mib = held_mib()
        for connection in connections:
            connection.close()
        return open_mib

    before_s, before_mib = spent_s(), held_mib()
    open_mib = asyncio.run(hundred())
    assert spent_s() - before_s < 15
    assert open_mib - before_mib < 40
    assert held_mib() - before_mib < 40


def test_a_port_that_is_taken_is_named_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pdvsim.live.pace.Feed", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["live", "--no-browser", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert said == f"pdvsim: error: port {port} is taken: give another --port, or 0 for any that is free\n"
    assert main(["live", "--no-browser", "--host", "192.0.2.1", "--port", "0"]) == 2
    assert capsys.readouterr().err == "pdvsim: error: host 192.0.2.1 is no address of this machine\n"


def test_elsewhere_a_token_is_needed(tmp_path: Path) -> None:
    found = served(tmp_path, "--host", "0.0.0.0", "--token", "a-token-of-mine")
    try:
        assert found.url.endswith("/?token=a-token-of-mine")
        port = int(re.findall(r":(\d+)/", found.url)[0])
        here = f"http://127.0.0.1:{port}/"
        for query, code in (("", 403), ("?token=another", 403), ("?token=a-token-of-mine", 200)):
            assert _asked(here + query) == code
            assert _asked(f"{here}static/js/bokeh.min.js{query}") == code
        cookie = "Cookie: pdvsim-live=a-token-of-mine"
        for host, more, code in (
            ("127.0.0.1:PORT", (), "403"),
            ("127.0.0.1:PORT", (cookie,), "101"),
            ("192.168.0.7:PORT", (cookie,), "101"),  # another address of this machine
            (f"{socket.gethostname()}:PORT", (cookie,), "101"),
            ("evil.com:PORT", (cookie,), "403"),
        ):
            assert answer(here, "/ws", host, *UPGRADE, *more).split()[1] == code, (host, more)
    finally:
        ended(found)
    assert found.process.returncode == 0


def _asked(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--request-rate", "inf"], "finite --request-rate"),
        (["--arch", "pdv,pdvv"], "unknown arch"),
        (["--input-len", "9000000"], "tokens"),
        (["--port", "70000"], "port"),
        (["--speed", "0"], "speed"),
        (["--token", "short"], "token"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", "--no-browser", "--port", "0", *argv]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_without_the_extra_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("pdvsim.live.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    for name in [name for name in sys.modules if name.startswith("bokeh.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["live", "--no-browser"]) == 2
    assert capsys.readouterr().err == "pdvsim: error: live needs bokeh: pip install 'pdvsim[live]'\n"
