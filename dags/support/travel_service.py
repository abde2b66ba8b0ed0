"""A travel agency over HTTP that keeps a ledger of every call and can be told to misbehave.

Run it with ``python -m support.travel_service --port 0 --ready-file F [--ledger F.jsonl]``. It binds to
loopback, unless ``--host`` says otherwise. Every path may be prefixed with ``/w/<name>``: a world of its own, with its
own effects, faults and ledger rows.

Resources
    ``flights hotels cars payments messages notes``, and ``/effects/<kind>`` for any other kind. ``messages`` cannot be
    undone (405). The header ``Idempotency-Key`` may be left out; the same key with another body, or an undo key used
    for something else, is 422: what was done under it stands.

    ========================================  =================================================================
    ``POST /<kind>``                          forward: an effect lands; 201, or 200 for a key that was seen
    ``DELETE /<kind>/<id>``                   undo by id: 200; 202 + token (later); 404 where nothing is there
    ``DELETE /<kind>?key=<forward key>``      undo of what was made under that key (one each call)
    ``POST /refunds``                         undo of a payment ({"payment": id} or {"payment_key": forward key})
    ``GET /refunds/<token>``                  lookup of a refund: {status: pending | settled | failed}
    ``GET /<kind>?key=<forward key>``         lookup: {landed: true | false | null, standing: n, effect}
    ``GET /<kind>/<id>``                      lookup by id
    ========================================  =================================================================

``POST /tell``: one JSON object ``{"do": word, …}``. These narrow it down:
    ``kind`` (default all), ``verb`` (forward | undo | lookup | *; default as the word suggests, mostly
    forward), ``key`` (the call's, or that of the effect an undo speaks of), ``trip``, ``skip`` (let the first n
    pass), ``times`` (the next n only, used up in the order told; default: until forgotten), ``for_seconds``.

    ================  ==================  =====================================================================
    word              the effect lands    the caller hears
    ================  ==================  =====================================================================
    pass              now                 the true answer (an exception to a wider fault)
    delay             now                 the true answer after ``seconds``
    late              after ``seconds``   the true answer then, be the client gone or not; with an earlier
                                          ``answer_after``: 202 "accepted"
    hold              now, or as          nothing until ``POST /release``, then the true answer; where nothing
                      ``lands`` says:     landed, or after ``seconds`` (60) without a release, the connection
                      never, release      is closed
    apply_and_drop    now                 the connection is closed without an answer
    drop              never               the same
    reset             never               the connection is reset (RST)
    refuse            never               ``status`` (409): proof that it was not applied
    fail              never               ``status`` (500); ``retry_after`` seconds go into the header
    lie               never               200, it worked; a lookup says the opposite of what is true
    stall             now                 headers, then nothing until released
    dribble           now                 the true answer, one byte each ``seconds``
    garble            now                 200 with something that is not JSON
    lag               (lookup)            not landed, for effects younger than ``seconds``
    unknown           (lookup)            landed: null
    ================  ==================  =====================================================================

    ``lands`` (now | never | seconds) overrides the second column where the pair makes sense, so ``fail`` with
    ``lands=now`` is a 500 after the effect; ``answer_after`` delays any answer. Manners, which go with any fault:

    ================  =========================================================================================
    ignore_keys       the same key twice is two effects; an undo repeated takes back twice
    missing_ok        an undo of something that is not there answers 200 instead of 404
    later             an undo answers 202 with a token and lands after ``seconds``, without them on ``POST /release``
                      (``outcome``: settled | failed)
    big               the answers of forward calls carry ``bytes`` more bytes, in ``blob``
    token             calls without ``Authorization: Bearer <token>`` get 401
    ================  =========================================================================================

Others: ``GET /tell`` (what was told, how often used), ``POST /forget`` {id?}, ``POST /release`` {kind, key, verb, land:
true | false}, ``GET /wait?received=<kind>:<n>`` (or landed, answered, gone; with verb, key, trip, timeout ≤ 30 s),
``GET /ledger`` and ``GET /net`` (kind, trip, …), ``POST /reset``, ``GET /health``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

if not __package__:  # run as a plain script: give the relative imports below their package
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "support"

from .controls import CONTROLS, BadRequest
from .effects import as_object
from .faults import FORWARD, LOOKUP, UNDO, Call, Rule
from .ledger import LedgerFile
from .service import PRESENCE_SECONDS, Exchange, Service, hold_seconds

RESOURCES = ("flights", "hotels", "cars", "payments", "messages", "notes")
LANDING_SECONDS = 30.0
"""How much longer than told an answer waits for its effect."""
LARGEST_REQUEST_BYTES = 80 * 1024 * 1024
LARGEST_KEPT_BODY_BYTES = 256 * 1024
DRIBBLED_BYTES = 600


class Handler(BaseHTTPRequestHandler):
    """Reads a request, leads the call through the service, and answers as it was told to."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    service: Service

    def do_GET(self) -> None:
        self._dispatch()

    do_POST = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """The ledger is the log."""

    def _dispatch(self) -> None:
        try:
            try:
                body, digest = self._read_body()
                world, path, query = self._split(self.path)
                control = CONTROLS.get((self.command, path))
                if control is not None:
                    said = control(self.service, world, query, body)
                else:
                    call = self._understand(path, query, body, digest)
            except BadRequest as problem:
                self._send(problem.status, {"error": str(problem)})
            except (ValueError, KeyError, TypeError) as problem:
                self._send(400, {"error": f"{type(problem).__name__}: {problem}"})
            else:
                if control is not None:
                    self._send(200, said)
                else:
                    self._take(world, call)
        except OSError:
            self.close_connection = True

    # -- reading ------------------------------------------------------------------------------------------------

    def _read_body(self) -> tuple[Any, str]:
        length = int(self.headers.get("Content-Length") or 0)
        if length > LARGEST_REQUEST_BYTES:
            self.close_connection = True
            raise BadRequest(413, f"at most {LARGEST_REQUEST_BYTES} bytes")
        raw = self.rfile.read(length)
        digest = hashlib.sha256(raw).hexdigest()[:16]
        body = json.loads(raw) if raw else None
        if len(raw) > LARGEST_KEPT_BODY_BYTES and self.command == "POST":
            trip = body.get("trip") if isinstance(body, dict) else None
            body = {"trip": trip, "bytes": len(raw), "sha256": digest}
        return body, digest

    @staticmethod
    def _split(target: str) -> tuple[str, str, dict[str, str]]:
        parts = urlsplit(target)
        world, path = "", parts.path.rstrip("/")
        if prefixed := re.fullmatch(r"/w/([^/]+)(/.*)?", path):
            world, path = unquote(prefixed[1]), prefixed[2] or ""
        return world, path, dict(parse_qsl(parts.query, keep_blank_values=True))

    def _understand(self, path: str, query: dict[str, str], body: Any, digest: str) -> Call:
        parts = [unquote(part) for part in path.split("/")[1:]]
        if parts[:1] == ["effects"]:
            parts = parts[1:]
        elif parts[:1] == ["refunds"]:
            parts = ["payments", *parts[1:]]
        elif not parts or parts[0] not in RESOURCES:
            raise BadRequest(404, f"no such resource: {path or '/'}")
        refund = path.startswith("/refunds") and self.command == "POST"
        if not 1 <= len(parts) <= 2 or "" in parts:
            raise BadRequest(404, f"no such resource: {path}")
        kind, ident = parts[0], parts[1] if len(parts) == 2 else None
        verb = UNDO if refund else {"POST": FORWARD, "DELETE": UNDO, "GET": LOOKUP}[self.command]
        key, of = self.headers.get("Idempotency-Key"), query.get("key")
        if refund:
            ident, of = (body or {}).get("payment"), (body or {}).get("payment_key")
        if verb == LOOKUP:
            key = of
        if verb == FORWARD and ident is not None:
            raise BadRequest(405, f"POST to /{kind}, not to /{kind}/<id>")
        if verb != FORWARD and ident is None and of is None:
            raise BadRequest(400, f"an {verb} of {kind} names an id or a ?key=")
        trip = body.get("trip") if isinstance(body, dict) else None
        trip = trip.get("id") if isinstance(trip, dict) else trip
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        return Call(
            method=self.command, path=self.path, verb=verb, kind=kind, key=key, id=ident, of=of, body=body,
            digest=digest, token=token, trip=None if trip is None else str(trip),
        )  # fmt: skip

    # -- a call -------------------------------------------------------------------------------------------------

    def _take(self, world: str, call: Call) -> None:
        service = self.service
        exchange = service.receive(world, call)
        wanted = exchange.behaviour.manners.get("token")
        if wanted is not None and call.token != wanted.told["token"]:
            self._answer(exchange, 401, {"error": "no valid token"})
            return
        fault = exchange.fault
        lands = fault.lands if fault else "now"
        if lands == "now":
            service.land(exchange)
        elif isinstance(lands, float):
            service.land_later(exchange, lands)
        hears = self._wait_as_told(exchange, fault) if fault else "answer"
        hear = getattr(self, f"_hear_{hears}")
        hear(exchange, fault)

    def _wait_as_told(self, exchange: Exchange, fault: Rule) -> str:
        """Let the time pass that the caller has to wait; returns what the caller then hears."""
        if fault.hears == "hold":
            self._pause(exchange, hold_seconds(fault), exchange.released)
            released = exchange.released.is_set()
            if released and fault.lands == "release" and exchange.lands_on_release:
                self.service.land(exchange)
            return "answer" if released and exchange.outcome is not None else "close"
        self._pause(exchange, fault.answer_after, threading.Event())
        if fault.hears == "answer" and isinstance(fault.lands, float) and "answer_after" not in fault.told:
            self._pause(exchange, fault.lands + LANDING_SECONDS, exchange.landed)
        return "answer" if fault.hears in ("lag", "unknown") else fault.hears

    def _pause(self, exchange: Exchange, seconds: float, until: threading.Event) -> None:
        """Wait for the event, at most so long, and notice when the client leaves meanwhile."""
        deadline, there = time.monotonic() + seconds, True
        while (left := deadline - time.monotonic()) > 0 and not until.wait(min(left, PRESENCE_SECONDS)):
            if there and not self._client_is_there():
                there = False
                self.service.client_left(exchange)

    def _client_is_there(self) -> bool:
        try:
            return len(self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)) > 0
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _hear_answer(self, exchange: Exchange, fault: Rule | None) -> None:
        outcome = exchange.outcome
        if outcome is None:
            self._answer(exchange, 202, {"status": "accepted"})
        else:
            self._answer(exchange, outcome.status, outcome.body, big=outcome.big)

    def _hear_status(self, exchange: Exchange, fault: Rule) -> None:
        body = {"error": fault.told.get("message") or f"told to {fault.do}"}
        after = fault.told.get("retry_after")
        self._answer(
            exchange, fault.status, body, headers={} if after is None else {"Retry-After": str(after)}
        )

    def _hear_lie(self, exchange: Exchange, fault: Rule) -> None:
        call, seq = exchange.call, exchange.seq
        forged = {
            **as_object(call.body or {}),
            "id": f"{call.kind}-{seq}",
            "kind": call.kind,
            "key": call.key,
        }
        if call.verb == FORWARD:
            self._answer(exchange, 201, {**forged, "status": "standing"})
        elif call.verb == UNDO:
            self._answer(exchange, 200, {**forged, "id": call.id, "status": "undone"})
        else:
            true = self.service.land(exchange).body
            opposite = {"landed": not true.get("landed"), "standing": 0 if true.get("standing") else 1}
            effect = forged if opposite["standing"] else None
            self._answer(exchange, 200, {"key": call.key, **opposite, "effect": effect})

    def _hear_close(self, exchange: Exchange, fault: Rule) -> None:
        self.service.answer(exchange, None, "closed", None, self._presence())
        self.close_connection = True

    def _hear_reset(self, exchange: Exchange, fault: Rule) -> None:
        self.service.answer(exchange, None, "reset", None, self._presence())
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.rfile.close()
        self.wfile.close()
        self.connection.close()

    def _hear_garble(self, exchange: Exchange, fault: Rule) -> None:
        self.service.answer(exchange, 200, "garbled", None, self._presence())
        self._write(200, b"<html>it works!", "text/html", {})

    def _hear_stall(self, exchange: Exchange, fault: Rule) -> None:
        outcome = exchange.outcome
        status, content = (outcome.status, json.dumps(outcome.body).encode()) if outcome else (200, b"{}")
        self._write(status, b"", "application/json", {}, length=len(content))
        self._pause(exchange, hold_seconds(fault), exchange.released)
        self.service.answer(exchange, status, "stalled", None, self._presence())
        if exchange.released.is_set():
            self._push(exchange, content)
        self.close_connection = True

    def _hear_dribble(self, exchange: Exchange, fault: Rule) -> None:
        outcome = exchange.outcome
        assert outcome is not None, "a dribbled answer has landed"
        content = json.dumps(outcome.body).encode().ljust(DRIBBLED_BYTES)
        self._write(outcome.status, b"", "application/json", {}, length=len(content))
        for at in range(len(content)):
            self._pause(exchange, fault.seconds, threading.Event())
            if not self._client_is_there() or not self._push(exchange, content[at : at + 1]):
                break
        self.service.answer(exchange, outcome.status, "dribbled", outcome.body, self._presence())
        self.close_connection = True

    # -- writing ------------------------------------------------------------------------------------------------

    def _presence(self) -> str:
        return "there" if self._client_is_there() else "gone"

    def _answer(
        self,
        exchange: Exchange,
        status: int,
        body: dict[str, Any],
        *,
        headers: dict[str, str] | None = None,
        big: int = 0,
    ) -> None:
        """Write the answer down, then send it; a client that is found gone only now is noted too."""
        self.service.answer(exchange, status, "answered", body, self._presence())
        content = json.dumps({**body, "blob": "x" * big} if big else body).encode()
        try:
            self._write(status, content, "application/json", headers or {})
        except OSError:
            self.service.client_left(exchange)
            self.close_connection = True

    def _push(self, exchange: Exchange, content: bytes) -> bool:
        try:
            self.wfile.write(content)
            self.wfile.flush()
        except OSError:
            self.service.client_left(exchange)
            return False
        return True

    def _send(self, status: int, body: Any) -> None:
        self._write(status, json.dumps(body).encode(), "application/json", {})

    def _write(
        self, status: int, content: bytes, kind: str, headers: dict[str, str], length: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    request_queue_size = 1024


def serve(port: int, ledger: Path | None, host: str = "127.0.0.1") -> Server:
    """Bind, and give back the server, which already listens."""
    handler = cast(type[Handler], type("BoundHandler", (Handler,), {"service": Service(LedgerFile(ledger))}))
    return Server((host, port), handler)


def _exit_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: let the system choose")
    parser.add_argument(
        "--ready-file", type=Path, help="gets {url, port, pid} as JSON once the service listens"
    )
    parser.add_argument(
        "--ledger", type=Path, help="append-only JSON lines; what is there already is read first"
    )
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="end when the starting process is gone"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if options.exit_with_parent:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    with serve(options.port, options.ledger, options.host) as server:
        port = server.server_address[1]
        url = f"http://{options.host}:{port}"
        if options.ready_file:
            partial = options.ready_file.with_suffix(".partial")
            partial.write_text(json.dumps({"url": url, "port": port, "pid": os.getpid()}))
            partial.replace(options.ready_file)
        print(url, flush=True)
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
