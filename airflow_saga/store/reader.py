"""Everything that only reads: for people (list, show), for the reconciler, for doctor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from airflow_saga.core.errors import UnknownSagaError
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import ActionState, StepState
from airflow_saga.store.queries import Q
from airflow_saga.store.rewind import RewindVerbs
from airflow_saga.store.rows import PROBE_ASKED, dicts, many, one
from airflow_saga.store.scope import plan_of_scope


@dataclass(frozen=True)
class SagaView:
    """One saga as a whole, read in one snapshot."""

    saga: SagaRow
    steps: tuple[StepRow, ...]
    actions: tuple[ActionRow, ...]
    requests: tuple[RequestRow, ...]
    events: tuple[dict[str, Any], ...]

    @property
    def residual(self) -> tuple[ActionRow, ...]:
        return tuple(action for action in self.actions if action.residual)

    @cached_property
    def probes(self) -> dict[int, dict[str, Any]]:
        """By action in doubt: the event of what its probe last said, if that was since it fell into doubt."""
        doubtful = {row.action_id: row for row in self.actions if row.state == ActionState.IN_DOUBT}
        return {
            event["action_id"]: event
            for event in self.events
            if event["what"] == PROBE_ASKED and _is_newer(event, doubtful.get(event["action_id"]))
        }

    def step_of(self, action: ActionRow) -> StepRow:
        return next(step for step in self.steps if step.step_id == action.step_id)


def _is_newer(event: dict[str, Any], action: ActionRow | None) -> bool:
    return action is not None and (action.finished_at is None or event["at"] > action.finished_at)


class Plan(NamedTuple):
    """What an undo would do.

    :ivar steps: as it would be frozen. :ivar digest: the hash by which a person signs it.
    :ivar view: of the saga, at the same moment.
    """

    steps: dict[str, Any]
    digest: str
    view: SagaView


class Reader:
    """Reads only; any thread's own connection will do."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    def find(self, dag_id: str, run_id: str) -> SagaRow | None:
        return one(self.connection, SagaRow, Q.saga_by_run, {"dag_id": dag_id, "run_id": run_id})

    def saga(self, dag_id: str, run_id: str) -> SagaRow:
        """:raises UnknownSagaError: there is none."""
        found = self.find(dag_id, run_id)
        if found is None:
            raise UnknownSagaError(
                f"there is no saga {dag_id} / {run_id} in the store: none of its steps has begun, or the names differ. "
                f"See: airflow saga list"
            )
        return found

    def by_id(self, saga_id: int) -> SagaRow:
        found = one(self.connection, SagaRow, Q.saga_by_id, {"saga_id": saga_id})
        if found is None:
            raise UnknownSagaError(f"there is no saga with number {saga_id}")
        return found

    def view(self, dag_id: str, run_id: str) -> SagaView:
        """A saga with its steps, actions, requests and history, consistent in itself."""
        with self.connection.transaction():
            self.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            return self._view_of(self.saga(dag_id, run_id))

    def _view_of(self, saga: SagaRow) -> SagaView:
        key = {"saga_id": saga.saga_id}
        return SagaView(
            saga,
            tuple(many(self.connection, StepRow, Q.steps_of_saga, key)),
            tuple(many(self.connection, ActionRow, Q.all_actions_of_saga, key)),
            tuple(many(self.connection, RequestRow, Q.requests_of_saga, key)),
            tuple(dicts(self.connection, Q.events_of_saga, key)),
        )

    def sagas(
        self, *, dag_ids: Sequence[str] | None = None, states: Sequence[str] | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        """Newest first; ``standing``: how many effects stand in one that is, or was, being undone."""
        params = {
            "dag_ids": None if dag_ids is None else list(dag_ids),
            "states": list(states) if states else None,
            "limit": limit,
        }
        return dicts(self.connection, Q.list_sagas, params)

    def plan(self, dag_id: str, run_id: str, from_action: int | None = None) -> Plan:
        """What an undo of the whole run, or from an action on, would do now. Calls nothing."""
        with self.connection.transaction():
            self.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            saga = self.saga(dag_id, run_id)
            if from_action is None:
                steps, digest = plan_of_scope(self.connection, saga, None)
            else:
                steps, digest = RewindVerbs(self.connection).plan_from(saga, from_action)
            return Plan(steps, digest, self._view_of(saga))

    def request(self, request_uuid: UUID) -> RequestRow | None:
        return one(self.connection, RequestRow, Q.find_request, {"request_uuid": request_uuid})

    def requests(self, saga_id: int) -> list[RequestRow]:
        """All wishes to undo it that there ever were, oldest first."""
        return many(self.connection, RequestRow, Q.requests_of_saga, {"saga_id": saga_id})

    def steps(self, saga_id: int) -> list[StepRow]:
        return many(self.connection, StepRow, Q.steps_of_saga, {"saga_id": saga_id})

    def step(self, saga_id: int, task_id: str, map_index: int) -> StepRow | None:
        params = {"saga_id": saga_id, "task_id": task_id, "map_index": map_index}
        return one(self.connection, StepRow, Q.step_of_saga, params)

    def actions_of_step(self, step: StepRow) -> list[ActionRow]:
        """The actions of this generation, in order."""
        params = {"step_id": step.step_id, "generation": step.generation}
        return many(self.connection, ActionRow, Q.actions_of_step, params)

    def action(self, action_id: int) -> ActionRow | None:
        return one(self.connection, ActionRow, Q.read_action_row, {"action_id": action_id})

    def residual(self, saga_id: int) -> list[ActionRow]:
        return many(self.connection, ActionRow, Q.residual_of_saga, {"saga_id": saga_id})

    def left_by_undo(self, saga_id: int) -> list[ActionRow]:
        """What stands though it was to be undone: without what stands since it came before a place."""
        closed = {
            step.step_id
            for step in self.steps(saga_id)
            if step.state in (StepState.PARTLY_UNDONE, StepState.UNDOING)
        }
        return [row for row in self.residual(saga_id) if row.step_id in closed and not row.kept]

    def indexes_to_undo(self, request: RequestRow, task_id: str) -> list[int]:
        """The map indexes of this task that have something to undo in this request."""
        rows = dicts(
            self.connection, Q.indexes_to_undo, {"request_id": request.request_id, "task_id": task_id}
        )
        return [row["map_index"] for row in rows]

    # -- for the reconciler and doctor ------------------------------------------------------------------------------

    def requests_to_trigger(self, *, silent_seconds: float, limit: int = 200) -> list[dict[str, Any]]:
        return dicts(
            self.connection, Q.requests_to_trigger, {"silent_seconds": silent_seconds, "limit": limit}
        )

    def sagas_to_read(self, *, after_id: int = 0, limit: int = 200) -> list[SagaRow]:
        return many(self.connection, SagaRow, Q.sagas_to_read, {"after_id": after_id, "limit": limit})

    def lost_leases(self, *, limit: int = 500) -> list[dict[str, Any]]:
        return dicts(self.connection, Q.lost_leases, {"limit": limit})

    def lost_a_worker(self, saga_id: int) -> bool:
        """Whether a step of this saga has stopped because its process was lost."""
        return bool(dicts(self.connection, Q.lost_a_worker, {"saga_id": saga_id}))

    def sagas_past_deadline(self, *, limit: int = 200) -> list[SagaRow]:
        return many(self.connection, SagaRow, Q.sagas_past_deadline, {"limit": limit})

    def sagas_to_suspend(self, *, limit: int = 200) -> list[SagaRow]:
        return many(self.connection, SagaRow, Q.sagas_to_suspend, {"limit": limit})

    def due_sagas(self, *, limit: int = 200) -> list[dict[str, Any]]:
        return dicts(self.connection, Q.due_actions, {"limit": limit})

    def components(self) -> list[dict[str, Any]]:
        return dicts(self.connection, Q.components, {})
