"""The pages: a run's saga, a step of it, the sagas of a DAG, and all that the viewer may see.

Rendered here, as text: what a model or the outside world said is never markup. A page asks for itself again while it is
open (``saga.js``) and swaps the parts that differ, so there is one way in which each thing is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from airflow_saga.core.identity import PROBE_RUN_PREFIX, forward_dag_id, request_uuid_of
from airflow_saga.core.records import ActionRow, StepRow
from airflow_saga.core.states import ActionState, SagaState, StepState
from airflow_saga.plugin.web import access
from airflow_saga.plugin.web.api import display, listed, store
from airflow_saga.settings import Settings
from airflow_saga.store.overview import Overview
from airflow_saga.store.reader import Reader, SagaView
from airflow_saga.telling.conversation import in_words
from airflow_saga.telling.display import Display, plain, short, span
from airflow_saga.telling.drawing import draw
from airflow_saga.telling.offers import offers, undoable_from
from airflow_saga.telling.story import Standing, Story
from airflow_saga.telling.timeline import call_seconds
from airflow_saga.telling.words import SAGA_WORDS, word_of

pages = APIRouter(include_in_schema=False)
HERE = Path(__file__).parent
STATIC = {"saga.css": "text/css", "saga.js": "text/javascript", "widget.js": "text/javascript"}
ROWS_PER_PAGE = 100
ListPage = Annotated[int, Query(ge=1, le=100)]
STANDING_SHOWN = 50
EVENTS_SHOWN = 100
_OVERDUE = ", longer than it may: it is stuck, and Stop now abandons it"
_MOVING = frozenset({SagaState.PENDING, SagaState.RUNNING, SagaState.CANCELLING})
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?\+00:00")
_ID_SIGNS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


# -- the pages --------------------------------------------------------------------------------------------------------


@pages.get("/")
def all_sagas(request: Request, user: GetUserDep, page: ListPage = 1) -> Response:
    return _list_page(request, access.visible_dags(user), None, page)


@pages.get("/dags/{dag_id}")
def sagas_of_dag(request: Request, user: GetUserDep, dag_id: str, page: ListPage = 1) -> Response:
    access.check(user, "GET", dag_id)
    # Of the DAG that undoes, the sagas are those of the DAG that it undoes.
    shown = forward_dag_id(dag_id) or dag_id
    access.check(user, "GET", shown)
    return _list_page(request, [shown], shown, page)


@pages.get("/dags/{dag_id}/runs/{run_id}")
def saga(
    request: Request,
    user: GetUserDep,
    dag_id: str,
    run_id: str,
    task_id: str | None = None,
    map_index: str = "-1",
    page: Annotated[int, Query(ge=1, le=100_000)] = 1,
) -> Response:
    """One saga, or one step of it."""
    access.check(user, "GET", dag_id)
    with store() as connection:
        reader = Reader(connection)
        if reader.find(dag_id, run_id) is None:
            return _no_saga(request, user, reader, dag_id, run_id)
        view, now = reader.view(dag_id, run_id), Overview(connection).now()
    return _SagaPage(view, display(), now, may_edit=access.may(user, "PUT", dag_id)).render(
        request, task_id, _index(map_index), page
    )


def _no_saga(request: Request, user: BaseUser, reader: Reader, dag_id: str, run_id: str) -> Response:
    """The page of a run without one; that of an undo leads to the run that it undoes."""
    forward, undone = forward_dag_id(dag_id), None
    uuid = request_uuid_of(run_id)
    if forward is not None and uuid is not None and access.may(user, "GET", forward):
        found = reader.request(uuid)
        undone = reader.by_id(found.saga_id).run_id if found is not None else None
    asks = run_id.startswith(PROBE_RUN_PREFIX)
    return _render(request, "none.html", forward=forward, undone=undone, asks=asks)


@pages.get("/static/{name}")
def static(name: str) -> Response:
    if name not in STATIC:
        raise HTTPException(404, "there is no such file")
    return Response((HERE / "static" / name).read_bytes(), media_type=STATIC[name])


def failed_page(request: Request, status: int, message: str) -> Response:
    """What stands in the tab instead of a page; a refusal of ours never replaces it by raw JSON."""
    return _render(request, "failed.html", status=status, message=message)


def _list_page(request: Request, dag_ids: Sequence[str], dag_id: str | None, page: int) -> Response:
    """Those that need a person come first, so the first page has what matters; one more tells if there is another."""
    found = listed(dag_ids, limit=page * ROWS_PER_PAGE + 1)[(page - 1) * ROWS_PER_PAGE :]
    rows = found[:ROWS_PER_PAGE]
    return _render(
        request,
        "list.html",
        dag_id=dag_id,
        waiting=[row for row in rows if row["needs"]],
        others=[row for row in rows if not row["needs"]],
        words=SAGA_WORDS,
        page=page,
        has_more=len(found) > ROWS_PER_PAGE,
    )


def _index(text: str) -> int:
    """As the placeholder of Airflow's frame leaves it: a number, or its own name where there is none."""
    try:
        return int(text)
    except ValueError:
        return -1


# -- one saga ---------------------------------------------------------------------------------------------------------


class _SagaPage:
    """One saga, made ready for its template."""

    def __init__(self, view: SagaView, display: Display, now: datetime, *, may_edit: bool) -> None:
        self.view = view
        self._display = display
        self._now = now
        self._may_edit = may_edit
        self._steps = {step.step_id: step for step in view.steps}
        self._undoable_from = undoable_from(view, now) if may_edit else frozenset()
        self._story = Story(view, display, now, start_alert_seconds=Settings.load().start_alert_seconds)

    def render(self, request: Request, task_id: str | None, map_index: int, page: int) -> Response:
        """:param task_id: only this step's actions; None: all of them."""
        view, saga = self.view, self.view.saga
        shown = [action for action in view.actions if self._is_of(action, task_id, map_index)]
        first = (page - 1) * ROWS_PER_PAGE
        standing = self._story.standing()
        return _render(
            request,
            "saga.html",
            saga=saga,
            word=SAGA_WORDS[saga.state],
            sentence=self._story.sentence(),
            waits=self._waits(),
            moves=[move for move in self._story.moves() if move.command is None],
            offers=list(offers(view, self._now)) if self._may_edit else [],
            standing=[self._stands(each) for each in standing[:STANDING_SHOWN]],
            more_standing=max(0, len(standing) - STANDING_SHOWN),
            may_edit=self._may_edit,
            drawing=draw(view, self._now),
            step=task_id,
            map_index=map_index,
            rows=[
                self._row(number, action)
                for number, action in enumerate(shown[first : first + ROWS_PER_PAGE], first + 1)
            ],
            total=len(shown),
            first=first,
            page=page,
            pages=max(1, -(-len(shown) // ROWS_PER_PAGE)),
            events=[self._event(event) for event in view.events[-EVENTS_SHOWN:]],
            is_moving=saga.state in _MOVING or any(request.ended_at is None for request in view.requests),
        )

    def _is_of(self, action: ActionRow, task_id: str | None, map_index: int) -> bool:
        step = self._steps[action.step_id]
        return task_id is None or (step.task_id == task_id and step.map_index == map_index)

    def _waits(self) -> list[str]:
        """While it stops: what is waited for, how long so far and until when at most."""
        if self.view.saga.state != SagaState.CANCELLING:
            return []
        actions = self.view.actions
        calls = [each for each in actions if each.state == ActionState.PENDING and not each.deferred]
        doubts = [each for each in actions if each.state == ActionState.IN_DOUBT and self._left(each) > 0]
        calling = {call.step_id for call in calls}
        told = [self._call_awaited(call) for call in calls]
        for doubt in doubts:
            left = _seconds(self._left(doubt))
            told.append(f"{self._named(doubt)}, which did not report and may take effect for {left} more")
        for step in self.view.steps:
            is_live = step.lease_until is not None and step.lease_until > self._now
            if step.state == StepState.RUNNING and is_live and step.step_id not in calling:
                told.append(f"the end of {step.label}, which has no call under way")
        return told

    def _call_awaited(self, action: ActionRow) -> str:
        until, left = "", self._left(action)
        if action.lands_by is not None:
            until = f", {_seconds(left)} more at most" if left > 0 else _OVERDUE
        so_far = _seconds((self._now - action.begun_at).total_seconds())
        return f"{self._named(action)}, {so_far} so far{until}"

    def _named(self, action: ActionRow) -> str:
        return f"{action.name} of {self._steps[action.step_id].label}"

    def _left(self, action: ActionRow) -> float:
        """Seconds for which a call may still take effect."""
        return 0.0 if action.lands_by is None else (action.lands_by - self._now).total_seconds()

    def _stands(self, standing: Standing) -> dict[str, Any]:
        action = next(action for action in self.view.actions if action.action_id == standing.action)
        return {
            "standing": standing,
            "word": word_of(action),
            "call": self._call(action),
            "is_awaited": action.reconcile_at is not None,
            "answers": [move for move in standing.next if move.answer] if self._may_edit else [],
            "waits": [move.what for move in standing.next if move.what.startswith("wait ")],
        }

    def _row(self, number: int, action: ActionRow) -> dict[str, Any]:
        step = self._steps[action.step_id]
        took = call_seconds(action, self._now)
        return {
            "number": number,
            "action": action,
            "step": step,
            "href": _task_href(self.view, step),
            "word": word_of(action),
            "call": self._call(action),
            "may_undo_from": action.action_id in self._undoable_from,
            "took": span(took) if took is not None else "",
            "params": _pretty(self._display.value(action.params)),
            "result": "<not stored>" if action.result_lost else _pretty(self._display.value(action.result)),
            "error": self._display.text(action.error),
            "note": self._display.text(action.note),
        }

    def _call(self, action: ActionRow) -> str:
        params = self._display.value(action.params)
        told = in_words(action.name, params, self._display.value(action.result))
        return short(told if told is not None else params, 120) if told or params else ""

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        step = self._steps.get(event["step_id"])
        return {
            "at": event["at"],
            "what": event["what"],
            "who": self._display.text(event["actor"]),
            "step": step.label if step else None,
            "detail": self._display.text(event["detail"]),
        }


def _seconds(seconds: float) -> str:
    """Whole ones: it is a number that somebody watches."""
    return f"{max(0, round(seconds))} s" if seconds < 60 else span(seconds)


def _pretty(value: Any) -> str | None:
    if value is None:
        return None
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False, indent=2)


def _task_href(view: SagaView, step: StepRow) -> str:
    """The task instance in Airflow's own pages, where its log is."""
    href = f"/dags/{quote(view.saga.dag_id, '')}/runs/{quote(view.saga.run_id, '')}/tasks/{quote(step.task_id, '')}"
    return href if step.map_index < 0 else f"{href}/mapped/{step.map_index}"


# -- rendering --------------------------------------------------------------------------------------------------------


def _with_times(text: str | None) -> Markup:
    """A text with its times marked as such, for the browser to show in the viewer's zone."""
    parts, last = [], 0
    for found in _TIME.finditer(text or ""):
        parts.append(Markup("{}").format((text or "")[last : found.start()]))
        stamp = found.group()
        parts.append(
            Markup('<time datetime="{}">{}</time>').format(stamp.replace(" ", "T"), stamp[:19] + " UTC")
        )
        last = found.end()
    parts.append(Markup("{}").format((text or "")[last:]))
    return Markup("").join(parts)


def _moment(at: datetime) -> Markup:
    utc = at.astimezone(UTC)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        utc.isoformat(), utc.isoformat(" ", "seconds")[:19]
    )


def _as_id(text: object) -> str:
    """Names as parts of element ids: a task id may hold anything."""
    return "".join(sign if sign in _ID_SIGNS else f".{ord(sign):x}." for sign in str(text))


_environment = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters |= {
    "times": _with_times,
    "moment": _moment,
    "as_id": _as_id,
    "segment": lambda text: quote(str(text), safe=""),
}


def _render(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    root = str(request.scope.get("root_path", "")).rstrip("/")
    html = _environment.get_template(template).render(root=root, status=status, **values)
    return HTMLResponse(html, status_code=status)
