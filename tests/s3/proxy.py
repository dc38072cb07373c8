"""An HTTP proxy before an S3 server that lets chosen requests go wrong."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from pgqrs.stores.fairness import SUFFIX

Fault = Callable[["Exchange"], None]


class Exchange(BaseHTTPRequestHandler):
    """One request, and what can be done with it."""

    protocol_version = "HTTP/1.1"
    proxy: S3Proxy

    def forward(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """Let the server have it; its answer."""
        server = http.client.HTTPConnection(self.proxy.target, timeout=100)
        try:
            server.request(self.command, self.path, self.body, dict(self.headers))
            answer = server.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            server.close()

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = {n.lower(): v for n, v in headers}.get("content-length", "0")
        size = length if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", size)
        self.end_headers()
        self.wfile.write(body)

    def drop(self) -> None:
        """End the connection without an answer."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(2)

    def handle_request(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.endswith(SUFFIX):  # an announcement beside the key: no fault is meant for it
            self.proxy.announced.append(self.command)
            return served(self)
        fault = self.proxy.of_the_check
        if not self.path.endswith(".if-match"):
            self.proxy.seen.append(self.command)
            fault = self.proxy.fault_for(self.command)
        try:
            fault(self)
        except OSError:
            self.drop()

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_request  # noqa: N815

    def handle(self) -> None:
        with suppress(OSError):  # the client was killed
            super().handle()

    def log_message(self, *_: Any) -> None:
        return


# What can happen to a request


def served(exchange: Exchange) -> None:
    exchange.answer(*exchange.forward())


def applied_but_unanswered(exchange: Exchange) -> None:
    exchange.forward()
    exchange.drop()


def never_applied(exchange: Exchange) -> None:
    exchange.drop()


def answered(status: int, code: str) -> Fault:
    """An error, and the server never hears of it."""
    body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    return lambda exchange: exchange.answer(status, [("Content-Type", "application/xml")], body)


def applied_but_answered(status: int, code: str) -> Fault:
    """An error, though the server did as asked."""

    def fault(exchange: Exchange) -> None:
        exchange.forward()
        answered(status, code)(exchange)

    return fault


def late(seconds: float, then: Fault = served) -> Fault:
    def fault(exchange: Exchange) -> None:
        time.sleep(seconds)
        then(exchange)

    return fault


def trickling(exchange: Exchange) -> None:
    """An answer that comes a byte at a time, until the client has gone."""
    status, headers, body = exchange.forward()
    exchange.send_response_only(status)
    for name, value in headers:
        if name.lower() not in ("transfer-encoding", "connection"):
            exchange.send_header(name, value)
    exchange.end_headers()
    for byte in body:
        exchange.wfile.write(bytes([byte]))
        exchange.wfile.flush()
        if exchange.proxy.gone.wait(0.05):
            return


def swallowed(exchange: Exchange) -> None:
    """Never answered; the server never hears of it."""
    exchange.proxy.gone.wait(100)
    exchange.drop()


class Delayed:
    """The client loses its connection at once; the server hears of it when told to."""

    def __init__(self) -> None:
        self._exchange: Exchange | None = None

    def __call__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        exchange.drop()

    def apply(self) -> int:
        """The status that the server answers."""
        assert self._exchange is not None, "no such request came"
        return self._exchange.forward()[0]


def zombie(seconds: float) -> Fault:
    """The client loses its connection at once; the server hears of it so much later."""

    def fault(exchange: Exchange) -> None:
        exchange.drop()
        exchange.proxy.gone.wait(seconds)
        exchange.forward()

    return fault


class Held:
    """A request that goes on when told to."""

    def __init__(self, then: Fault = served) -> None:
        self.arrived = threading.Event()
        self._go_on = threading.Event()
        self._then = then

    def release(self) -> None:
        self._go_on.set()

    def __call__(self, exchange: Exchange) -> None:
        self.arrived.set()
        self._go_on.wait(100)
        self._then(exchange)


def sometimes(seed: float, *faults: tuple[float, Fault]) -> Fault:
    """Each fault with its probability; mostly nothing goes wrong."""
    dice = random.Random(seed)

    def fault(exchange: Exchange) -> None:
        thrown = dice.random()
        for probability, chosen in faults:
            thrown -= probability
            if thrown < 0:
                return chosen(exchange)
        served(exchange)

    return fault


class S3Proxy:
    """Forwards to a server; `script` says what happens to the next requests of each method."""

    def __init__(self, url: str) -> None:
        self.target = urlsplit(url).netloc
        self.seen: list[str] = []
        self.announced: list[str] = []
        self.usually: dict[str, Fault] = {}
        self.gone = threading.Event()
        self.of_the_check: Fault = served
        """What happens to the PUT beside the object by which a store tries the server."""
        self._scripts: dict[str, deque[Fault]] = {}
        handler = type("Bound", (Exchange,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def script(self, method: str, *faults: Fault) -> None:
        self._scripts[method] = deque(faults)

    def fault_for(self, method: str) -> Fault:
        script = self._scripts.get(method)
        return script.popleft() if script else self.usually.get(method, served)

    def puts(self) -> int:
        return self.seen.count("PUT")

    def close(self) -> None:
        self.gone.set()
        self._server.shutdown()
        self._server.server_close()
