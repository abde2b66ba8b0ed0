"""The official provider's agent and LLM operators as steps of the saga. Needs the extra ``ai``.

Connections, hooks, structured output, usage limits and approvals are the provider's; only what an agent does is
recorded, by a :class:`airflow_saga.ai.SagaCapability`, and the attempt is that of a saga step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from airflow.providers.common.ai.operators.agent import AgentOperator
from airflow.providers.common.ai.operators.llm import LLMOperator
from airflow.sdk.exceptions import TaskAwaitingInput, TaskDeferred

from airflow_saga.ai import SagaCapability
from airflow_saga.ai.capability import DEFAULT_TRIES
from airflow_saga.ai.requests import DEFAULT_MODEL_TIMEOUT
from airflow_saga.ai.tools import Declared
from airflow_saga.core.actions import Action
from airflow_saga.core.errors import ActionDeclarationError
from airflow_saga.core.identity import check_task_id
from airflow_saga.core.policies import DEFAULT_TIMEOUT
from airflow_saga.graph import is_step
from airflow_saga.operators.step import SagaStep
from airflow_saga.runtime.saga import Saga

_WAITS = "waits for a person"


class AgentStep(SagaStep):
    """Mixed into an operator of the provider, before it."""

    def execute(self, context: Any) -> Any:
        run = super().execute  # type: ignore[misc]
        return self.run_step(context, lambda saga: _or_waits(saga, lambda: run(context)))

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        """In another process, after a person has answered: what lies before the question is not asked for again."""
        run = super().resume_execution  # type: ignore[misc]

        def resume(saga: Saga) -> Any:
            saga.resume_from()
            return _or_waits(saga, lambda: run(next_method, next_kwargs, context))

        return self.run_step(context, resume)


def _or_waits(saga: Saga, run: Callable[[], Any]) -> Any:
    """The provider gives the process back while a person thinks; the place is kept."""
    try:
        return run()
    except (TaskAwaitingInput, TaskDeferred):
        saga.checkpoint(_WAITS)
        raise


class SagaAgentOperator(AgentStep, AgentOperator):
    """Run an agent as a step of the saga: it can be stopped in the middle of a sentence, resumed, and undone.

    Takes every argument of the provider's ``AgentOperator`` except ``durable``, since a saga resumes by itself, and:

    :param compensations: by the name of a tool (or output function): a function of one ``ActionRecord``, ``READ_ONLY``,
        ``NON_COMPENSABLE``, or a :class:`airflow_saga.ai.ToolAction` with more to say.
    :param actions: ``@action`` functions that become tools of the agent.
    :param undeclared: ``"refuse"``: a tool that neither names fails the task before it runs. ``"ask"``: it waits for a
        person's approval, and runs as NON_COMPENSABLE.
    :param model_timeout: wall-clock limit of one request to the model. Default 30 s.
    :param tool_timeout: wall-clock limit of one call of a tool that declares none. Default 10 s.
    :param tries: of one request to the model, over client, saga and Airflow together. Default 3.
    :param keep_rounds: how many rounds of a long conversation the model is sent; None: all.
    :param on_divergence: see :class:`airflow_saga.SagaOperator`; prompt, model and tools count as the body's inputs.
    :raises ActionDeclarationError: while the DAG file is loaded, naming the tool.
    :raises AirflowFailException, AirflowRescheduleException: as ``SagaOperator`` does.
    """

    def __init__(
        self,
        *,
        compensations: Mapping[str, Declared] | None = None,
        actions: Sequence[Action[Any, Any]] = (),
        undeclared: Literal["refuse", "ask"] = "refuse",
        model_timeout: timedelta = DEFAULT_MODEL_TIMEOUT,
        tool_timeout: timedelta = DEFAULT_TIMEOUT,
        tries: int = DEFAULT_TRIES,
        keep_rounds: int | None = None,
        on_divergence: Literal["stop", "undo"] = "stop",
        capabilities: Sequence[Any] = (),
        **kwargs: Any,
    ) -> None:
        if kwargs.get("durable"):
            raise ActionDeclarationError(
                f"{kwargs.get('task_id')}: durable=True and a saga would both replay the agent's steps, each from a "
                f"log of its own, and only the saga knows what was undone. Leave it out: the saga resumes the agent."
            )
        saga = SagaCapability(
            compensations,
            actions=actions,
            undeclared=undeclared,
            model_timeout=model_timeout,
            tool_timeout=tool_timeout,
            tries=tries,
            keep_rounds=keep_rounds,
        )
        params = kwargs.pop("agent_params", None)
        if (
            isinstance(params, Mapping) and "capabilities" in params
        ):  # the provider takes them in one place only
            capabilities = [*capabilities, *params["capabilities"]]
            params = {name: value for name, value in params.items() if name != "capabilities"}
        super().__init__(capabilities=[saga, *capabilities], agent_params=params, **kwargs)
        check_task_id(self.task_id)
        self.on_divergence = on_divergence


class SagaLLMOperator(AgentStep, LLMOperator):
    """Ask a model once as a step of the saga: the stream can be stopped, and an answer that is there is not paid twice.

    Takes every argument of the provider's ``LLMOperator``, and ``model_timeout`` and ``tries`` as
    :class:`SagaAgentOperator`.
    """

    def __init__(
        self,
        *,
        model_timeout: timedelta = DEFAULT_MODEL_TIMEOUT,
        tries: int = DEFAULT_TRIES,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_task_id(self.task_id)
        self._saga_capability = SagaCapability(model_timeout=model_timeout, tries=tries)

    def _create_agent(self, *, output_type: Any, instructions: str) -> Any:
        return self.llm_hook.create_agent(
            output_type=output_type,
            instructions=instructions,
            model_settings=self.model_settings,
            retries=self.output_retries,
            capabilities=[self._saga_capability],
        )


# -- agents of the provider with a SagaCapability ---------------------------------------------------------------------


def adopt_agents(tasks: Iterable[Any]) -> None:
    """Make steps of the provider's own agent operators, ``@task.agent`` included, that carry a ``SagaCapability``; and
    declare the tools of mapped agents, which Airflow does not make while it loads the file.

    :raises ActionDeclarationError: naming the task, if it is ``durable`` as well.
    """
    for task in tasks:
        cls = getattr(task, "operator_class", None) or type(task)
        if not (isinstance(cls, type) and issubclass(cls, AgentOperator | LLMOperator)):
            continue
        mapped = getattr(task, "is_mapped", False)
        if is_step(task):
            if mapped:
                _declare_mapped(task, cls)
        elif _carries_saga(task.partial_kwargs if mapped else vars(task)):
            _adopt(task, cls, mapped)


def _adopt(task: Any, cls: type[Any], mapped: bool) -> None:
    given = task.partial_kwargs if mapped else vars(task)
    if given.get("durable"):
        raise ActionDeclarationError(
            f"task {task.task_id!r}: durable=True and a SagaCapability would both replay the agent's steps, each from "
            f"a log of its own. Leave out durable=True: the saga resumes the agent."
        )
    check_task_id(task.task_id)
    if mapped:
        task.operator_class = step_class(cls)
    else:
        task.__class__ = step_class(cls)


def _declare_mapped(task: Any, cls: type[Any]) -> None:
    """Its tools belong into ``partial``, so that they are known before it is expanded."""
    given = {name: task.partial_kwargs[name] for name in _SAGA_ARGUMENTS if name in task.partial_kwargs}
    expanded = getattr(task.expand_input, "value", None)
    wrong = sorted(set(_SAGA_ARGUMENTS) & set(expanded if isinstance(expanded, dict) else ()))
    if wrong:
        raise ActionDeclarationError(
            f"task {task.task_id!r}: {', '.join(wrong)} is the same for all of its instances, so it belongs into "
            f".partial(…)"
        )
    SagaCapability(given.pop("compensations", None), **given)


_SAGA_ARGUMENTS = (
    "compensations",
    "actions",
    "undeclared",
    "model_timeout",
    "tool_timeout",
    "tries",
    "keep_rounds",
)


def _carries_saga(given: Mapping[str, Any]) -> bool:
    passed = [
        *(given.get("capabilities") or ()),
        *((given.get("agent_params") or {}).get("capabilities") or ()),
    ]
    return any(isinstance(each, SagaCapability) for each in passed)


@functools.cache
def step_class(cls: type[Any]) -> Any:
    """The same operator class as a step of the saga."""
    shown = getattr(cls, "custom_operator_name", None) or cls.__name__
    namespace = {"__module__": __name__, "__doc__": cls.__doc__, "custom_operator_name": shown}
    return type(cls)(f"Saga{cls.__name__.lstrip('_')}", (AgentStep, cls), namespace)
