"""A saga told whole: the sentence, what stands, what to do, the timeline, the steps, the requests.

The data of ``--output json|yaml`` has the same parts under names that stay; programs read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from airflow_saga.cli.conversation import in_words
from airflow_saga.cli.display import Display, moment, short, span
from airflow_saga.cli.story import Move, Story
from airflow_saga.cli.timeline import Entry, forward_state, timeline
from airflow_saga.core.identity import compensation_dag_id
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.store.reader import SagaView


class Shown:
    """One saga, ready to be printed."""

    def __init__(
        self, view: SagaView, display: Display, now: datetime, *, start_alert_seconds: float = 300.0
    ) -> None:
        self.view = view
        self._display = display
        self._story = Story(view, display, now, start_alert_seconds=start_alert_seconds)
        self._timeline = timeline(view, display, now)
        self._labels = {step.step_id: step.label for step in view.steps}

    # -- for programs -------------------------------------------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        """Everything, as plain data; params and results masked, times with their offset."""
        return {
            "story": self._story.headline(),
            "saga": saga_data(self.view.saga, self._display),
            "standing": [standing.as_data() for standing in self._story.standing()],
            "next": [{"what": move.what, "command": move.command} for move in self._story.moves()],
            "timeline": [entry.as_data() for entry in self._timeline],
            "steps": [self._step(step) for step in self.view.steps],
            "actions": [self._action(action) for action in self.view.actions],
            "requests": [request_data(request, self._display) for request in self.view.requests],
        }

    def _step(self, step: StepRow) -> dict[str, Any]:
        return {
            "task_id": step.task_id,
            "map_index": step.map_index,
            "state": step.state,
            "generation": step.generation,
            "fence": step.fence,
            "try_number": step.try_number,
            "lease_until": step.lease_until,
            "host": step.host,
            "pid": step.pid,
            "dag_version": step.dag_version,
            "output": "<not stored>" if step.output_lost else self._display.value(step.output),
            "checkpoint": self._display.value(step.checkpoint),
            "attached_at": step.attached_at,
            "changed_at": step.changed_at,
        }

    def _action(self, action: ActionRow) -> dict[str, Any]:
        return {
            "action": action.action_id,
            "step": self._labels[action.step_id],
            "generation": action.generation,
            "seq": action.seq,
            "name": action.name,
            "version": action.version,
            "effect": action.effect,
            "state": action.state,
            "forward_state": forward_state(action),
            "residual": action.residual,
            "in_doubt": action.in_doubt,
            "tries": action.tries,
            "key": action.key,
            "params": self._display.value(action.params),
            "result": self._display.value(action.result),
            "result_lost": action.result_lost,
            "error": self._display.text(action.error),
            "begun_at": action.begun_at,
            "finished_at": action.finished_at,
            "lands_by": action.lands_by,
            "undo_key": action.undo_key,
            "undo_tries": action.undo_tries,
            "undo_begun_at": action.undo_begun_at,
            "undo_finished_at": action.undo_finished_at,
            "reconcile_at": action.reconcile_at,
            "waiting_for": self._display.text(action.waiting_for),
            "reopened": action.reopened,
            "twin_of": action.twin_of,
            "note": self._display.text(action.note),
        }

    # -- for people ---------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """The same for a terminal, most urgent first."""
        parts = [self._story.headline(), *self._moves(), *self._standing(), *self._history()]
        return "\n".join([*parts, *self._steps(), *self._requests()])

    def _moves(self) -> Iterator[str]:
        moves = self._story.moves()
        if moves:
            yield "\nWhat to do"
            yield from (f"  {line}" for move in moves for line in _told(move))

    def _standing(self) -> Iterator[str]:
        standing = self._story.standing()
        if not standing:
            return
        sure = sum(each.certain for each in standing)
        yield f"\nWhat stands: {sure} for sure, {len(standing) - sure} perhaps"
        by_id = {action.action_id: action for action in self.view.actions}
        for each in standing:
            action = by_id[each.action]
            yield f"  #{each.action} {each.name} of step {each.step} is {each.state}"
            yield f"      why   {each.why}"
            yield f"      call  {self._call(action)}"
            yield f"      keys  {action.key}" + (f", undo {action.undo_key}" if action.undo_key else "")
            for move in each.next:
                yield from (f"      {line}" for line in _told(move))

    def _call(self, action: ActionRow) -> str:
        result = "<not stored>" if action.result_lost else short(self._display.value(action.result))
        known = action.result is not None or action.result_lost
        told = in_words(action.name, self._display.value(action.params), self._display.value(action.result))
        if told is not None:
            return told
        return short(self._display.value(action.params)) + (f" → {result}" if known else "")

    def _history(self) -> Iterator[str]:
        yield "\nTimeline"
        for entry in self._timeline:
            yield "  " + _line(entry)
            yield from (f"        {detail}" for detail in _details(entry))

    def _steps(self) -> Iterator[str]:
        if self.view.steps:
            yield "\nSteps"
        for step in self.view.steps:
            where = f", on {step.host} pid {step.pid}" if step.host else ""
            lease = f", lease until {moment(step.lease_until)}" if step.lease_until else ""
            yield (
                f"  {step.label} is {step.state} since {moment(step.changed_at)}: try {step.try_number}, "
                f"generation {step.generation}, fence {step.fence}{where}{lease}"
            )

    def _requests(self) -> Iterator[str]:
        if self.view.requests:
            yield "\nUndo requests"
        for request in self.view.requests:
            yield f"  {request_line(request, self._display)}"
            times = (
                ("triggered", request.triggered_at),
                ("frozen", request.frozen_at),
                ("ended", request.ended_at),
                ("deadline", None if request.ended_at else request.deadline_at),
            )
            said = [f"{word} {moment(at)}" for word, at in times if at is not None]
            if request.owner_run_id:
                said.append(
                    f"by {compensation_dag_id(self.view.saga.dag_id)} / {self._display.text(request.owner_run_id)}"
                )
            if request.plan_hash:
                said.append(f"plan {request.plan_hash[:12]}")
            if said:
                yield f"      {', '.join(said)}"


# -- lines ------------------------------------------------------------------------------------------------------------


def _told(move: Move) -> Iterator[str]:
    yield f"→ {move.what}" + (":" if move.command else "")
    if move.command:
        yield f"    {move.command}"


def _line(entry: Entry) -> str:
    number = f"#{entry.action} " if entry.action else ""
    where = f" ({entry.step})" if entry.step else ""
    parts = [f"{moment(entry.at)}  {entry.kind:<7}  {number}{entry.what}{where}"]
    if entry.state:
        parts.append(entry.state)
    if entry.seconds is not None:
        parts.append(span(entry.seconds))
    if entry.tries and (entry.tries > 1 or entry.kind == "undo"):
        parts.append(f"{entry.tries} {'try' if entry.tries == 1 else 'tries'}")
    if entry.who:
        parts.append(f"by {entry.who}")
    return "  ".join(parts)


def _details(entry: Entry) -> Iterator[str]:
    told = in_words(entry.what, entry.params, entry.result)
    if told is not None:
        yield told
    elif entry.params is not None:
        result = f" → {short(entry.result)}" if entry.result is not None else ""
        yield f"{short(entry.params)}{result}"
    if entry.key:
        yield f"key {entry.key}"
    if entry.detail:
        yield short(entry.detail, 400)
    if entry.error:
        yield f"error: {short(entry.error, 400)}"


def request_line(request: RequestRow, display: Display) -> str:
    reason = f": {display.text(request.reason)}" if request.reason else ""
    scope = "the whole run" if request.whole_run else "some steps"
    now = ", now" if request.stop_now else ""
    return (
        f"{request.number}. {request.state}: {scope}{now}, asked for by {display.text(request.actor)} at "
        f"{moment(request.asked_at)}, cause {request.cause}{reason}"
    )


# -- data of rows -----------------------------------------------------------------------------------------------------


def saga_data(saga: SagaRow, display: Display) -> dict[str, Any]:
    return {
        "saga": saga.saga_id,
        "uuid": saga.saga_uuid,
        "dag_id": saga.dag_id,
        "run_id": saga.run_id,
        "state": saga.state,
        "mode": saga.mode,
        "cause": saga.cause,
        "actor": display.text(saga.actor),
        "reason": display.text(saga.reason),
        "clear_number": saga.clear_number,
        "on_failure": saga.on_failure,
        "on_compensation_failure": saga.on_compensation_failure,
        "stop_now": saga.stop_now,
        "deadline_at": saga.deadline_at,
        "created_at": saga.created_at,
        "changed_at": saga.changed_at,
    }


def request_data(request: RequestRow, display: Display) -> dict[str, Any]:
    return {
        "number": request.number,
        "uuid": request.request_uuid,
        "state": request.state,
        "whole_run": request.whole_run,
        "cause": request.cause,
        "actor": display.text(request.actor),
        "reason": display.text(request.reason),
        "stop_now": request.stop_now,
        "plan_hash": request.plan_hash,
        "plan": request.plan,
        "owner_run_id": request.owner_run_id,
        "asked_at": request.asked_at,
        "triggered_at": request.triggered_at,
        "frozen_at": request.frozen_at,
        "ended_at": request.ended_at,
        "deadline_at": request.deadline_at,
    }
