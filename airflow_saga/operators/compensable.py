"""``compensable(SomeOperator)``: an operator of any provider as a step of the saga.

The class that it makes runs the operator as it is, as one recorded action. What undoes it is found by the undo in the
DAG file, like every other action: it is declared when the saga DAG is complete, since a mapped operator is never made
while the file is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException, TaskDeferred

from airflow_saga.core.actions import Compensation
from airflow_saga.core.declare import action, takes_one_record
from airflow_saga.core.errors import ActionDeclarationError, ActionTimedOut, ResultNotStoredError
from airflow_saga.core.identity import ACTION_NAME_LIMIT, check_task_id
from airflow_saga.core.policies import DEFAULT_UNDO_DEADLINE, NO_RETRY
from airflow_saga.core.records import ActionRecord
from airflow_saga.core.states import Effect
from airflow_saga.operators.deferral import SagaTrigger, ended_by_trigger, told_of
from airflow_saga.operators.step import SKIPPED, SagaStep
from airflow_saga.runtime.deferral import CallDeferred, OperatorAction, OperatorRecorder, keepable
from airflow_saga.runtime.saga import Saga
from airflow_saga.settings import Settings, secrets_of_this_process

DEFAULT_TIMEOUT = timedelta(hours=1)
"""Of an operator without an ``execution_timeout``."""
DEFAULT_SETTLE_AFTER = timedelta(seconds=10)
"""What an operator had sent when it failed may still be worked on for so long."""
_PARAMETERS = "_BaseOperatorMeta__param_names"
"""Where Airflow keeps the names of an operator's arguments."""
_REQUIRED = inspect.Parameter.empty
_OPTIONS: Mapping[str, Any] = {
    "compensate": _REQUIRED,
    "cancel_deferred": None,
    "verify": None,
    "confirm": None,
    "timeout": None,
    "settle_after": DEFAULT_SETTLE_AFTER,
    "retry": None,
    "undo_retry": None,
    "undo_deadline": DEFAULT_UNDO_DEADLINE,
    "compensate_in_doubt": False,
    "idempotent": False,
    "key_lifetime": None,
    "version": 1,
    "compensations": None,
    "aliases": (),
}
"""What :func:`compensable` adds to an operator's arguments, with the defaults."""


class CompensableStep(SagaStep):
    """What all classes made by :func:`compensable` have in common; the operator's own class comes after it."""

    saga_recorder = OperatorRecorder
    saga_option_names: Mapping[str, str] = MappingProxyType({})
    """How each option of the saga is called as an argument of the operator."""

    def execute(self, context: Any) -> Any:
        return self._saga_as_step(
            context, lambda: super(CompensableStep, self).execute(context), resumes=False
        )

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        """In the process that the trigger woke: the action that was begun there is ended here."""

        def resume() -> Any:
            if (event := ended_by_trigger(next_kwargs)) is not None:
                return event.carry_out(context)
            return super(CompensableStep, self).resume_execution(next_method, next_kwargs, context)

        return self._saga_as_step(context, resume, resumes=True)

    def on_kill(self) -> None:
        """The step stops, and the operator ends its own work, as Airflow asks it to."""
        self.request_stop()
        super(SagaStep, self).on_kill()

    def _saga_as_step(self, context: Any, run: Callable[[], Any], *, resumes: bool) -> Any:
        made = declare(self.dag_id, self, self.saga_declared, self._saga_call(run))  # type: ignore[attr-defined]
        made.resumes = resumes
        try:
            return self.run_step(context, lambda saga: self._saga_body(saga, made))
        except CallDeferred as deferred:
            raise deferred.signal from None

    def _saga_body(self, saga: Saga, made: OperatorAction) -> Any:
        self._saga_returned: list[Any] = []
        try:
            result = made(**self._saga_params())
        except ResultNotStoredError as problem:
            if not self._saga_returned:
                raise
            self.log.warning("%s The task goes on with it.", problem)  # type: ignore[attr-defined]
            result = self._saga_returned[0]
        if isinstance(result, dict) and SKIPPED in result:
            raise AirflowSkipException(result[SKIPPED])
        return result

    def _saga_call(self, run: Callable[[], Any]) -> Callable[..., Any]:
        """The function of the action. Its parameters are for the log: the operator has them as its own."""

        def call(**_: Any) -> Any:
            try:
                result = run()
            except TaskDeferred as defer:
                trigger = SagaTrigger.around(defer.trigger)
                signal = TaskDeferred(
                    trigger=trigger,
                    method_name=defer.method_name or "execute_complete",
                    kwargs=defer.kwargs,
                    timeout=defer.timeout,
                )
                raise CallDeferred(told_of(defer), signal) from None
            except AirflowSkipException as skip:
                result = {SKIPPED: str(skip)}
            except ActionTimedOut:
                super(SagaStep, self).on_kill()  # abandoned: what it has started must not outlive it
                raise
            self._saga_returned.append(result)
            return result

        return call

    def _saga_params(self) -> dict[str, Any]:
        """Its template fields as rendered: those that the log can keep, secrets masked."""
        fields = {name: getattr(self, name) for name in fields_of(self) if hasattr(self, name)}
        limits = Settings.load().limits()

        def tell(why: str) -> None:
            self.log.info("not kept with the action: %s", why)  # type: ignore[attr-defined]

        kept = keepable(fields, secrets_of_this_process(), limits, "params", tell)
        return {name: kept.get(name) for name in fields_of(self)}


@functools.cache
def compensable(cls: type[Any]) -> Any:
    """An operator class as a step of the saga: the same class, with what undoes it.

    Use the result like the class itself, ``.partial(…).expand(…)`` included. Each takes every argument of the operator,
    and those of :func:`airflow_saga.action` that make sense for it. Where the operator has an argument of that name
    itself (``verify`` of the AWS operators, ``timeout`` of sensors), its own is meant, and the saga's is called
    ``saga_verify``, ``saga_timeout``.

    :param compensate: a function of one :class:`ActionRecord`, which may return an operator that the undo then executes
        (its templates rendered for the run that is undone, ``record`` among what they see); or ``NON_COMPENSABLE``, or
        ``READ_ONLY``. Required. ``record.params`` are the template fields as rendered, ``record.result`` is what
        ``execute`` returned.
    :param cancel_deferred: instead of ``compensate`` where the operator was stopped while it was deferred: ends the
        remote work that ``record.deferred`` names, and takes back what that has done by then. May return an operator.
    :param timeout: of one call; default is the task's ``execution_timeout``, or 1 h. What a lost process had begun is
        left alone for so long before it is undone, so name one that fits. While it is deferred, no time counts.
    :param settle_after: how long what the operator had sent may still take effect after it ended. Default 10 s.
    :param retry: tries within the task, after a proved ``NotApplied`` or of an ``idempotent`` operator; 1 if READ_ONLY.

    An operator that raises has left a doubt, as any action has: without ``verify``, ``idempotent`` or
    ``compensate_in_doubt`` a person is asked, and Airflow's retries do not call it again.

    :param verify, confirm, undo_retry, undo_deadline, compensate_in_doubt, idempotent, key_lifetime, version,
        compensations, aliases: as of :func:`airflow_saga.action`; ``aliases`` are former task_ids.
    :raises ActionDeclarationError: while the DAG file is loaded, naming the task.
    """
    if not (isinstance(cls, type) and issubclass(cls, BaseOperator)):
        raise ActionDeclarationError(f"compensable({cls!r}): it takes a class of operators")
    if issubclass(cls, SagaStep):
        raise ActionDeclarationError(f"compensable({cls.__name__}): it is a step of the saga already")
    name = f"Compensable{cls.__name__}"
    shown = getattr(cls, "custom_operator_name", None) or cls.__name__
    own = {name for base in cls.mro() for name in getattr(base.__init__, _PARAMETERS, ())}
    names = {option: f"saga_{option}" if option in own else option for option in _OPTIONS}
    namespace = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": cls.__doc__,
        "__init__": _initialiser(names),
        "saga_option_names": MappingProxyType(names),
        "custom_operator_name": f"compensable({shown})",
        # Else the scheduler would defer it without a process of ours, and nothing would be recorded.
        "start_from_trigger": False,
    }
    return type(cls)(name, (CompensableStep, cls), namespace)


def _initialiser(names: Mapping[str, str]) -> Callable[..., None]:
    """One for each class: Airflow wraps it, and looks at its parameters."""

    def __init__(self: Any, **kwargs: Any) -> None:
        given = {option: kwargs.pop(name, _OPTIONS[option]) for option, name in names.items()}
        super(CompensableStep, self).__init__(**kwargs)
        check_task_id(self.task_id)
        self.start_from_trigger = False
        self.saga_declared = given

    kinds = inspect.Parameter
    options = [kinds(names[option], kinds.KEYWORD_ONLY, default=value) for option, value in _OPTIONS.items()]
    __init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [kinds("self", kinds.POSITIONAL_ONLY), *options, kinds("kwargs", kinds.VAR_KEYWORD)]
    )
    return __init__


# -- its action -------------------------------------------------------------------------------------------------------


def declare_operators(dag_id: str, steps: Iterable[Any]) -> None:
    """Declare the actions of those steps of a DAG that are operators made by :func:`compensable`.

    :raises ActionDeclarationError: naming the task and what is wrong.
    """
    for task in steps:
        cls = getattr(task, "operator_class", None) or type(task)
        if not issubclass(cls, CompensableStep):
            continue
        options = _mapped_options(task, cls) if getattr(task, "is_mapped", False) else task.saga_declared
        declare(dag_id, task, options, _not_to_be_called)


def _mapped_options(task: Any, cls: type[CompensableStep]) -> dict[str, Any]:
    """Airflow never makes a mapped operator while it loads the file: what was given to ``partial`` is all there is."""
    given = task.partial_kwargs
    expanded = getattr(task.expand_input, "value", None)
    wrong = sorted(set(cls.saga_option_names.values()) & set(expanded if isinstance(expanded, dict) else ()))
    if wrong or cls.saga_option_names["compensate"] not in given:
        what = ", ".join(wrong) or cls.saga_option_names["compensate"]
        raise ActionDeclarationError(
            f"task {task.task_id!r}: {what} is the same for all of its instances, so it belongs into .partial(…)"
        )
    return {option: given.get(name, _OPTIONS[option]) for option, name in cls.saga_option_names.items()}


def declare(
    dag_id: str, task: Any, options: Mapping[str, Any], function: Callable[..., Any]
) -> OperatorAction:
    """The action of an operator's task; the registry of the process knows it from then on.

    :param options: of the saga, by their own names.
    :param function: makes the call; its parameters are the operator's template fields.
    :raises ActionDeclarationError: naming the action and what is wrong.
    """
    given = dict(options)
    cancel_deferred = given.pop("cancel_deferred")
    reads = getattr(given["compensate"], "effect", None) is Effect.READ_ONLY
    given["timeout"] = given["timeout"] or task.execution_timeout or DEFAULT_TIMEOUT
    given["retry"] = given["retry"] or (NO_RETRY if reads else None)
    given["aliases"] = tuple(action_name(dag_id, former) for former in given["aliases"])
    name = action_name(dag_id, task.task_id)
    if given["compensate"] is None:
        raise ActionDeclarationError(
            f"action {name!r} says nothing about its undo: give compensate= a function of one ActionRecord, or "
            f"NON_COMPENSABLE, or READ_ONLY."
        )
    kinds = inspect.Parameter
    parameters = [kinds(field, kinds.POSITIONAL_OR_KEYWORD) for field in fields_of(task)]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__module__, function.__qualname__ = __name__, "execute"
    made: OperatorAction = action(name=name, kind=OperatorAction, **given)(function)
    if cancel_deferred is not None:
        made.compensation = _Undo(name, made.compensation, cancel_deferred)
    return made


class _Undo:
    """What undoes an operator that has another undo while it is deferred."""

    def __init__(
        self, name: str, compensate: Compensation | None, cancel_deferred: Callable[[ActionRecord], Any]
    ) -> None:
        reason = takes_one_record(cancel_deferred) if callable(cancel_deferred) else "it is not a function"
        if reason or compensate is None:
            why = reason or "there is nothing to compensate"
            raise ActionDeclarationError(f"action {name!r}: cancel_deferred={cancel_deferred!r}: {why}")
        self.compensate = compensate
        self.cancel_deferred = cancel_deferred

    def __call__(self, record: ActionRecord) -> Any:
        if record.deferred is not None and not record.in_doubt:
            return self.cancel_deferred(record)
        return self.compensate(record)


def action_name(dag_id: str, task_id: str) -> str:
    """Names count per DAG file, which may hold many DAGs with tasks alike; so the DAG's is in it."""
    name = f"{dag_id}.{task_id}"
    if len(name) <= ACTION_NAME_LIMIT:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{name[: ACTION_NAME_LIMIT - 17]}~{digest}"


def fields_of(task: Any) -> tuple[str, ...]:
    return tuple(field for field in dict.fromkeys(task.template_fields) if field.isidentifier())


def _not_to_be_called(**_: Any) -> None:
    raise AssertionError("only the process of its own task calls an operator's action")
