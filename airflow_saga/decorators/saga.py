"""``@task.saga``: a function as a step of the saga. ``saga`` is injected where the function asks for it by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from airflow.sdk.bases.decorator import DecoratedOperator, task_decorator_factory

from airflow_saga.operators.saga import SagaOperator

INJECTED = "saga"


class SagaDecoratedOperator(DecoratedOperator, SagaOperator):
    """What ``@task.saga`` makes of a function."""

    custom_operator_name = "@task.saga"
    template_fields = SagaOperator.template_fields

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        seen = without_saga(python_callable)
        super().__init__(
            kwargs_to_upstream={"python_callable": seen, "op_args": op_args, "op_kwargs": op_kwargs},
            python_callable=seen,
            op_args=op_args,
            op_kwargs=op_kwargs,
            **kwargs,
        )


def without_saga(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as its callers see it: Airflow binds arguments at parse, when there is no saga to inject yet."""
    signature = inspect.signature(function)
    if INJECTED not in signature.parameters:
        return function

    @functools.wraps(function)
    def seen(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    parameters = [parameter for name, parameter in signature.parameters.items() if name != INJECTED]
    seen.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    seen.__saga_function__ = function  # type: ignore[attr-defined]
    return seen


def saga_task(
    python_callable: Callable[..., Any] | None = None, multiple_outputs: bool | None = None, **kwargs: Any
) -> Any:
    """Make a function a step of the saga; takes every argument of an Airflow task (``retries``, ``pool``, …).

    :param python_callable: the function to decorate, sync or async.
    :param multiple_outputs: a returned dict becomes one XCom per key, as with ``@task``.
    """
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=SagaDecoratedOperator,
        **kwargs,
    )
