"""A saga told whole as plain data: the sentence, what stands, what to do, the timeline, steps, actions, requests.

Names of parts stay: programs read them, from ``--output json|yaml`` and from the API alike.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.store.reader import SagaView
from airflow_saga.telling.display import Display
from airflow_saga.telling.story import Story
from airflow_saga.telling.timeline import forward_state, timeline


class Told:
    """One saga, ready to be shown; params and results masked, times with their offset."""

    def __init__(
        self, view: SagaView, display: Display, now: datetime, *, start_alert_seconds: float = 300.0
    ) -> None:
        self.view = view
        self.display = display
        self.story = Story(view, display, now, start_alert_seconds=start_alert_seconds)
        self.timeline = timeline(view, display, now)
        self._labels = {step.step_id: step.label for step in view.steps}

    def data(self) -> dict[str, Any]:
        """Everything, as plain data; params and results masked, times with their offset."""
        return {
            "story": self.story.headline(),
            "saga": saga_data(self.view.saga, self.display),
            "standing": [standing.as_data() for standing in self.story.standing()],
            "next": [{"what": move.what, "command": move.command} for move in self.story.moves()],
            "timeline": [entry.as_data() for entry in self.timeline],
            "steps": [self._step(step) for step in self.view.steps],
            "actions": [self._action(action) for action in self.view.actions],
            "requests": [request_data(request, self.display) for request in self.view.requests],
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
            "output": "<not stored>" if step.output_lost else self.display.value(step.output),
            "checkpoint": self.display.value(step.checkpoint),
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
            "params": self.display.value(action.params),
            "result": self.display.value(action.result),
            "result_lost": action.result_lost,
            "error": self.display.text(action.error),
            "begun_at": action.begun_at,
            "finished_at": action.finished_at,
            "lands_by": action.lands_by,
            "undo_key": action.undo_key,
            "undo_tries": action.undo_tries,
            "undo_begun_at": action.undo_begun_at,
            "undo_finished_at": action.undo_finished_at,
            "reconcile_at": action.reconcile_at,
            "waiting_for": self.display.text(action.waiting_for),
            "reopened": action.reopened,
            "twin_of": action.twin_of,
            "note": self.display.text(action.note),
        }


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
