"""A resource of a web service: created by POST with an ``Idempotency-Key``, undone by DELETE.

.. code-block:: python

    book_hotel = http_resource("book_hotel", conn_id="hotels_api", path="/bookings", find="/bookings?key={key}")

    @task.saga
    def trip(saga: Saga):
        booking = book_hotel({"city": "Lisbon", "nights": 2})
        booking["id"], booking["body"]
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from airflow_saga.capsules import web
from airflow_saga.capsules.declare import declare, seconds_for_network
from airflow_saga.core.actions import Action
from airflow_saga.core.errors import CompensationRejected, NotApplied
from airflow_saga.core.records import ActionRecord, Applied, Later, ProbeAnswer, Unknown


def first(answer: Any) -> Any:
    """What a lookup shows: the first of a list, or the object itself; None where there is none."""
    return next(iter(answer), None) if isinstance(answer, list) else answer or None


@dataclass(frozen=True)
class HttpResource:
    """How the actions of one kind of resource talk to their service; see :func:`http_resource`."""

    conn_id: str
    path: str
    find: str | None
    id_field: str
    proofs: frozenset[int]
    timeout_seconds: float
    later_after: timedelta
    found: Callable[[Any], Any] = field(repr=False)

    def create(self, body: Any, key: str) -> dict[str, Any]:
        with web.opened(self.conn_id, self.timeout_seconds) as service:
            answer = service.act("POST", self.path, json=body, headers={"Idempotency-Key": key})
            web.refuse_or_doubt(answer, f"POST {self.path}", self.proofs)
            location = answer.headers.get("location")
            place = service.own_path(location, self.path) if location else None
            return self._resource(answer.json if answer.content else None, place)

    def verify(self, record: ActionRecord) -> ProbeAnswer:
        with web.opened(self.conn_id, self.timeout_seconds) as service:
            return self._look(service, record)

    def undo(self, record: ActionRecord) -> Later | None:
        name = f"the service of connection {self.conn_id!r}"
        with (
            web.waiting_for(name),
            web.opened(self.conn_id, self.timeout_seconds) as service,
        ):
            if record.later_token is not None:
                gone = isinstance(self._look(service, record), NotApplied)
                return None if gone else Later(record.later_token, after=self.later_after)
            path = self._place(service, record)
            if path is None:
                return None
            answer = service.ask("DELETE", path, headers={"Idempotency-Key": record.undo_key})
            if answer.status in web.GONE:
                return None
            web.reject_or_retry(answer, f"DELETE {path}", name)
            return Later(path, after=self.later_after) if answer.status == 202 else None

    def _place(self, service: web.Service, record: ActionRecord) -> str | None:
        """Where it is; None where a lookup by the key shows that there is nothing."""
        if record.result and record.result["path"]:
            return str(record.result["path"])
        seen = self._look(service, record)
        if isinstance(seen, NotApplied):
            return None
        if isinstance(seen, Applied) and seen.result["path"]:
            return str(seen.result["path"])
        raise CompensationRejected(
            f"nobody knows where what {record.name} (key {record.key}) has made is: the answer had neither "
            f"{self.id_field!r} nor Location, and find= does not tell. Look it up there, then resolve it"
        )

    def _look(self, service: web.Service, record: ActionRecord) -> ProbeAnswer:
        """By its place, where that is known; else by the key."""
        path = record.result["path"] if record.result else None
        if path is None:
            if self.find is None:
                return Unknown()
            path = self.find.format(key=quote(record.key, safe=""))
        answer = service.ask("GET", path)
        if answer.status in web.GONE:
            return NotApplied()
        if not answer.well:
            return Unknown()
        shown = self.found(answer.json)
        if shown is None:
            return NotApplied()
        if isinstance(shown, NotApplied | Unknown):
            return shown
        return Applied(self._resource(shown, record.result["path"] if record.result else None))

    def _resource(self, body: Any, place: str | None) -> dict[str, Any]:
        made_id = body.get(self.id_field) if isinstance(body, dict) else None
        if place is None and made_id is not None:
            place = f"{self.path.partition('?')[0]}/{quote(str(made_id), safe='')}"
        return {"id": made_id, "path": place, "body": body}


def http_resource(
    name: str,
    *,
    conn_id: str,
    path: str,
    find: str | None = None,
    found: Callable[[Any], Any] = first,
    id_field: str = "id",
    proofs: Collection[int] = web.PROOFS,
    later_after: timedelta = timedelta(minutes=1),
    timeout: timedelta | None = None,
    **options: Any,
) -> Action[Any, Any]:
    """An action ``create(body)`` that makes a resource, and gives ``{"id", "path", "body"}`` of it.

    :param conn_id: an Airflow HTTP connection: base URL, login, headers in its extra; a password alone is a bearer
        token.
    :param path: where to POST; what was made is undone at ``Location``, or at ``path/<id>``. A 202 to the DELETE is
        asked after later.
    :param find: the path that finds by the key, ``{key}`` in it; without it an action in doubt is called again with its
        key, which the service must know then.
    :param found: what the JSON of a lookup shows: the resource, None for "not there", or ``Unknown()``.
    :param proofs: statuses that prove that a POST did nothing.
    :param timeout: of one call, with all that is in it; default 10 s.
    :param options: as of :func:`airflow_saga.action`.
    """
    resource = HttpResource(
        conn_id,
        path,
        find,
        id_field,
        frozenset(proofs),
        seconds_for_network(timeout),
        later_after,
        found,
    )

    def create(body: Any, *, key: str) -> dict[str, Any]:
        return resource.create(body, key)

    if timeout is not None:
        options["timeout"] = timeout
    options.setdefault("idempotent", find is None)
    return declare(
        create, name, resource, compensate=resource.undo, verify=resource.verify if find else None, **options
    )
