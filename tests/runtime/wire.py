"""The line between a process and its Postgres: cut, gone silent, or losing just the answer to what was committed."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class Line:
    """A relay on a port of its own. ``url`` leads to the same database; the rest does things to the line.

    ``cut``: connections are reset and refused. ``silence``: nothing is passed on any more, and nobody is told, as when
    a firewall drops packets. ``lose_answers(n)``: each of the next n answers of the server is lost, and the connection
    with it. ``mend``: new connections work.
    """

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        assert target.hostname is not None
        assert target.port is not None
        self._target = (target.hostname, target.port)
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._cut = False
        self._silent: set[socket.socket] = set()
        self._silence_new = False
        self._losses = 0
        self._quiet_losses = 0
        self.connections = 0
        self.lost = 0
        port = self._server.getsockname()[1]
        self.url = (
            f"postgresql://{target.username}@127.0.0.1:{port}{target.path}?sslmode=disable&gssencmode=disable"
        )
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        with self._lock:
            self._cut = True
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _close(*pair)

    def mend(self) -> None:
        with self._lock:
            self._cut = False
            self._silence_new = False

    def silence(self, *, new: bool = False) -> None:
        """The connections there are go silent; ``new``: those to come too."""
        with self._lock:
            self._silence_new = new
            self._silent |= {end for pair in self._pairs for end in pair}

    def lose_answers(self, count: int = 1) -> None:
        with self._lock:
            self._losses = count

    # -- the relay ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self._cut:
                _close(client)
                continue
            with suppress(OSError):
                upstream = socket.create_connection(self._target, 10)
                with self._lock:
                    self.connections += 1
                    self._pairs.append((client, upstream))
                    if self._silence_new:
                        self._silent |= {client, upstream}
                for source, sink, answers in ((client, upstream, False), (upstream, client, True)):
                    threading.Thread(target=self._copy, args=(source, sink, answers), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        ready = not answers
        with suppress(OSError):
            while data := source.recv(65_536):
                if source in self._silent:
                    continue
                if ready and answers and self._loses():
                    break
                ready = ready or data[-6:-1] == b"Z\x00\x00\x00\x05"  # the session has begun
                sink.sendall(data)
        if source not in self._silent:
            _close(source, sink)

    def _loses(self) -> bool:
        with self._lock:
            lost = self._losses > 0
            self._losses -= lost
            self.lost += lost
        return lost


def _close(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
