"""``SagaOperator``: one task, one step of the saga, whatever calls it makes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from airflow.sdk import BaseOperator
from airflow.sdk.bases.decorator import determine_kwargs
from airflow.sdk.exceptions import AirflowException

from airflow_saga.core.identity import check_task_id
from airflow_saga.operators.step import SagaStep
from airflow_saga.runtime.saga import Saga


class SagaOperator(SagaStep, BaseOperator):
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

    def execute(self, context: Any) -> Any:
        return self.run_step(context, lambda saga: self._call(context, saga))

    def _call(self, context: Any, saga: Saga) -> Any:
        function = self.function
        args, kwargs = self._arguments(function)
        kwargs = determine_kwargs(function, args, {**context, "saga": saga, **kwargs})
        result = function(*args, **kwargs)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

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
