"""``SagaOperator``: one task, one step of the saga, whatever calls it makes."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from airflow.sdk import BaseOperator
from airflow.sdk.bases.decorator import determine_kwargs
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
)

from airflow_saga.core import errors
from airflow_saga.core.identity import check_task_id
from airflow_saga.core.records import ActionRow, Attempt
from airflow_saga.core.secret import set_secret_resolver
from airflow_saga.core.states import Effect
from airflow_saga.graph import ancestors_of, mapped_group_of, mapped_item, policy_of
from airflow_saga.platform import OwnTask, cleared_steps, reschedule_date
from airflow_saga.runtime import codec
from airflow_saga.runtime.saga import Saga
from airflow_saga.runtime.step import StepCleared, StepGivenBack, StepResult, StepRun
from airflow_saga.settings import Settings, resolve_secret, secrets_of_this_process, store_address

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
    errors.SecretInParamsError,
    errors.ParamsNotKeptError,
)
"""What an Airflow retry would only run into again: the task fails at once."""


SKIPPED = "airflow_saga_skipped"
"""Output of a step whose body raised ``AirflowSkipException``: for the log an end like any other."""


class SagaOperator(BaseOperator):
    """Run a function as a step of the saga: the actions it calls are recorded, can be undone, and are never done twice.

    An Airflow retry, a clear or a restart of the platform resumes after the last action that is done. The function may
    be an action itself. It gets whatever it asks for by name: Airflow's context, ``op_kwargs``, and ``saga``, the
    handle of :class:`airflow_saga.Saga`.

    :param python_callable: a function or a coroutine function.
    :param op_args: positional arguments, templated.
    :param op_kwargs: keyword arguments, templated.
    :param on_divergence: what to do where a resumed body asks for another action than the recorded one, since its code
        or its inputs have changed: ``"stop"`` fails, naming both; ``"undo"`` undoes what the step did from there on and
        goes on live.
    :raises AirflowFailException: cancelled, fenced, refused, in doubt, diverged: a retry would only meet it again.
    :raises AirflowRescheduleException: an undo is under way, or the platform wants the slot back; no try is used up.
    """

    template_fields: Sequence[str] = ("op_args", "op_kwargs")
    template_fields_renderers = {"op_args": "py", "op_kwargs": "py"}  # noqa: RUF012 - Airflow's own way
    shallow_copy_attrs: Sequence[str] = ("python_callable",)
    ui_color = "#e7f0ea"
    is_saga_step = True

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        on_divergence: Literal["stop", "undo"] = "stop",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_task_id(self.task_id)
        if on_divergence not in ("stop", "undo"):
            raise AirflowException(f"{self.task_id}: on_divergence={on_divergence!r}: it is 'stop' or 'undo'")
        self.on_divergence = on_divergence
        if not callable(python_callable):
            raise AirflowException(f"{self.task_id}: python_callable={python_callable!r} is not a function")
        self.python_callable = python_callable
        self.op_args = op_args or ()
        self.op_kwargs = op_kwargs or {}
        self._step: StepRun | None = None

    def execute(self, context: Any) -> Any:
        ti = context["ti"]
        set_secret_resolver(resolve_secret)
        platform = OwnTask(ti.dag_id, ti.run_id, ti.task_id, ti.map_index)
        limits = Settings.load().limits()
        self._step = StepRun(
            self._attempt(context),
            store_address(),
            platform,
            limits,
            secrets_of_this_process(),
            ends_after_seconds=self.execution_timeout.total_seconds() if self.execution_timeout else None,
            on_divergence=self.on_divergence,
        )
        try:
            result = self._step.run(lambda saga: self._call(context, saga))
        except (errors.StepWaitError, StepGivenBack) as wait:
            self.log.info("%s; giving the slot back", wait)
            raise AirflowRescheduleException(reschedule_date()) from wait
        except NEVER_RETRIED as problem:
            raise AirflowFailException(str(problem)) from problem
        except (Exception, errors.ActionTimedOut, errors.StepInterrupted) as problem:
            if (doubt := errors.in_doubt_by(problem)) is not None:
                raise AirflowFailException(doubt) from problem
            if isinstance(problem, (errors.ActionTimedOut, errors.StepInterrupted, StepCleared)):
                raise AirflowException(str(problem)) from problem
            raise
        ti.xcom_push(key=SUMMARY_KEY, value=summary_of(result))
        if isinstance(result.output, dict) and SKIPPED in result.output:
            raise AirflowSkipException(result.output[SKIPPED])
        return result.output

    def on_kill(self) -> None:
        """A flag only: this runs in a signal handler, on top of whatever the body is doing."""
        if self._step is not None:
            self._step.request_kill()

    def _attempt(self, context: Any) -> Attempt:
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
            retries=self.retries or 0,
            clear_number=clear_number,
            others_cleared=cleared,
            others_removed=removed,
            item_fingerprint=self._item_fingerprint(),
            ancestors=ancestors_of(self),
            mapped_group=mapped_group_of(self),
            host=socket.gethostname(),
            pid=os.getpid(),
            dag_version=str(getattr(ti, "dag_version_id", "") or "") or None,
            on_failure=policy.on_failure,
            on_compensation_failure=policy.on_compensation_failure,
            cancel_deadline_seconds=Settings.load().cancel_deadline_seconds,
        )

    def _item_fingerprint(self) -> str | None:
        """Of what this instance is mapped over; None where it is not mapped, or the log could not keep the item."""
        item = mapped_item(self)
        try:
            return codec.fingerprint("item", 1, codec.encode(item)) if item else None
        except errors.ValueNotKeptError as problem:
            self.log.info("this instance is told apart by its index alone: %s", problem)
            return None

    def _call(self, context: Any, saga: Saga) -> Any:
        function = self.function
        args, kwargs = self._arguments(function)
        kwargs = determine_kwargs(function, args, {**context, "saga": saga, **kwargs})
        try:
            result = function(*args, **kwargs)
            return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
        except AirflowSkipException as skip:
            return {SKIPPED: str(skip)}

    @property
    def function(self) -> Callable[..., Any]:
        """The function as its author wrote it."""
        return getattr(self.python_callable, "__saga_function__", self.python_callable)

    def _arguments(self, function: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments were counted without ``saga``, so they are told apart by name where it stands first."""
        if not self.op_args or self.python_callable is function:
            return tuple(self.op_args), dict(self.op_kwargs)
        bound = inspect.signature(self.python_callable).bind_partial(*self.op_args, **self.op_kwargs)
        return (), dict(bound.arguments)


async def _awaited(value: Any) -> Any:
    return await value


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
