"""A TCP proxy that can lose what a server answers."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy:
    """Forwards to a server. After `lose_next_answer()` the next answer is lost, with its
    connection.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._lose = threading.Event()
        self.lost = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_next_answer(self) -> None:
        self.lost.clear()
        self._lose.set()

    def close(self) -> None:
        self._listener.close()
        for connection in self._open:
            _shut(connection)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open += [client, server]
                for source, target, answers in ((client, server, False), (server, client, True)):
                    threading.Thread(
                        target=self._forward, args=(source, target, answers), daemon=True
                    ).start()

    def _forward(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if answers and self._lose.is_set():
                    self._lose.clear()
                    self.lost.set()
                    break
                target.sendall(data)
        _shut(source)
        _shut(target)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
