"""What makes an operator a step of the saga: one attempt of it, told to Airflow in Airflow's terms."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, Literal

from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
)

from airflow_saga.core import errors
from airflow_saga.core.records import ActionRow, Attempt
from airflow_saga.core.secret import set_secret_resolver
from airflow_saga.core.states import Effect
from airflow_saga.graph import ancestors_of, mapped_group_of, mapped_item, policy_of
from airflow_saga.platform import OwnTask, cleared_steps, reschedule_date
from airflow_saga.runtime import codec
from airflow_saga.runtime.recorder import Recorder
from airflow_saga.runtime.saga import Saga
from airflow_saga.runtime.step import StepCleared, StepGivenBack, StepResult, StepRun
from airflow_saga.settings import Settings, resolve_secret, secrets_of_this_process, store_address
from airflow_saga.telemetry import listen_in

SUMMARY_KEY = "saga"
MOST_ACTIONS_IN_SUMMARY = 200

NEVER_RETRIED = (
    errors.SagaCancelledError,
    errors.StepFencedError,
    errors.StepRefusedError,
    errors.InDoubtError,
    errors.SagaDivergedError,
    errors.ResultNotStoredError,
    errors.ActionFailedError,
    errors.NotRegisteredError,
    errors.NestedActionError,
    errors.UndeclaredToolError,
    errors.SecretInParamsError,
    errors.ParamsNotKeptError,
)
"""What an Airflow retry would only run into again: the task fails at once."""


SKIPPED = "airflow_saga_skipped"
"""Output of a step whose body raised ``AirflowSkipException``: for the log an end like any other."""


class SagaStep:
    """Mixed into an operator, before its other bases: ``execute`` hands its body to :meth:`run_step`.

    It may stand before an operator of anybody, so it has few names of its own, and none that one may have already.

    Everything around the body is here and nowhere else: attach, fence, lease, the stop on a kill, what each ending
    means to Airflow, the summary in XCom.

    :cvar on_divergence: see :class:`airflow_saga.SagaOperator`.
    :cvar saga_recorder: what records the calls of the body.
    """

    is_saga_step = True
    on_divergence: Literal["stop", "undo"] = "stop"
    saga_recorder: type[Recorder] = Recorder
    _saga_step_run: StepRun | None = None

    def run_step(self, context: Any, body: Callable[[Saga], Any]) -> Any:
        """Run the body as one attempt of this task's step, its calls recorded; what it returned, or had returned.

        :param context: Airflow's, as given to ``execute``.
        :param body: gets the handle of the saga; not called where the step has its output already.
        :raises AirflowFailException: cancelled, fenced, refused, in doubt, diverged: a retry would only meet it again.
        :raises AirflowRescheduleException: an undo is under way, or the platform wants the slot back; no try is used
            up.
        :raises AirflowSkipException: the body did; for the log an end like any other.
        """
        ti = context["ti"]
        set_secret_resolver(resolve_secret)
        listen_in()
        timeout = self.execution_timeout  # type: ignore[attr-defined]
        self._saga_step_run = StepRun(
            _attempt(self, context),
            store_address(),
            OwnTask(ti.dag_id, ti.run_id, ti.task_id, ti.map_index),
            Settings.load().limits(),
            secrets_of_this_process(),
            ends_after_seconds=timeout.total_seconds() if timeout else None,
            on_divergence=self.on_divergence,
            recorder=self.saga_recorder,
        )
        result = _attempted(self, self._saga_step_run, body)
        ti.xcom_push(key=SUMMARY_KEY, value=summary_of(result))
        if isinstance(result.output, dict) and SKIPPED in result.output:
            raise AirflowSkipException(result.output[SKIPPED])
        return result.output

    def request_stop(self) -> None:
        """Stop at the next safe point. A flag only: for a signal handler, on top of whatever the body is doing."""
        if self._saga_step_run is not None:
            self._saga_step_run.request_kill()

    def on_kill(self) -> None:
        self.request_stop()


def _attempted(operator: Any, step: StepRun, body: Callable[[Saga], Any]) -> StepResult:
    """One attempt, whatever ends it said in Airflow's terms."""
    try:
        return step.run(lambda saga: _or_skipped(body, saga))
    except (errors.StepWaitError, StepGivenBack) as wait:
        operator.log.info("%s; giving the slot back", wait)
        raise AirflowRescheduleException(reschedule_date()) from wait
    except NEVER_RETRIED as problem:
        raise AirflowFailException(str(problem)) from problem
    except (Exception, errors.ActionTimedOut, errors.StepInterrupted) as problem:
        if (doubt := errors.in_doubt_by(problem)) is not None:
            raise AirflowFailException(doubt) from problem
        if isinstance(problem, (errors.ActionTimedOut, errors.StepInterrupted, StepCleared)):
            raise AirflowException(str(problem)) from problem
        raise


def _attempt(operator: Any, context: Any) -> Attempt:
    ti, run = context["ti"], context["dag_run"]
    policy = policy_of(ti.dag_id)
    clear_number = run.clear_number or 0
    cleared, removed = cleared_steps(ti.dag_id, ti.run_id) if clear_number else (frozenset(), frozenset())
    return Attempt(
        dag_id=ti.dag_id,
        run_id=ti.run_id,
        task_id=ti.task_id,
        map_index=ti.map_index if ti.map_index is not None else -1,
        ti_id=ti.id,
        try_number=ti.try_number,
        max_tries=ti.max_tries,
        retries=operator.retries or 0,
        clear_number=clear_number,
        others_cleared=cleared,
        others_removed=removed,
        item_fingerprint=_item_fingerprint(operator),
        ancestors=ancestors_of(operator),
        mapped_group=mapped_group_of(operator),
        host=socket.gethostname(),
        pid=os.getpid(),
        dag_version=str(getattr(ti, "dag_version_id", "") or "") or None,
        on_failure=policy.on_failure,
        on_compensation_failure=policy.on_compensation_failure,
        cancel_deadline_seconds=Settings.load().cancel_deadline_seconds,
    )


def _item_fingerprint(operator: Any) -> str | None:
    """Of what this instance is mapped over; None where it is not mapped, or the log could not keep the item."""
    item = mapped_item(operator)
    try:
        return codec.fingerprint("item", 1, codec.encode(item)) if item else None
    except errors.ValueNotKeptError as problem:
        operator.log.info("this instance is told apart by its index alone: %s", problem)
        return None


def _or_skipped(body: Callable[[Saga], Any], saga: Saga) -> Any:
    try:
        return body(saga)
    except AirflowSkipException as skip:
        return {SKIPPED: str(skip)}


def summary_of(result: StepResult) -> dict[str, Any]:
    """What the XCom tab shows of a step: which actions, in which state, and what of it can be undone."""
    return {
        "saga": f"{result.saga.dag_id} / {result.saga.run_id}",
        "step": result.step.label,
        "generation": result.step.generation,
        "replayed": result.replayed,
        "actions_in_all": len(result.actions),
        "can_be_undone": sum(
            row.effect == Effect.COMPENSABLE and row.state == "DONE" for row in result.actions
        ),
        "cannot_be_undone": sum(row.effect == Effect.NON_COMPENSABLE for row in result.actions),
        "actions": [_in_summary(row) for row in result.actions[-MOST_ACTIONS_IN_SUMMARY:]],
    }


def _in_summary(row: ActionRow) -> dict[str, Any]:
    return {
        "id": row.action_id,
        "seq": row.seq,
        "name": row.name,
        "state": row.state,
        "undo": {Effect.READ_ONLY: "nothing to undo", Effect.NON_COMPENSABLE: "cannot be undone"}.get(
            Effect(row.effect), "can be undone"
        ),
        "key": row.key,
        "tries": row.tries,
    }
