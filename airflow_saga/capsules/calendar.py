"""An event in a calendar (CalDAV): put where nothing is yet, and taken back only as long as nobody has edited it.

.. code-block:: python

    block_room = calendar_event("block_room", conn_id="calendars", calendar="/rooms/blue/")

    block_room("Interview", start, end)          # aware datetimes
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow_saga.capsules import web
from airflow_saga.capsules.declare import declare, seconds_for_network
from airflow_saga.core.actions import Action
from airflow_saga.core.errors import CompensationRejected, NotApplied
from airflow_saga.core.records import ActionRecord, Applied, ProbeAnswer, Unknown

_OF_THE_SERVER = ("PRODID", "DTSTAMP", "CREATED", "LAST-MODIFIED", "SEQUENCE:0", "VERSION", "CALSCALE")
"""Lines that a server may add or change without anybody having edited the event."""


@dataclass(frozen=True)
class CalendarEvent:
    """Where the events of one action go; see :func:`calendar_event`."""

    conn_id: str
    calendar: str
    timeout_seconds: float

    def put(self, params: dict[str, Any], key: str) -> dict[str, Any]:
        path = self._path(key)
        with web.opened(self.conn_id, self.timeout_seconds) as service:
            answer = service.act(
                "PUT",
                path,
                content=event_text(key, params).encode(),
                headers={"If-None-Match": "*", "Content-Type": "text/calendar; charset=utf-8"},
            )
            if answer.status == 412:
                return self._was_there(service, path, key, params)
            web.refuse_or_doubt(answer, f"PUT {path}")
            etag = answer.headers.get("etag")
            # A server that changes what it stores gives no ETag for what was sent (RFC 4791, 5.3.4).
            return {"path": path, "etag": etag or self._etag(service, path, key, params)}

    def verify(self, record: ActionRecord) -> ProbeAnswer:
        path = self._path(record.key)
        with web.opened(self.conn_id, self.timeout_seconds) as service:
            answer = service.ask("GET", path)
            if answer.status in web.GONE:
                return NotApplied()
            if not answer.well:
                return Unknown()
            return Applied({"path": path, "etag": _etag_unless_edited(answer, record.key, record.params)})

    def undo(self, record: ActionRecord) -> None:
        name = f"the calendar of connection {self.conn_id!r}"
        path, etag = self._path(record.key), (record.result or {}).get("etag")
        with (
            web.waiting_for(name),
            web.opened(self.conn_id, self.timeout_seconds) as service,
        ):
            if etag is None:
                there = service.ask("GET", path)
                if there.status in web.GONE:
                    return
                etag = _etag_unless_edited(there, record.key, record.params)
                if etag is None:
                    raise _edited(record.name, path)
            answer = service.ask("DELETE", path, headers={"If-Match": etag})
            if answer.status in web.GONE:
                return
            if answer.status == 412:
                raise _edited(record.name, path)
            web.reject_or_retry(answer, f"DELETE {path}", name)

    def _path(self, key: str) -> str:
        return f"{self.calendar.rstrip('/')}/{key}.ics"

    def _was_there(self, service: web.Service, path: str, key: str, params: dict[str, Any]) -> dict[str, Any]:
        """An earlier attempt has put it; what lies there otherwise is none of ours, and the key is nobody else's."""
        etag = self._etag(service, path, key, params)
        return {"path": path, "etag": etag}

    def _etag(self, service: web.Service, path: str, key: str, params: dict[str, Any]) -> str | None:
        answer = service.ask("GET", path)
        if not answer.well:
            raise web.AnswerError(f"GET {path} was answered with {answer.status} after its PUT")
        return _etag_unless_edited(answer, key, params)


def _edited(name: str, path: str) -> CompensationRejected:
    return CompensationRejected(
        f"{path}, which {name} has made, was edited by somebody since; it was left as it is. Look at it, delete it "
        f"if it may go, then resolve the action"
    )


def event_text(key: str, params: Any) -> str:
    """The event as iCalendar; the same for the same call, in each of its attempts."""
    lines = [
        "BEGIN:VCALENDAR",
        "VERSION:2.0",
        "PRODID:-//airflow-saga//calendar//EN",
        "BEGIN:VEVENT",
        f"UID:{key}",
        f"DTSTAMP:{_time(params['start'])}",
        f"DTSTART:{_time(params['start'])}",
        f"DTEND:{_time(params['end'])}",
        f"SUMMARY:{_escaped(params['summary'])}",
    ]
    for name in ("description", "location"):
        if params[name]:
            lines.append(f"{name.upper()}:{_escaped(params[name])}")
    lines += ["END:VEVENT", "END:VCALENDAR", ""]
    return "\r\n".join(line for whole in lines for line in _folded(whole))


def _time(moment: datetime) -> str:
    if moment.tzinfo is None:
        raise NotApplied(f"{moment!r} has no time zone, so nobody knows when that is; nothing was put")
    return moment.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\\\").replace(";", "\\;").replace(",", "\\,")
    return text.replace("\r\n", "\n").replace("\n", "\\n")


def _folded(line: str) -> list[str]:
    """At most 75 octets each, as RFC 5545 wants it; what goes on begins with a space."""
    parts, part = [], ""
    for character in line:
        if len((part + character).encode()) > 74:
            parts.append(part)
            part = " "
        part += character
    return [*parts, part]


def _etag_unless_edited(answer: web.Answer, key: str, params: Any) -> str | None:
    """The ETag of what is there if it says what was put, else None: somebody has edited it."""
    text = answer.content.decode("utf-8", "replace")
    same = _said(text) == _said(event_text(key, params))
    return answer.headers.get("etag") if same else None


def _said(text: str) -> list[str]:
    unfolded = text.replace("\r\n", "\n").replace("\n ", "").replace("\n\t", "")
    return sorted(line for line in unfolded.splitlines() if line and not line.startswith(_OF_THE_SERVER))


def calendar_event(
    name: str, *, conn_id: str, calendar: str, timeout: timedelta | None = None, **options: Any
) -> Action[Any, Any]:
    """An action ``put(summary, start, end, description="", location="")`` that gives ``{"path", "etag"}``.

    An event that was edited since is not deleted: its undo is rejected, and a person gets it.

    :param conn_id: an Airflow HTTP connection to the CalDAV server.
    :param calendar: the path of the calendar's collection.
    :param timeout: of one call, with all that is in it; default 10 s.
    :param options: as of :func:`airflow_saga.action`.
    """
    event = CalendarEvent(conn_id, calendar, seconds_for_network(timeout))

    def put(
        summary: str, start: datetime, end: datetime, description: str = "", location: str = "", *, key: str
    ) -> dict[str, Any]:
        params = {"summary": summary, "start": start, "end": end}
        return event.put({**params, "description": description, "location": location}, key)

    if timeout is not None:
        options["timeout"] = timeout
    return declare(
        put, name, event, compensate=event.undo, verify=event.verify, **{"idempotent": True, **options}
    )
