"""Serves the page of a run to one user's browsers on this machine, from the run's storage."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from polytrain.record.history import JOURNAL
from polytrain.storage.location import Location
from polytrain.view.page.reading import read_facts
from polytrain.view.page.rendering import page
from polytrain.view.run_state import RunState
from polytrain_plugins import PolytrainError

_LOOPBACK = "127.0.0.1"

_REFRESH_S = 5
"""Seconds after which a browser asks again, at the least."""

_SHARE = 0.1
"""Greatest share of the time that is spent on making the page."""


_STRANGERS_WAIT_S = 30.0
"""Seconds after which a connection that asks for nothing is closed."""

_FORBIDDEN = (
    "Open the address that `polytrain show --serve` has printed, to its end: it has a token in it, "
    "without which no other user of this machine can read the run.\n"
)


class PageServer(ThreadingHTTPServer):
    """Serves one run, on the loopback interface alone, to those who know its address."""

    daemon_threads = True

    def __init__(self, location: Location, *, port: int = 0) -> None:
        """
        Args:
            port: where to listen; 0 takes a free one.

        Raises:
            OSError: the port is taken.
        """
        super().__init__((_LOOPBACK, port), _Handler)
        self.pages = _Pages(location)
        # All users of the machine can connect. Not in a cookie: browsers send those of one host to
        # all its ports, also to a server of another user.
        self.path = f"/?token={secrets.token_urlsafe(32)}"

    @property
    def url(self) -> str:
        """Where the page is, with the token that is needed to get it."""
        return f"http://{_LOOPBACK}:{self.server_port}{self.path}"


@contextmanager
def served(location: Location, *, port: int = 0) -> Iterator[PageServer]:
    """Serve a run in the background.

    Raises:
        OSError: the port is taken.
    """
    with PageServer(location, port=port) as server:
        thread = threading.Thread(target=server.serve_forever, name="polytrain-page", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Pages:
    """The newest page, made anew when the journal has grown or the run's driver may have died."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._made_of: Mapping[str, int] | None = None
        self._text = ""
        self._took_s = 0.0
        self._refresh_s: float | None = None

    def newest(self) -> str:
        """Return the page, which says when to ask again, if the run hasn't ended.

        Raises:
            OSError, PolytrainError: the run can't be read.
        """
        with self._lock:
            written = self._location.open().log_state(JOURNAL)
            if written != self._made_of or self._refresh_s is not None:
                began = time.monotonic()
                facts = read_facts(self._location)
                is_running = facts.source.state is RunState.RUNNING
                # By the page before: what this one takes isn't known yet.
                refresh_s = max(_REFRESH_S, self._took_s / _SHARE) if is_running else None
                self._text = page(facts, is_live=True, refresh_s=refresh_s)
                self._took_s = time.monotonic() - began
                self._refresh_s = refresh_s
                self._made_of = written
            return self._text


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _STRANGERS_WAIT_S

    def do_GET(self) -> None:
        # The host: a page of somebody else's, whose name leads here, would read the run.
        is_known = hmac.compare_digest(self.path.encode(), self.server.path.encode())
        if not is_known or self.headers.get("Host") not in self._own_names():
            self._answer(HTTPStatus.FORBIDDEN, _FORBIDDEN, "text/plain", None)
            return
        try:
            text = self.server.pages.newest()
        except (OSError, PolytrainError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n", "text/plain", _REFRESH_S)
            return
        # Scripts ask again: the header would make a browser load all anew.
        self._answer(HTTPStatus.OK, text, "text/html", None)

    def log_message(self, format: str, *args: object) -> None:
        """Requests aren't logged: the terminal has the address alone."""

    def _own_names(self) -> tuple[str, str]:
        port = self.server.server_port
        return f"{_LOOPBACK}:{port}", f"localhost:{port}"

    def _answer(self, status: HTTPStatus, text: str, kind: str, refresh_s: float | None) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        # The address has the token in it.
        self.send_header("Referrer-Policy", "no-referrer")
        if refresh_s is not None:
            self.send_header("Refresh", f"{refresh_s:.0f}")
        self.end_headers()
        self.wfile.write(body)
