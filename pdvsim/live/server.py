"""The page's web server: for this machine only, or for others with a token; pages of other sites have no access.

Every browser gets the same page, and updates over a websocket; one message is made for all. A browser that does not
draw gets fewer messages. It imports only tornado, so that a port can be tested first.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from ipaddress import ip_address
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets
from tornado.web import Application, ErrorHandler, RequestHandler
from tornado.websocket import WebSocketClosedError, WebSocketHandler

if TYPE_CHECKING:
    from pdvsim.live.page import Dashboard

LOOPBACK, EVERY_ADDRESS = "127.0.0.1", ("0.0.0.0", "::")
COOKIE = "pdvsim-live"
UPDATE_S = 0.15
BUSY_S = 0.12  # of an update that the session may take; more if the page takes half as much
LEAST_PAUSE_S = 0.01  # between two updates, for the browsers
PING_S = 10.0
COMMAND_BYTES = 1 << 14


class _Site(Application):
    """Answers only requests for its own names; another name means another site's page (DNS rebinding)."""

    def __init__(self, names: set[str], any_address: bool, token: str | None, show: Dashboard) -> None:
        self.names, self.any_address, self.token, self.show = names, any_address, token, show
        self.page, self.viewers = show.html(), set[_Viewer]()
        super().__init__(
            [(r"/", _Page), (r"/ws", _Viewer)],
            websocket_ping_interval=PING_S, websocket_max_message_size=COMMAND_BYTES, log_function=lambda handler: None,
        )  # fmt: skip

    def find_handler(self, request: HTTPServerRequest, **more: Any) -> Any:
        if not self._is_ours(request.host):
            return self.get_handler_delegate(request, ErrorHandler, {"status_code": 403})
        return super().find_handler(request, **more)

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self.names or (self.any_address and _is_address(name))


class _Guarded(RequestHandler):
    """Requires the token, if there is one: in the address the first time, then in a cookie."""

    application: _Site

    def prepare(self) -> None:
        token = self.application.token
        asked, cookie = self.get_query_argument("token", None), self.get_cookie(COOKIE)
        if token is None:
            return
        for given in (asked, cookie):
            if given is not None and secrets.compare_digest(given.encode(), token.encode()):
                if given is not cookie:
                    self.set_cookie(COOKIE, given, httponly=True, samesite="Strict")
                return
        self.send_error(403, reason="the address needs the token")


class _Page(_Guarded):
    def get(self) -> None:
        self.write(self.application.page)


class _Viewer(_Guarded, WebSocketHandler):
    """One browser, which gets an update when it has drawn the one before. Tornado admits only pages of this site."""

    sent, known, drawn = 0, -1, True

    def open(self, *args: str, **more: str) -> None:
        self.application.viewers.add(self)
        self.send_update()

    def on_close(self) -> None:
        self.application.viewers.discard(self)

    def on_message(self, message: str | bytes) -> None:
        try:
            what, value = json.loads(message)
            if what == "drawn":
                self.drawn = int(value) == self.sent
            else:
                self.application.show.execute(what, value)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            self.close(1008, "not a command")

    def send_update(self) -> None:
        """Send the latest update, unless an earlier one is not drawn yet; changed controls are sent immediately."""
        show = self.application.show
        if not self.drawn and self.known == show.controls:
            return
        text, self.known, self.drawn = show.message(self.sent, self.known), show.controls, False
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
        self._everywhere = bool(bound & {*EVERY_ADDRESS})
        shown = socket.gethostname() if self._everywhere else address
        self._names = {name.lower() for name in (address, shown, "localhost", LOOPBACK, *bound)}
        self.token = (token or secrets.token_urlsafe(24)) if token or address != LOOPBACK else None
        query = f"?{urlencode({'token': self.token})}" if self.token else ""
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/{query}"

    def close(self) -> None:
        """Release the port."""
        for one in self._sockets:
            one.close()

    def run(self, show: Dashboard, ready: Callable[[], object] = lambda: None) -> None:
        """Serve until Ctrl-C or a stop request; `ready` is called when the page can be opened."""
        logging.getLogger("tornado.general").setLevel(logging.ERROR)  # hides malformed requests
        loop = IOLoop.current()
        site = _Site(self._names, self._everywhere, self.token, show)
        server = HTTPServer(site, max_body_size=COMMAND_BYTES)  # more is refused unread
        server.add_sockets(self._sockets)

        def go_on(busy_s: float = BUSY_S) -> None:
            began, news = monotonic(), show.tick(busy_s)
            gone_on = monotonic()
            for viewer in [*site.viewers] if news else ():
                viewer.send_update()
            ends = monotonic()
            pause_s, next_s = max(LEAST_PAUSE_S, UPDATE_S - (ends - began)), max(BUSY_S, 2 * (ends - gone_on))
            loop.call_later(pause_s, go_on, next_s)

        def end(number: int, frame: FrameType | None) -> None:
            signal.signal(number, before[signal.Signals(number)])  # the second one ends a policy that never yields
            loop.add_callback_from_signal(loop.stop)

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            loop.add_callback(ready)
            loop.add_callback(go_on)
            loop.start()
        finally:
            server.stop()
            for viewer in [*site.viewers]:
                viewer.close(1001, "the session has ended")
            for number, handler in before.items():
                signal.signal(number, handler)


def _is_address(name: str) -> bool:
    """Whether a host name is an IP address, which DNS rebinding cannot use."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _no_port(error: OSError, address: str, port: int) -> ValueError:
    if error.errno == errno.EADDRINUSE:
        return ValueError(f"port {port} is in use: choose another --port, or 0 for any free one")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ValueError(f"host {address} is not an address of this machine")
    return ValueError(f"port {port} of {address} cannot be used: {os.strerror(error.errno or 0)}")
