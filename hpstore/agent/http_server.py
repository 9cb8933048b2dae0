"""The agent's web server: /, /metrics and /status.json, on localhost. It changes nothing."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hpstore.agent.agent_status import AgentStatus
from hpstore.agent.prometheus import exposition
from hpstore.agent.status_page import render
from hpstore.errors import ConfigError
from hpstore.runtime.closing import Closing
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
_SECONDS = 10.0  # for a client to say what it wants
_CLOSE_SECONDS = 5.0


class _Server(ThreadingHTTPServer):
    """A client that goes away, or sends nonsense, is no news; anything else is logged, in one
    record."""

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exception()
        if isinstance(error, OSError):  # a time-out and a reset are
            _log.debug("a request from %s ended: %s", client_address, error)
        else:
            _log.error("a request from %s failed", client_address, exc_info=error)


class StatusServer(Closing):
    """Serves the status last given to `show`, from threads of its own.

    Raises ConfigError when the address cannot be used.
    """

    def __init__(self, listen: str) -> None:
        self._status: AgentStatus | None = None  # replaced whole
        metrics = exposition(lambda: self._status)
        host, port = parse_listen(listen)
        try:
            self._server = _Server((host, port), _handler(self._last, metrics))
        except (OSError, UnicodeError) as error:  # the latter for what can be no name of a host
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"the agent cannot listen on {listen}: {reason}. Choose another address with "
                "--listen, or none"
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="hpstore-agent-web", daemon=True
        )
        start_thread(self._thread)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def _last(self) -> AgentStatus | None:
        return self._status

    def show(self, status: AgentStatus) -> None:
        """What is served from now on. Any thread."""
        self._status = status

    def close(self) -> None:
        """Stop. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLOSE_SECONDS)


def parse_listen(text: str) -> tuple[str, int]:
    """HOST:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is no address: give HOST:PORT, such as 127.0.0.1:9640")
    return host, int(port)


def _handler(
    status: Callable[[], AgentStatus | None], metrics: Callable[[], bytes]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """One request. Only GET."""

        timeout = _SECONDS
        server_version, sys_version = "hpstore", ""

        def do_GET(self) -> None:
            path, found = self.path.split("?")[0], status()
            if path == "/metrics":
                self._answer("text/plain; version=0.0.4; charset=utf-8", metrics())
            elif path not in ("/", "/status.json"):
                self.send_error(HTTPStatus.NOT_FOUND)
            elif found is None:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the first round is under way")
            elif path == "/":
                self._answer("text/html; charset=utf-8", render(found).encode())
            else:
                body = json.dumps(found.as_dict(), default=str)
                self._answer("application/json", body.encode())

        def _answer(self, kind: str, body: bytes) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header(
                "Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"
            )
            try:
                self.end_headers()
                self.wfile.write(body)
            except OSError as error:  # who asked has gone away meanwhile
                self.close_connection = True
                _log.debug("%s went away: %s", self.address_string(), error)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name)
            _log.debug(format, *args)

    return Handler
