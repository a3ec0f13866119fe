"""The page's server: on the loopback alone, or elsewhere behind a token; pages of other origins get no connection."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
from collections.abc import Callable
from types import FrameType
from urllib.parse import urlencode

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.auth_provider import AuthProvider
from bokeh.server.server import Server
from tornado.web import HTTPError, RequestHandler

LOOPBACK = "127.0.0.1"
COOKIE = "pdvsim-live"


class TokenOnly(AuthProvider):  # type: ignore[misc]
    """Lets in whoever has the token: in the address the first time, then in a cookie."""

    def __init__(self, token: str) -> None:
        self._token = token

    @property
    def get_user(self) -> Callable[[RequestHandler], str | None]:
        return self._user

    @property
    def get_user_async(self) -> None:
        return None

    @property
    def login_url(self) -> None:
        return None

    @property
    def get_login_url(self) -> Callable[[RequestHandler], str]:
        return self._refuse

    @property
    def login_handler(self) -> None:
        return None

    @property
    def logout_url(self) -> None:
        return None

    @property
    def logout_handler(self) -> None:
        return None

    def _user(self, handler: RequestHandler) -> str | None:
        asked, kept = handler.get_query_argument("token", None), handler.get_cookie(COOKIE)
        for given in (asked, kept):
            if given is not None and secrets.compare_digest(given.encode(), self._token.encode()):
                if given is not kept:
                    handler.set_cookie(COOKIE, given, httponly=True, samesite="Strict")
                return "a holder of the token"
        return None

    def _refuse(self, handler: RequestHandler) -> str:
        raise HTTPError(403, "the address needs its token")


class PageServer:
    """Serves one page, made anew for each browser by `make`."""

    def __init__(self, make: Callable[[Document], None], host: str | None, port: int, token: str | None) -> None:
        for name in ("bokeh", "tornado.access"):  # who opens and closes the page is no news
            logging.getLogger(name).setLevel(logging.ERROR)
        for name in ("bokeh.server.protocol_handler", "bokeh.server.views.ws"):  # a page closed as it spoke; a stranger
            logging.getLogger(name).setLevel(logging.CRITICAL)
        address = host or LOOPBACK
        self.token = (token or secrets.token_urlsafe(24)) if token or address != LOOPBACK else None
        shown = socket.gethostname() if address in ("0.0.0.0", "::", "") else address
        hosts = {address, shown, *(("localhost",) if address == LOOPBACK else ())}
        port = port or _free_port(address)
        more = {"auth_provider": TokenOnly(self.token)} if self.token else {}
        self._server = Server(
            {"/": Application(FunctionHandler(make))}, address=address, port=port,
            allow_websocket_origin=[f"{name}:{port}" for name in sorted(hosts)], keep_alive_milliseconds=10_000,
            unused_session_lifetime_milliseconds=10_000, check_unused_sessions_milliseconds=5_000, **more,
        )  # fmt: skip
        self.url = f"http://{shown}:{port}/" + (f"?{urlencode({'token': self.token})}" if self.token else "")

    def run(self) -> None:
        """Serve until Ctrl-C or a request to end."""
        loop = self._server.io_loop

        def end(number: int, frame: FrameType | None) -> None:
            loop.add_callback(loop.stop)

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._server.start()
            loop.start()
        finally:
            self._server.stop()
            for number, handler in before.items():
                signal.signal(number, handler)


def _free_port(address: str) -> int:
    """A port that nobody listens on: which pages may connect is said before the server has one."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
