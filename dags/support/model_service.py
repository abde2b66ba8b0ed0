"""A model behind the OpenAI protocol that says what its script tells it, and keeps a ledger of what it was asked.

Run it with ``python -m support.model_service --port 0 --ready-file F``. It binds to loopback, unless ``--host`` says
otherwise. It keeps no state of a conversation: which turn of the script comes next is read from the messages (how many
answers of the assistant follow the newest message of the user), so a turn that is asked again is answered again, and
the ledger shows it.

``POST /scripts/<model>``: ``{"turns": [turn, …], "chunk_chars": 6, "chunk_seconds": 0.0}``; a turn has ``text`` and/or
``tool_calls: [{"name": …, "arguments": {…}}]``. A script may have several: ``turns`` of the second message of the user
follow under ``"then": [[turn, …], …]``. ``--scripts F`` starts with those of a file, ``{"<model>": script, …}``.

``POST /tell``: ``{"model": m, "do": word, "turn": n (default: any), "times": n (default 1), …}``

    =================  ========================================================================================
    status             answers with ``status`` (429, 500, …) and nothing else
    hold               streams ``after`` chunks, then waits until the client is gone (or 60 s)
    stall              sends headers and then nothing until the client is gone (or 60 s)
    dribble            one character every ``seconds``, for ever
    end                streams ``after`` chunks, then ends the answer as if it were whole
    break              streams ``after`` chunks, then cuts the connection
    silent             answers well, but never tells its usage
    =================  ========================================================================================

``GET /ledger``: one row per request, as :class:`Row` has it. ``GET /wait?chunks=n`` answers once a request has sent so
many chunks. A history that a provider would refuse (a tool's call without its result right after it, or a result
without its call) is answered with 400, as providers do.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

LONGEST_HOLD_SECONDS = 60.0
DEFAULT_CHUNK_CHARS = 6


@dataclass
class Row:
    """One request, as it went."""

    number: int
    model: str
    turn: int
    messages: list[dict[str, Any]]
    tools: list[str]
    streamed: bool
    begun: float
    chunks: int = 0
    completed: bool = False
    status: int = 200
    usage_told: bool = True
    client_left: float | None = None
    """Seconds since the epoch when the client's end of the connection was seen to be closed."""


@dataclass
class Told:
    model: str
    do: str
    turn: int | None
    times: int
    more: dict[str, Any]


@dataclass
class Service:
    """All that the requests share."""

    scripts: dict[str, dict[str, Any]] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def open_row(self, model: str, turn: int, body: dict[str, Any]) -> Row:
        with self.changed:
            tools = [tool["function"]["name"] for tool in body.get("tools") or []]
            row = Row(
                len(self.rows),
                model,
                turn,
                body["messages"],
                tools,
                bool(body.get("stream")),
                time.time(),
            )
            self.rows.append(row)
            return row

    def note(self, row: Row, **changes: Any) -> None:
        with self.changed:
            for name, value in changes.items():
                setattr(row, name, value)
            self.changed.notify_all()

    def fault(self, model: str, turn: int) -> Told | None:
        with self.changed:
            for told in self.told:
                if told.model == model and told.turn in (None, turn) and told.times > 0:
                    told.times -= 1
                    return told
        return None

    def wait(self, chunks: int, seconds: float, after: int, model: str | None) -> bool:
        """Until a request of the model, not one of its first ``after``, has sent that many chunks."""

        def reached() -> bool:
            rows = [row for row in self.rows if model in (None, row.model)]
            return any(row.chunks >= chunks for row in rows[after:])

        with self.changed:
            return self.changed.wait_for(reached, timeout=seconds)


def turn_of(messages: list[dict[str, Any]]) -> tuple[int, int]:
    """Which message of the user this answers, and how many answers of the assistant followed it already."""
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    last = users[-1] if users else 0
    answers = sum(message["role"] == "assistant" for message in messages[last:])
    return max(0, len(users) - 1), answers


def refusal(messages: list[dict[str, Any]]) -> str | None:
    """What a provider says of a history in which calls and results do not pair up."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return f"messages with role 'tool' must answer a call: {message['tool_call_id']}"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return f"tool calls without a result: {', '.join(waiting)}"
        waiting = [call["id"] for call in message.get("tool_calls") or []]
    return f"tool calls without a result: {', '.join(waiting)}" if waiting else None


def pieces(turn: dict[str, Any], size: int, number: int) -> list[dict[str, Any]]:
    """The deltas of one answer, text and the arguments of its calls cut into pieces."""
    text = turn.get("text", "")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": text[i : i + size]} for i in range(0, len(text), size)]
    for index, call in enumerate(turn.get("tool_calls") or []):
        arguments = json.dumps(call["arguments"])
        head = {"id": f"call_{number}_{index}", "type": "function"}
        deltas.append(
            {"tool_calls": [{"index": index, **head, "function": {"name": call["name"], "arguments": ""}}]}
        )
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": arguments[i : i + size]}}]}
            for i in range(0, len(arguments), size)
        ]
    return deltas


class ClientGone(Exception):
    pass


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    service: Service

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(where.query).items()}
        if where.path == "/health":
            self._json(200, {"ok": True, "pid": os.getpid()})
        elif where.path == "/ledger":
            with self.service.changed:
                self._json(200, {"requests": [asdict(row) for row in self.service.rows]})
        elif where.path == "/wait":
            seconds = min(float(query.get("timeout", 30)), LONGEST_HOLD_SECONDS)
            reached = self.service.wait(
                int(query["chunks"]), seconds, int(query.get("after", 0)), query.get("model")
            )
            self._json(200, {"reached": reached})
        else:
            self._json(404, {"error": {"message": f"nothing at {where.path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        path = urlsplit(self.path).path
        if path.startswith("/scripts/"):
            with self.service.changed:
                self.service.scripts[path.removeprefix("/scripts/")] = body
            self._json(200, {})
        elif path == "/tell":
            more = {k: v for k, v in body.items() if k not in ("model", "do", "turn", "times")}
            told = Told(body["model"], body["do"], body.get("turn"), body.get("times", 1), more)
            with self.service.changed:
                self.service.told.append(told)
            self._json(200, {})
        elif path == "/reset":
            with self.service.changed:
                self.service.told.clear()
                self.service.rows.clear()
            self._json(200, {})
        elif path.endswith("/chat/completions"):
            self._complete(body)
        else:
            self._json(404, {"error": {"message": f"nothing at {path}"}})

    # -- one answer of the model --------------------------------------------------------------------------------------

    def _complete(self, body: dict[str, Any]) -> None:
        service, model = self.service, body["model"]
        said, turn = turn_of(body["messages"])
        row = service.open_row(model, turn, body)
        problem = refusal(body["messages"])
        fault = service.fault(model, turn)
        script = service.scripts.get(model)
        if problem is not None or script is None:
            service.note(row, status=400)
            self._json(400, {"error": {"message": problem or f"no script for the model {model}"}})
            return
        if fault is not None and fault.do == "status":
            status = int(fault.more.get("status", 500))
            service.note(row, status=status)
            self._json(status, {"error": {"message": f"told to answer {status}"}})
            return
        follow_ups = [script["turns"], *script.get("then", [])]
        turns = follow_ups[min(said, len(follow_ups) - 1)]
        answer = turns[min(turn, len(turns) - 1)]
        try:
            if body.get("stream"):
                self._stream(row, answer, script, fault, body)
            else:
                self._whole(row, answer)
        except (ClientGone, OSError):
            if row.client_left is None:
                service.note(row, client_left=time.time())
            self.close_connection = True

    def _whole(self, row: Row, turn: dict[str, Any]) -> None:
        calls = [
            {
                "id": f"call_{row.number}_{index}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for index, call in enumerate(turn.get("tool_calls") or [])
        ]
        message = {"role": "assistant", "content": turn.get("text") or None}
        if calls:
            message["tool_calls"] = calls  # type: ignore[assignment]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        head = {"id": f"chat_{row.number}", "object": "chat.completion", "created": int(row.begun)}
        self._json(200, {**head, "model": row.model, "choices": [choice], "usage": _usage(row, 10)})
        self.service.note(row, completed=True)

    def _stream(
        self,
        row: Row,
        turn: dict[str, Any],
        script: dict[str, Any],
        fault: Told | None,
        body: dict[str, Any],
    ) -> None:
        do, more = (fault.do, fault.more) if fault else ("", {})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if do == "stall":
            self._until_gone(row, LONGEST_HOLD_SECONDS)
            return
        size = 1 if do == "dribble" else int(script.get("chunk_chars", DEFAULT_CHUNK_CHARS))
        pause = float(more.get("seconds", 1.0) if do == "dribble" else script.get("chunk_seconds", 0.0))
        deltas = pieces(turn, size, row.number)
        if do == "dribble":
            deltas = deltas[:1] + [{"content": "."}] * 10_000
        for delta in deltas:
            if row.chunks == more.get("after"):
                break
            self._send(row, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            self._until_gone(row, pause)
        if do == "hold":
            self._until_gone(row, LONGEST_HOLD_SECONDS)
            return
        if do == "break":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if do != "end":
            reason = "tool_calls" if turn.get("tool_calls") else "stop"
            self._send(row, {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
            if do == "silent":
                self.service.note(row, usage_told=False)
            elif (body.get("stream_options") or {}).get("include_usage"):
                self._send(row, {"choices": [], "usage": _usage(row, len(deltas))})
        self._raw(b"data: [DONE]\n\n")
        self._raw(b"")
        self.service.note(row, completed=do != "end")

    def _send(self, row: Row, event: dict[str, Any]) -> None:
        head = {"id": f"chat_{row.number}", "object": "chat.completion.chunk", "created": int(row.begun)}
        self._raw(b"data: " + json.dumps({**head, "model": row.model, **event}).encode() + b"\n\n")
        self.service.note(row, chunks=row.chunks + 1)

    def _raw(self, data: bytes) -> None:
        """One piece of a chunked body; the empty one ends it."""
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _until_gone(self, row: Row, seconds: float) -> None:
        """Wait; the moment the client closes its end is what the ledger is for."""
        ready, _, _ = select.select([self.connection], [], [], seconds)
        if ready and self.connection.recv(1, socket.MSG_PEEK) == b"":
            self.service.note(row, client_left=time.time())
            raise ClientGone

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _usage(row: Row, completion: int) -> dict[str, int]:
    prompt = sum(len(str(message.get("content") or "")) for message in row.messages) // 4 + 1
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is what this service is for; anything else is told."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def serve(port: int = 0, host: str = "127.0.0.1", scripts: dict[str, dict[str, Any]] | None = None) -> Server:
    """A server that is not started yet; ``server_address[1]`` is its port."""
    handler = type("BoundHandler", (Handler,), {"service": Service(scripts=dict(scripts or {}))})
    return Server((host, port), handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--scripts", type=Path)
    arguments = parser.parse_args()
    scripts = json.loads(arguments.scripts.read_text()) if arguments.scripts else None
    server = serve(arguments.port, arguments.host, scripts)
    if arguments.ready_file:
        url = f"http://{arguments.host}:{server.server_address[1]}"
        arguments.ready_file.write_text(json.dumps({"url": url}))
    server.serve_forever()


if __name__ == "__main__":
    main()
