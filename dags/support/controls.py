"""What a test or a demo says to the service and asks of it; none of this is in the ledger."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .service import HAPPENED, Service

LONGEST_WAIT_SECONDS = 30.0

Control = Callable[[Service, str, dict[str, str], Any], dict[str, Any]]


class BadRequest(Exception):
    """The request is not one of this service; nothing was written down."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _wait(service: Service, world: str, query: dict[str, str], body: Any) -> dict[str, Any]:
    event = next((name for name in HAPPENED if name in query), None)
    if event is None:
        raise BadRequest(400, f"wait for one of {', '.join(HAPPENED)}, as <kind>:<n>")
    kind, _, count = query[event].rpartition(":")
    seconds = min(float(query.get("timeout", LONGEST_WAIT_SECONDS)), LONGEST_WAIT_SECONDS)
    wanted = {name: query[name] for name in ("verb", "key", "trip") if name in query}
    got = service.wait(world, event, int(count), seconds, kind=kind or "*", **wanted)
    return {"reached": got >= int(count), "count": got}


def _release(service: Service, world: str, query: dict[str, str], body: Any) -> dict[str, Any]:
    said = body or {}
    let_go = service.release(
        world, said.get("kind"), said.get("key"), said.get("verb"), said.get("land", True)
    )
    return {"released": len(let_go), "calls": let_go}


def _ledger(service: Service, world: str, query: dict[str, str], body: Any) -> dict[str, Any]:
    if unknown := set(query) - {"kind", "verb", "key", "of", "trip", "id"}:
        raise BadRequest(400, f"the ledger has no column {', '.join(unknown)}")
    return {"calls": service.calls(world, **query)}


def _reset(service: Service, world: str, query: dict[str, str], body: Any) -> dict[str, Any]:
    service.reset(world)
    return {}


CONTROLS: dict[tuple[str, str], Control] = {
    ("GET", "/health"): lambda service, world, query, body: {"ok": True, "pid": os.getpid()},
    ("POST", "/tell"): lambda service, world, query, body: service.tell(world, body),
    ("GET", "/tell"): lambda service, world, query, body: {"told": service.told(world)},
    ("POST", "/forget"): lambda service, world, query, body: {
        "forgotten": service.forget(world, (body or {}).get("id"))
    },
    ("POST", "/release"): _release,
    ("GET", "/wait"): _wait,
    ("GET", "/ledger"): _ledger,
    ("GET", "/net"): lambda service, world, query, body: service.net(
        world, query.get("kind"), query.get("trip")
    ),
    ("POST", "/reset"): _reset,
}
