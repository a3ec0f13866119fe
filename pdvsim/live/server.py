"""The page's web server: for this machine only, or for others with a token; pages of other sites have no access.

Every browser gets the same page, and updates over a websocket; one message is made for all. A browser that does not
draw gets fewer messages. It imports only tornado, so that a port can be tested first.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, ErrorHandler, RequestHandler
from tornado.websocket import WebSocketClosedError, WebSocketHandler

if TYPE_CHECKING:
    from pdvsim.live.page import Dashboard

LOOPBACK, EVERY_ADDRESS = "127.0.0.1", ("0.0.0.0", "::")
ANY_ADDRESS = r"[\d.]+|\[[\da-f:.]+\]"  # which DNS rebinding cannot use
COOKIE = "pdvsim-live"
UPDATE_S = 0.15
BUSY_S = 0.12  # of an update that the session may take; more if the page takes half as much
LEAST_PAUSE_S = 0.01  # between two updates, for the browsers
PING_S = 10.0
COMMAND_BYTES = 1 << 14


class _Guarded(RequestHandler):
    """Requires the token, if there is one: in the address the first time, then in a cookie."""

    def initialize(self, show: Dashboard, token: str | None, page: str, viewers: set[_Viewer]) -> None:
        """`viewers` are the browsers that get updates; a page is made once for all."""
        self.show, self.token, self.page, self.viewers = show, token, page, viewers

    def prepare(self) -> None:
        asked, cookie = self.get_query_argument("token", None), self.get_cookie(COOKIE)
        if self.token is None:
            return
        for given in (asked, cookie):
            if given is not None and secrets.compare_digest(given.encode(), self.token.encode()):
                if given is not cookie:
                    self.set_cookie(COOKIE, given, httponly=True, samesite="Strict")
                return
        self.send_error(403, reason="the address needs the token")


class _Page(_Guarded):
    def get(self) -> None:
        self.write(self.page)


class _Viewer(_Guarded, WebSocketHandler):
    """One browser, which gets an update when it has drawn the one before. Tornado admits only pages of this site."""

    sent, known, drawn = 0, -1, True

    def open(self, *args: str, **more: str) -> None:
        self.viewers.add(self)
        self.send_update()

    def on_close(self) -> None:
        self.viewers.discard(self)

    def on_message(self, message: str | bytes) -> None:
        try:
            what, value = json.loads(message)
            if what == "drawn":
                self.drawn = int(value) == self.sent
            else:
                self.show.execute(what, value)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            self.close(1008, "not a command")

    def send_update(self) -> None:
        """Send the latest update, unless an earlier one is not drawn yet; changed controls are sent immediately."""
        if not self.drawn and self.known == self.show.changes:
            return
        text, self.known, self.drawn = self.show.message(self.sent, self.known), self.show.changes, False
        self.sent += 1
        try:
            self.write_message(text).add_done_callback(lambda written: written.exception())
        except WebSocketClosedError:
            self.on_close()


class PageServer:
    """Binds its port when created; the content is given when it runs. A ValueError says why it has no port."""

    def __init__(self, host: str | None, port: int, token: str | None) -> None:
        address = host or LOOPBACK
        try:
            self._sockets = bind_sockets(port, address)
        except OSError as error:
            raise _no_port(error, address, port) from None
        bound = {str(one.getsockname()[0]) for one in self._sockets}
        self.port = int(self._sockets[0].getsockname()[1])
        everywhere = bool(bound & {*EVERY_ADDRESS})
        shown = _host(socket.gethostname() if everywhere else address)
        names = {_host(name.lower()) for name in (address, shown, "localhost", LOOPBACK, *bound)}
        self._names = "|".join([*map(re.escape, names), *([ANY_ADDRESS] if everywhere else [])])
        self.token = (token or secrets.token_urlsafe(24)) if token or address != LOOPBACK else None
        query = f"?{urlencode({'token': self.token})}" if self.token else ""
        self.url = f"http://{shown}:{self.port}/{query}"

    def close(self) -> None:
        """Release the port."""
        for one in self._sockets:
            one.close()

    def run(self, show: Dashboard, ready: Callable[[], object] = lambda: None) -> None:
        """Serve until Ctrl-C or a stop request; `ready` is called when the page can be opened.

        The first one ends it in order, the second one also a policy that never yields.
        """
        before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
        try:
            with suppress(KeyboardInterrupt):
                asyncio.run(self._serve(show, ready))
        finally:
            signal.signal(signal.SIGTERM, before)

    async def _serve(self, show: Dashboard, ready: Callable[[], object]) -> None:
        logging.getLogger("tornado.general").setLevel(logging.ERROR)  # hides malformed requests
        viewers: set[_Viewer] = set()
        shared = {"show": show, "token": self.token, "page": show.html(), "viewers": viewers}
        site = Application(
            default_handler_class=ErrorHandler, default_handler_args={"status_code": 403},
            websocket_ping_interval=PING_S, websocket_max_message_size=COMMAND_BYTES, log_function=lambda handler: None,
        )  # fmt: skip
        # another name means another site's page (DNS rebinding)
        site.add_handlers(f"(?:{self._names})$", [(r"/", _Page, shared), (r"/ws", _Viewer, shared)])
        server = HTTPServer(site, max_body_size=COMMAND_BYTES)  # more is refused unread
        server.add_sockets(self._sockets)
        ready()
        busy_s = BUSY_S
        try:
            while True:
                began, news = monotonic(), show.tick(busy_s)
                gone_on = monotonic()
                for viewer in [*viewers] if news else ():
                    viewer.send_update()
                ends = monotonic()
                busy_s = max(BUSY_S, 2 * (ends - gone_on))
                await asyncio.sleep(max(LEAST_PAUSE_S, UPDATE_S - (ends - began)))
        finally:
            server.stop()
            for viewer in [*viewers]:
                viewer.close(1001, "the session has ended")


def _host(name: str) -> str:
    """A name or address as it stands in a URL."""
    return f"[{name}]" if ":" in name else name


def _no_port(error: OSError, address: str, port: int) -> ValueError:
    if error.errno == errno.EADDRINUSE:
        return ValueError(f"port {port} is in use: choose another --port, or 0 for any free one")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ValueError(f"host {address} is not an address of this machine")
    return ValueError(f"port {port} of {address} cannot be used: {os.strerror(error.errno or 0)}")
