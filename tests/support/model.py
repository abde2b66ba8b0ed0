"""A scripted model in this process, behind real HTTP: what it is told to say, and its ledger."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

from dags.support.model_service import serve

Turn = dict[str, Any]


def says(text: str) -> Turn:
    return {"text": text}


def calls(*called: tuple[str, dict[str, Any]], text: str = "") -> Turn:
    return {"text": text, "tool_calls": [{"name": name, "arguments": args} for name, args in called]}


class ModelView:
    """A view of a model service that runs, for one model of it: tests share a server, not a script."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model

    def script(self, *turns: Turn, then: list[list[Turn]] | None = None, **how: Any) -> None:
        self._post(f"/scripts/{self.model}", {"turns": list(turns), "then": then or [], **how})

    def tell(self, do: str, **more: Any) -> None:
        self._post("/tell", {"model": self.model, "do": do, **more})

    @property
    def requests(self) -> list[dict[str, Any]]:
        """What this model was asked, in order."""
        return [row for row in self._get("/ledger")["requests"] if row["model"] == self.model]

    @property
    def asked(self) -> int:
        return len(self.requests)

    def left_at(self, number: int, seconds: float = 10.0) -> float:
        """When the server saw that the client of a request had left, in seconds since the epoch."""
        deadline = time.monotonic() + seconds
        while (left := self.requests[number]["client_left"]) is None:
            assert time.monotonic() < deadline, f"its client is still there: {self.requests[number]}"
            time.sleep(0.01)
        return float(left)

    def await_chunks(self, chunks: int, after: int = 0, seconds: float = 20.0) -> None:
        """Until a request, not one of the first ``after``, has sent that many chunks."""
        query = urlencode(
            {"chunks": chunks, "after": after, "timeout": min(seconds, 25.0), "model": self.model}
        )
        deadline = time.monotonic() + seconds
        while not self._get(f"/wait?{query}")["reached"]:
            assert time.monotonic() < deadline, f"no request has sent {chunks} chunks: {self.requests}"

    def _post(self, path: str, body: Any) -> Any:
        return self._call("POST", path, json.dumps(body))

    def _get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def _call(self, method: str, path: str, body: str | None) -> Any:
        place = urlsplit(self.url)
        connection = HTTPConnection(place.hostname or "", place.port, timeout=30)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            told = json.loads(answer.read())
            assert answer.status == 200, told
            return told
        finally:
            connection.close()


@contextmanager
def running_model() -> Iterator[str]:
    """The address of a model service that runs in a thread of this process."""
    server = serve()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
