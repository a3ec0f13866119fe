"""The live page's server: who is let in, what it makes of nonsense, and what a page costs."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from liveserver import Served, ended, served
from tornado.websocket import websocket_connect


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = served(tmp_path_factory.mktemp("live"))
    yield running
    assert ended(running) == "pdvsim: live ended\n"
    assert running.process.returncode == 0


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


@pytest.mark.parametrize("path", ["/", "/ws"])
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


async def status(live: Served) -> str:
    """The page's first line, a little later than now."""
    connection = await websocket_connect(live.url.replace("http", "ws") + "ws")
    for number in (1, 2):
        news = json.loads(await asyncio.wait_for(connection.read_message(), 60))
        assert news["number"] == number
        await connection.write_message(json.dumps(["drawn", number]))
    connection.close()
    return str(news["html"]["status"])


ORDERS = (
    "", "{}", "[1, 2, 3]", '["no such order", 1]', '["request_rate", NaN]', '["input_len", {}]',
    '["dataset_name", "/etc/passwd"]', '["__class__", 1]', '["speed", -1]', '["drawn", Infinity]',
    '["request_rate", 1e9]', '["num_speculative_tokens", 10000]',
    '["acceptance_rate", -1]', "[" * 5000, "x" * 70_000, b"\xff\xfe[]",
)  # fmt: skip


def test_a_large_body_is_refused_before_it_is_read(live: Served) -> None:
    """The answer comes at once, though nothing of the body was sent."""
    port = int(re.findall(r":(\d+)/", live.url)[0])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"POST / HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: {10**9}\r\n\r\n".encode())
        assert not connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_malformed_orders_close_their_connection_and_nothing_else(live: Served) -> None:
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
    assert asyncio.run(status(live)) != asyncio.run(status(live))  # it goes on
    assert "refused" not in asyncio.run(status(live))


def test_a_port_that_is_taken_is_named(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port} " in refused(["live", "--no-browser", "--port", port])
    assert "192.0.2.1" in refused(["live", "--no-browser", "--address", "192.0.2.1", "--port", "0"])


def test_elsewhere_a_token_is_needed(tmp_path: Path) -> None:
    shared = served(tmp_path, "--address", "0.0.0.0", "--token", "a-token-of-mine")
    try:
        assert shared.url.endswith("/?token=a-token-of-mine")
        port = int(re.findall(r":(\d+)/", shared.url)[0])
        here = f"http://127.0.0.1:{port}/"
        for query, code in (("", 403), ("?token=another", 403), ("?token=a-token-of-mine", 200)):
            assert _asked(here + query) == code
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
        ended(shared)
    assert shared.process.returncode == 0


def _asked(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
