"""The page's web server, for this machine only; pages of other sites have no access.

Every browser gets the same page, and updates over a websocket; one message is made for all. A browser that does not
draw gets fewer messages. It imports only tornado, so that a port can be tested first.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPServerRequest
from tornado.ioloop import IOLoop, PeriodicCallback
from tornado.netutil import bind_sockets
from tornado.web import Application, ErrorHandler, RequestHandler, StaticFileHandler
from tornado.websocket import WebSocketClosedError, WebSocketHandler

if TYPE_CHECKING:
    from pdvsim.live.page import Dashboard

LOOPBACK = "127.0.0.1"
UPDATE_MS = 150
AHEAD = 2  # most updates not drawn yet: a slow browser gets fewer, not later ones
HIDDEN_S = 2.0  # then an update is sent anyway: a hidden page draws nothing
PING_S = 10.0
MOST_BYTES = 1 << 14  # of a command


class _Site(Application):
    """Answers only requests for its own names; another name means another site's page (DNS rebinding)."""

    def __init__(self, show: Dashboard) -> None:
        self.show, self.page, self.viewers = show, show.html(), set[_Viewer]()
        super().__init__(
            [(r"/", _Page), (r"/ws", _Viewer), (r"/static/(.*)", StaticFileHandler, {"path": show.static})],
            websocket_ping_interval=PING_S, websocket_max_message_size=MOST_BYTES, log_function=lambda handler: None,
        )  # fmt: skip

    def find_handler(self, request: HTTPServerRequest, **more: Any) -> Any:
        if request.host_name.lower() not in (LOOPBACK, "localhost"):
            return self.get_handler_delegate(request, ErrorHandler, {"status_code": 403})
        return super().find_handler(request, **more)


class _Page(RequestHandler):
    application: _Site

    def get(self) -> None:
        self.write(self.application.page)


class _Viewer(WebSocketHandler):
    """One browser: updates sent and drawn. Tornado admits only pages of this site."""

    application: _Site
    sent = drawn = 0
    known = -1
    sent_s = 0.0

    def open(self, *args: str, **more: str) -> None:
        self.application.viewers.add(self)
        self.tell()

    def on_close(self) -> None:
        self.application.viewers.discard(self)

    def on_message(self, message: str | bytes) -> None:
        try:
            what, value = json.loads(message)
            if what == "drawn":
                self.drawn = max(self.drawn, min(int(value), self.sent))
            else:
                self.application.show.obey(what, value)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            self.close(1008, "not a command")

    def tell(self) -> None:
        """Send the latest update, unless earlier ones are not drawn yet; changed controls are sent immediately."""
        show = self.application.show
        waits = self.sent - self.drawn >= AHEAD and monotonic() - self.sent_s < HIDDEN_S
        if waits and self.known == show.controls:
            return
        text, self.known = show.message(self.sent, self.known), show.controls
        self.sent, self.sent_s = self.sent + 1, monotonic()
        try:
            self.write_message(text).add_done_callback(lambda written: written.exception())
        except WebSocketClosedError:
            self.on_close()


class PageServer:
    """Binds its port when created; the content is given when it runs. A ValueError says why it has no port."""

    def __init__(self, port: int) -> None:
        try:
            self._sockets = bind_sockets(port, LOOPBACK)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(f"port {port} is in use: choose another --port, or 0 for any free one") from None
            raise ValueError(f"port {port} cannot be used: {os.strerror(error.errno or 0)}") from None
        self.url = f"http://{LOOPBACK}:{self._sockets[0].getsockname()[1]}/"

    def close(self) -> None:
        """Release the port."""
        for one in self._sockets:
            one.close()

    def run(self, show: Dashboard, ready: Callable[[], object] = lambda: None) -> None:
        """Serve until Ctrl-C or a stop request; `ready` is called when the page can be opened."""
        logging.getLogger("tornado.general").setLevel(logging.ERROR)  # hides malformed requests
        loop = IOLoop.current()
        site = _Site(show)
        server = HTTPServer(site)
        server.add_sockets(self._sockets)

        def tell() -> None:
            if show.look():
                for viewer in [*site.viewers]:
                    viewer.tell()

        def end(number: int, frame: FrameType | None) -> None:
            loop.add_callback_from_signal(loop.stop)

        telling = PeriodicCallback(tell, UPDATE_MS)
        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            telling.start()
            loop.add_callback(ready)
            loop.start()
        finally:
            telling.stop()
            server.stop()
            for viewer in [*site.viewers]:
                viewer.close(1001, "the session has ended")
            for number, handler in before.items():
                signal.signal(number, handler)
