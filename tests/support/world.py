"""The outside world of a test: a travel service in a process of its own, and a view of what it saw.

``World`` starts and stops the process; ``World.attach(url)`` is a view of one that runs (any process may have as many
as it likes); ``namespace(name)`` is a view of a part that shares nothing with the rest. What a test waits for, it
awaits (``await_received`` and its like end in an ``AssertionError`` that shows the ledger); nothing here sleeps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit

DAGS = Path(__file__).resolve().parents[2] / "dags"
START_SECONDS = 20.0

Row = dict[str, Any]


@dataclass(frozen=True)
class Net:
    """What stands: forward effects that landed minus undos that landed."""

    total: int
    kinds: dict[str, int]
    keys: dict[str, dict[str, dict[str, Any]]]
    undo_order: list[dict[str, Any]]
    standing: list[dict[str, Any]]
    promises: list[dict[str, Any]]

    def of(self, kind: str, key: str | None = None) -> int:
        """Give the net effect of a kind, or of one key of it (0 where nothing is known)."""
        if key is None:
            return self.kinds.get(kind, 0)
        return int(self.keys.get(kind, {}).get(key, {}).get("net", 0))

    def key(self, kind: str, key: str) -> dict[str, Any]:
        """Give calls, undo_calls, landed, undone, net, undo_keys and most_in_flight of one forward key."""
        return self.keys[kind][key]


class View:
    """A view of a running service, or of one namespace of it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def env(self) -> dict[str, str]:
        """Give the environment that makes ``support.travel`` call this world."""
        return {"TRAVEL_URL": self.url}

    def namespace(self, name: str | None = None) -> View:
        """Give a part of the world that shares nothing with the rest; without a name, a new one."""
        root = self.url.partition("/w/")[0]
        return View(f"{root}/w/{quote(name or uuid.uuid4().hex, safe='')}")

    # -- telling ------------------------------------------------------------------------------------------------

    def tell(self, do: str, kind: str = "*", **details: Any) -> int:
        """Tell the service how to treat calls (the vocabulary is in ``travel_service``); returns the rule's number."""
        return int(self.request("POST", "/tell", {"do": do, "kind": kind, **details})["id"])

    def told(self) -> list[dict[str, Any]]:
        return list(self.request("GET", "/tell")["told"])

    def forget(self, rule: int | None = None) -> int:
        """Forget one thing told, or all: the service behaves again. Returns how many were forgotten."""
        return int(self.request("POST", "/forget", {"id": rule})["forgotten"])

    def release(self, kind: str | None = None, *, land: bool = True, **which: str) -> int:
        """Let held calls go on; ``land=False``: those told to land on release never do. Returns how many."""
        return int(self.request("POST", "/release", {"kind": kind, "land": land, **which})["released"])

    def reset(self) -> None:
        """Forget everything of this namespace: effects, ledger rows, what was told, what is held."""
        self.request("POST", "/reset")

    # -- asking -------------------------------------------------------------------------------------------------

    def ledger(self, **wanted: str) -> list[Row]:
        """Give the calls in the order they came in; ``wanted``: kind, verb, key, of, trip, id."""
        return list(self.request("GET", f"/ledger?{urlencode(wanted)}")["calls"])

    def calls(self, kind: str = "*", **wanted: str) -> list[Row]:
        """Give the forward calls of a kind."""
        return self.ledger(kind=kind, verb="forward", **wanted)

    def undo_calls(self, kind: str = "*", **wanted: str) -> list[Row]:
        """Give the undo calls of a kind; ``of`` is the key of the forward call."""
        return self.ledger(kind=kind, verb="undo", **wanted)

    def lookups(self, kind: str = "*", **wanted: str) -> list[Row]:
        return self.ledger(kind=kind, verb="lookup", **wanted)

    def net(self, kind: str | None = None, trip: str | None = None) -> Net:
        wanted = {name: value for name, value in (("kind", kind), ("trip", trip)) if value is not None}
        return Net(**self.request("GET", f"/net?{urlencode(wanted)}"))

    # -- awaiting -----------------------------------------------------------------------------------------------

    def await_received(self, kind: str, n: int = 1, timeout: float = 30.0, **wanted: str) -> list[Row]:
        """Wait until n calls of the kind have come in (any verb, unless ``verb=`` says which); returns them."""
        return self._await("received", kind, n, timeout, wanted)

    def await_landed(self, kind: str, n: int = 1, timeout: float = 30.0, **wanted: str) -> list[Row]:
        """Wait until n calls of the kind have changed the world."""
        return self._await("landed", kind, n, timeout, wanted)

    def await_answered(self, kind: str, n: int = 1, timeout: float = 30.0, **wanted: str) -> list[Row]:
        """Wait until n calls of the kind are over, whether or not anybody heard the answer."""
        return self._await("answered", kind, n, timeout, wanted)

    def await_gone(self, kind: str, n: int = 1, timeout: float = 30.0, **wanted: str) -> list[Row]:
        """Wait until the clients of n calls of the kind have left before the answer."""
        return self._await("gone", kind, n, timeout, wanted)

    def _await(self, event: str, kind: str, n: int, timeout: float, wanted: dict[str, str]) -> list[Row]:
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            query = urlencode({event: f"{kind}:{n}", "timeout": min(left, 20.0), **wanted})
            got = self.request("GET", f"/wait?{query}", timeout=left + 10.0)
            if got["reached"]:
                return self.ledger(kind=kind, **wanted)
            if left == 0.0:
                seen = "\n".join(map(describe, self.ledger())) or "(no call at all)"
                raise AssertionError(
                    f"{event} {kind} {wanted or ''}: {got['count']} of {n} after {timeout} s; the ledger:\n{seen}"
                )

    # -- the wire -----------------------------------------------------------------------------------------------

    def request(self, method: str, path: str, body: Any = None, timeout: float = 30.0) -> dict[str, Any]:
        """Ask the service itself something; anything but 200 is an error of the test."""
        status, answer = self.call(method, path, body, timeout=timeout)
        if status != 200:
            raise ValueError(f"{method} {path}: {status} {answer}")
        return dict(answer)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        key: str | None = None,
        timeout: float = 30.0,
        **headers: str,
    ) -> tuple[int, Any]:
        """Make one bare call, as a client would; returns status and decoded answer."""
        parts = urlsplit(self.url)
        connection = HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=timeout)
        if key is not None:
            headers["Idempotency-Key"] = key
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, parts.path + path, content, headers)
            answer = connection.getresponse()
            raw = answer.read()
        finally:
            connection.close()
        return answer.status, json.loads(raw) if raw else None


class World(View):
    """The service's process: started on entering, ended on leaving; also ends when this process dies."""

    def __init__(self, ledger: Path | None = None) -> None:
        """Use a ledger file of the caller, or one in a temporary directory of its own."""
        super().__init__("")
        self._directory = tempfile.TemporaryDirectory(prefix="travel-")
        self.ledger_path = ledger or Path(self._directory.name) / "ledger.jsonl"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @staticmethod
    def attach(url: str) -> View:
        """Look at a service that another process started (its ``url``, with or without a namespace)."""
        return View(url)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the world was not started"
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._directory.cleanup()

    def start(self) -> None:
        """Start the service; on the same port and ledger, if it ran before."""
        ready = Path(self._directory.name) / f"ready-{uuid.uuid4().hex}.json"
        log = Path(self._directory.name) / "service.log"
        command = [sys.executable, "-m", "support.travel_service", "--port", str(self._port)]
        command += ["--ready-file", str(ready), "--ledger", str(self.ledger_path), "--exit-with-parent"]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, cwd=DAGS, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the travel service did not start: {log.read_text(errors='replace')}")
            time.sleep(0.02)
        said = json.loads(ready.read_text())
        self.url, self._port = said["url"], said["port"]

    def stop(self) -> None:
        """End the service politely, else by force."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the service: what is in the ledger file is all that is left of it."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            os.kill(self._process.pid, how)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def describe(row: Row) -> str:
    """Say one ledger row in one line."""
    answered = row["status"] or row["heard"] or "no answer yet"
    return (
        f"{row['seq']:>5} {row['at']} {row['verb']} {row['kind']} key={row['key']} of={row['of']} id={row['id']} "
        f"landed={row['landed']:+d} -> {answered} client={row['client']} fault={row['fault']}"
    )


def overlaps(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Give the pairs of calls that were in flight at the same time, by the service's own order of events."""
    pairs = []
    for at, first in enumerate(rows):
        end = first["answered_seq"] or float("inf")
        pairs += [(first, later) for later in rows[at + 1 :] if later["seq"] < end]
    return pairs


@contextmanager
def running_world() -> Iterator[World]:
    """Give a running service; meant for a fixture of session scope."""
    with World() as world:
        yield world


@contextmanager
def fresh_namespace(world: View, environment: Any = None) -> Iterator[View]:
    """Give one test its own namespace, and point ``TRAVEL_URL`` at it where a monkeypatch is given."""
    view = world.namespace()
    if environment is not None:
        environment.setenv("TRAVEL_URL", view.url)
    try:
        yield view
    finally:
        view.forget()
        view.release(land=False)
