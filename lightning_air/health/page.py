"""The report as a page on this machine, that renews itself while a run goes on.

It listens on 127.0.0.1 only, at a random port, and answers only who knows the random token in its address, by a name of
this machine (no other site can have a browser ask under its own name), and no script of another page. To see it from
elsewhere, forward the port: `ssh -L 8080:127.0.0.1:PORT machine`.
"""

import contextlib
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

from lightning_air._lightning import rank_zero_info
from lightning_air.health.report import content_security_policy
from lightning_air.health.scene import Scene
from lightning_air.health.threads import Background, close_all

log = logging.getLogger(__name__)

CLOSE_SECONDS = 0.9
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_REQUEST_SECONDS = 10.0
_FRESH_SECONDS = 1.0
_POLL_SECONDS = 0.1


class PageServer:
    """Serves the page from `start` to `close`.

    Args:
        scene: What it shows.
        clock: Seconds.

    Attributes:
        url: Where the page is, once started.
        thread: On which it listens.
    """

    def __init__(self, scene: Scene, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.url: str | None = None
        self.thread = Background("air-gpu-page", self._serve_until)
        self._rendering = _Rendering(scene, clock)
        self._server: _Server | None = None

    def start(self) -> None:
        """Listen, and say where, once, in the log. Where that is impossible, say so."""
        try:
            server = _Server(self._rendering, f"/{secrets.token_urlsafe(24)}/")
        except OSError as error:
            log.warning("There is no page of the GPUs: 127.0.0.1 cannot be listened on (%s).", error)
            return
        self._server = server
        self.url = f"http://127.0.0.1:{server.server_port}{server.path}"
        self.thread.start()
        rank_zero_info(f"The GPUs of this run are shown at {self.url} (on this machine only).")

    def close(self) -> None:
        """End, within `CLOSE_SECONDS`; requests that are being answered are left behind. Idempotent."""
        close_all([self.thread], CLOSE_SECONDS)

    def _serve_until(self, closed: threading.Event) -> None:
        assert self._server is not None
        with self._server:
            while not closed.is_set():
                self._server.handle_request()  # or wait for one for `_POLL_SECONDS`


class _Rendering:
    """The page as of now, or of a second ago: however many ask, it is drawn once."""

    def __init__(self, scene: Scene, clock: Callable[[], float]) -> None:
        self._scene = scene
        self._clock = clock
        self._lock = threading.Lock()
        self._made: tuple[float, bytes] | None = None

    def get(self) -> bytes:
        with self._lock:
            if self._made is None or self._clock() - self._made[0] >= _FRESH_SECONDS:
                self._made = (self._clock(), self._scene.render(is_live=True).encode())
            return self._made[1]


class _Server(ThreadingHTTPServer):
    """Answers each request on a thread that ends with the process."""

    timeout = _POLL_SECONDS
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = False

    def __init__(self, rendering: _Rendering, path: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rendering = rendering
        self.path = path

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for the page of the GPUs failed: %r", sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    """Answers `GET` of the one address there is."""

    timeout = _REQUEST_SECONDS
    server: _Server
    server_version = "lightning_air"
    sys_version = ""

    def do_GET(self) -> None:
        if not _is_ours(self.headers.get):
            self._answer(403, b"This page is for its own machine only, and for no other site.\n", "text/plain")
        elif not secrets.compare_digest(self.path.encode(), self.server.path.encode()):
            self._answer(404, b"There is nothing here.\n", "text/plain")
        else:
            self._answer(200, self.server.rendering.get(), "text/html")

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        policy = f"{content_security_policy(is_live=True)}; frame-ancestors 'none'"
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the visitor has left
            self.wfile.write(content)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests are no news, and their paths hold the token."""


def _is_ours(header: Callable[[str], str | None]) -> bool:
    """Return whether a request comes from this page, or from somebody who opens it."""
    host = header("Host") or ""
    if host.rpartition(":")[0] not in _LOOPBACK and host not in _LOOPBACK:
        return False  # a name of somebody else's that leads here
    if header("Origin") not in {None, f"http://{host}"}:
        return False
    site = header("Sec-Fetch-Site")
    is_opened = (header("Sec-Fetch-Mode"), header("Sec-Fetch-Dest")) == ("navigate", "document")
    return site in {None, "none", "same-origin"} or is_opened
