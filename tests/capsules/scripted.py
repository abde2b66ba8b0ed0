"""A web service that answers as it was told to, in order, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Said:
    """One answer. ``pause_seconds``: before each byte of its body."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    pause_seconds: float = 0.0


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: str


class Scripted:
    """See the module; where the script is at its end it answers 404."""

    def __init__(self) -> None:
        self.script: list[Said] = []
        self.asked: list[Asked] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def lines(self) -> list[str]:
        return [f"{each.method} {each.path}" for each in self.asked]


@contextmanager
def scripted() -> Iterator[Scripted]:
    service = Scripted()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length).decode()
            service.asked.append(Asked(self.command, self.path, dict(self.headers.items()), body))
            said = service.script.pop(0) if service.script else Said(404, {})
            content = b"" if said.body is None else json.dumps(said.body).encode()
            self.send_response(said.status)
            for name, value in {**said.headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for byte in content if said.pause_seconds else ():
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    time.sleep(said.pause_seconds)
                if not said.pause_seconds:
                    self.wfile.write(content)
            except OSError:
                self.close_connection = True

        do_GET = do_POST = do_PUT = do_DELETE = answer

        def log_message(self, *args: object) -> None:
            """What was asked is kept."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
