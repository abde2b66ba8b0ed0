"""What may stand between a process and its Postgres: a relay that changes or swallows what the server says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

Change = Callable[[bytes], bytes | None]
"""What becomes of one message of the server, type and length included; None: it is swallowed."""


def shared_backend(message: bytes) -> bytes:
    """As behind a transaction pooler: the backend that answers is not the one the client was told of at its start."""
    if message[:1] == b"K":
        pid = int.from_bytes(message[5:9], "big")
        return message[:5] + (pid + 1).to_bytes(4, "big") + message[9:]
    return message


def no_notifications(message: bytes) -> bytes | None:
    return None if message[:1] == b"A" else message


@contextmanager
def relay(url: str, change: Change) -> Iterator[str]:
    """A URL that leads to the same database through a relay, as long as the block lasts."""
    target = urlsplit(url)
    assert target.hostname
    assert target.port
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(
        target=_accept, args=(server, (target.hostname, target.port), change), daemon=True
    ).start()
    try:
        port = server.getsockname()[1]
        yield f"postgresql://{target.username}@127.0.0.1:{port}{target.path}?sslmode=disable&gssencmode=disable"
    finally:
        server.close()


def _accept(server: socket.socket, target: tuple[str, int], change: Change) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return  # closed
        upstream = socket.create_connection(target, 10)
        threading.Thread(target=_copy, args=(client, upstream), daemon=True).start()
        threading.Thread(target=_copy_changed, args=(upstream, client, change), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError), sink:
        while data := source.recv(65_536):
            sink.sendall(data)


def _copy_changed(source: socket.socket, sink: socket.socket, change: Change) -> None:
    with suppress(OSError), sink, source.makefile("rb") as messages:
        while head := messages.read(5):
            message = head + messages.read(int.from_bytes(head[1:5], "big") - 4)
            if changed := change(message):
                sink.sendall(changed)
