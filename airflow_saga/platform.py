"""What the runtime wants to know of Airflow, asked from inside a task through its supervisor; needs no credentials.

Never from a signal handler: the supervisor's channel is not re-entrant (a second ``send`` there blocks for ever).
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from airflow_saga.core.identity import compensation_dag_id, undo_run_id
from airflow_saga.core.marks import NO_TASK_FAILED, FailedRun, TaskEnd, tasks_show_mark

log = logging.getLogger(__name__)

_OVER = frozenset({"success", "failed"})
_CLEARED = frozenset({None, "restarting"})
_ENDED = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
"""The states of task instances that Airflow's breadcrumbs tell of."""


class SupervisorPlatform:
    """Any run, asked from inside any task."""

    def run_state(self, dag_id: str, run_id: str) -> str | None:
        run = self.run(dag_id, run_id)
        return None if run is None else str(getattr(run.state, "value", run.state))

    def run_clear_number(self, dag_id: str, run_id: str) -> int:
        run = self.run(dag_id, run_id)
        return 0 if run is None else int(run.clear_number or 0)

    def failed_run(self, dag_id: str, run_id: str) -> FailedRun:
        """Told from what became of its tasks; the audit log, which has it for certain, no task can read."""
        run = self.run(dag_id, run_id)
        over = (
            None
            if run is None or run.end_date is None
            else (datetime.now(UTC) - run.end_date).total_seconds()
        )
        shown = tasks_show_mark(_task_ends(dag_id, run_id))
        return FailedRun(shown or None, evidence=NO_TASK_FAILED if shown else "", over_seconds=over)

    def task_state(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
        from airflow.sdk.exceptions import AirflowRuntimeError
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        try:
            states = RuntimeTaskInstance.get_task_states(
                dag_id=dag_id, run_ids=[run_id], task_ids=[task_id], map_index=map_index
            )
        except AirflowRuntimeError as problem:
            if _not_found(problem):
                return None
            raise
        of_run = states.get(run_id) or {}
        return _word(next(iter(of_run.values()), None))

    def mapped_states(self, dag_id: str, run_id: str, task_id: str) -> dict[int, str | None]:
        """The states of the instances of a mapped task, by map index; empty before it was expanded."""
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        states = RuntimeTaskInstance.get_task_states(dag_id=dag_id, run_ids=[run_id], task_ids=[task_id])
        found = {key.removeprefix(f"{task_id}_"): state for key, state in (states.get(run_id) or {}).items()}
        return {int(index): _word(state) for index, state in found.items() if index.isdigit()}

    def trigger_undo(self, dag_id: str, run_id: str, request_uuid: UUID, *, reset: bool = False) -> bool:
        """Start the undo run of a request, or start it again if it is over; False if Airflow does not know its DAG."""
        from airflow.sdk.execution_time.comms import ErrorResponse, TriggerDagRun
        from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

        undo_dag_id, undo_id = compensation_dag_id(dag_id), undo_run_id(request_uuid)
        again = reset and self.run_state(undo_dag_id, undo_id) in _OVER
        answer = SUPERVISOR_COMMS.send(
            TriggerDagRun(
                dag_id=undo_dag_id,
                run_id=undo_id,
                conf={"run_id": run_id, "request": str(request_uuid)},
                logical_date=None,
                reset_dag_run=again,
            )
        )
        if isinstance(answer, ErrorResponse):
            if "ALREADY_EXISTS" in str(getattr(answer.error, "value", answer.error)).upper():
                return True
            log.warning("%s cannot be started for %s / %s: %s", undo_dag_id, dag_id, run_id, answer)
            return False
        return True

    def run(self, dag_id: str, run_id: str) -> Any:
        """The DAG run as Airflow tells its tasks of it; None if there is none."""
        from airflow.sdk.exceptions import AirflowRuntimeError
        from airflow.sdk.execution_time.comms import DagRunResult, GetDagRun
        from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

        try:
            answer = SUPERVISOR_COMMS.send(GetDagRun(dag_id=dag_id, run_id=run_id))
        except AirflowRuntimeError as problem:
            if _not_found(problem):
                return None
            raise
        return answer if isinstance(answer, DagRunResult) else None


class OwnTask:
    """One task instance, as the process that runs it asks about it."""

    def __init__(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> None:
        self.dag_id = dag_id
        self.run_id = run_id
        self.task_id = task_id
        self.map_index = map_index
        self._any = SupervisorPlatform()

    def task_state(self) -> str | None:
        return self._any.task_state(self.dag_id, self.run_id, self.task_id, self.map_index)

    def run_state(self) -> str | None:
        return self._any.run_state(self.dag_id, self.run_id)

    def trigger_undo(self, request_uuid: UUID) -> None:
        """The request is a row already: if Airflow cannot start its run now, the reconciler does within its minute."""
        from airflow.sdk.exceptions import AirflowRuntimeError

        try:
            started = self._any.trigger_undo(self.dag_id, self.run_id, request_uuid)
        except AirflowRuntimeError as problem:
            log.warning("the undo of %s / %s could not be started: %s", self.dag_id, self.run_id, problem)
            started = False
        if not started:
            log.warning("the undo of %s / %s waits for the reconciler to start it", self.dag_id, self.run_id)


def cleared_steps(dag_id: str, run_id: str) -> tuple[frozenset[str], frozenset[str]]:
    """Labels (``task`` or ``task[index]``) of the task instances of a run that are cleared, or never ran, now (one that
    was cleared while it ran is still being ended); and of mapped ones that are no more: the mapping has become shorter.

    Airflow answers with ``task_index`` for a mapped one, which may be the name of another task; then both are told.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states = RuntimeTaskInstance.get_task_states(dag_id=dag_id, run_ids=[run_id]).get(run_id) or {}
    cleared, removed = set(), set()
    for key, state in states.items():
        task_id, _, index = key.rpartition("_")
        label = f"{task_id}[{index}]" if index.isdigit() else key
        if _word(state) in _CLEARED:
            cleared.update((key, label))
        elif _word(state) == "removed" and label != key:
            removed.add(label)
    return frozenset(cleared), frozenset(removed)


def _task_ends(dag_id: str, run_id: str) -> list[TaskEnd]:
    """All task instances of a run: the states of all, and the durations of those that have ended."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states = RuntimeTaskInstance.get_task_states(dag_id=dag_id, run_ids=[run_id]).get(run_id) or {}
    ended = RuntimeTaskInstance.get_task_breadcrumbs(dag_id, run_id)
    ends = [TaskEnd(_word(task["state"]), task["duration"]) for task in ended]
    return ends + [TaskEnd(word, None) for word in map(_word, states.values()) if word not in _ENDED]


def _word(state: Any) -> str | None:
    return None if state is None else str(getattr(state, "value", state))


def _not_found(problem: Exception) -> bool:
    text = str(problem)
    return "404" in text or "not_found" in text.lower() or "not found" in text.lower()


def reschedule_date(seconds: float = 0.0) -> datetime:
    """When a task that gives its slot back may come again.

    Not sooner than twice the supervisor's heartbeat interval plus 5 s: an earlier one can meet the executor's late word
    about the process that just ended, and the scheduler then fails the task (measured on 3.3.2).
    """
    from airflow.configuration import conf

    interval = conf.getint("workers", "min_heartbeat_interval", fallback=5)
    return datetime.now(UTC) + timedelta(seconds=max(seconds, 2 * interval + 5))
