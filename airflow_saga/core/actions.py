"""Actions, and the one registry of the process through which the undo finds their compensations.

The log finds a compensation by (name, version) in the process that loaded the DAG file, never by a module path:
names are data, and renaming one needs ``aliases=``. An action is declared once, while the file is loaded, and may
then be called in a step's body, run as an operator, or be given to an agent as a tool.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

from airflow_saga.core.errors import ActionDeclarationError, NotInSagaError
from airflow_saga.core.policies import Retry
from airflow_saga.core.records import ActionRecord, ProbeAnswer
from airflow_saga.core.states import Effect

P = ParamSpec("P")
R = TypeVar("R")


class Marker:
    """A word that stands where a compensation would: there is nothing to undo, or no way to."""

    def __init__(self, effect: Effect) -> None:
        self.effect = effect

    def __repr__(self) -> str:
        return self.effect.value


READ_ONLY = Marker(Effect.READ_ONLY)
"""The action changes nothing: not in doubt, never undone; its result is recorded and replayed."""

NON_COMPENSABLE = Marker(Effect.NON_COMPENSABLE)
"""The action cannot be undone: it is named at the end of an undo and put before a person."""

Compensation = Callable[[ActionRecord], Any]
"""Returns None or anything when it took, ``Later(…)`` when it is under way; a coroutine function is awaited."""
Probe = Callable[[ActionRecord], ProbeAnswer]


@dataclass(eq=False)
class Action(Generic[P, R]):
    """A function whose calls are recorded, together with what undoes them. Made by :func:`action`.

    Calling it inside a step records the call; ``.fn`` is the bare function, for tests and for use inside other actions.
    """

    fn: Callable[P, R]
    name: str
    version: int
    effect: Effect
    compensation: Compensation | None
    compensations: Mapping[int, Compensation]
    verify: Probe | None
    confirm: Probe | None
    timeout: timedelta
    settle_after: timedelta
    retry: Retry
    undo_retry: Retry
    undo_deadline: timedelta
    compensate_in_doubt: bool
    idempotent: bool
    key_lifetime: timedelta | None
    aliases: tuple[str, ...]
    wants_key: bool
    origin: str
    signature: inspect.Signature
    """Of ``fn``, without ``key``; looked at once, since every call is bound by it."""
    plain_names: tuple[str, ...] | None
    """Its parameters, where all may be given by place or name; None where binding needs the signature's own rules."""
    registered: bool = field(default=True)
    is_async: bool = field(init=False)
    __signature__: inspect.Signature = field(init=False, repr=False)
    """What a caller passes: whoever looks at an action as a function (an agent's tool schema) sees no ``key``."""

    closes_on_stop: ClassVar[bool] = False
    """A decision to stop cuts its calls short at once, instead of letting them end. For READ_ONLY async ones only."""
    steers: ClassVar[bool] = False
    """What it says decides which actions come next, so a new one before recorded effects is a divergence."""
    keeps_refusal: ClassVar[bool] = False
    """A call that was refused for good (``NotApplied``) is answered with that refusal when it is asked for again."""

    def __post_init__(self) -> None:
        self.is_async = inspect.iscoroutinefunction(self.fn)
        functools.update_wrapper(self, self.fn, updated=())
        self.__signature__ = self.signature

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if _caller is None:
            raise NotInSagaError(
                f"{self.name} was called outside a saga step, so nothing was called. Call it in the body of a "
                f"SagaOperator or @task.saga, or call {self.name}.fn(…) for the bare function."
            )
        return _caller(self, args, kwargs)  # type: ignore[no-any-return]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, defaults filled in, without ``key``; a TypeError as the call itself would raise."""
        if self.wants_key and "key" in kwargs:
            raise TypeError(f"{self.name}: `key` is given by the saga, do not pass it")
        names = self.plain_names
        if names is not None and len(args) + len(kwargs) == len(names):
            arguments = dict(zip(names, args, strict=False))
            rest = names[len(args) :]
            if all(name in kwargs for name in rest):
                for name in rest:
                    arguments[name] = kwargs[name]
                return arguments
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def may_replace(self, known: Action[Any, Any]) -> bool:
        """Whether it is the same declaration, read again."""
        return known.origin == self.origin

    def left_behind(self, kwargs: Mapping[str, Any]) -> Any:
        """What a READ_ONLY call that failed or was cut short has come to so far, worth keeping; None: nothing."""
        return None

    def tries_told(self, kept: Iterable[Any]) -> int:
        """How many tries failed readings of the same call have used up, by what they left behind."""
        return 0

    def what_differs(self, recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
        """In a person's words, where the calls of a resumed step part from the log; empty: their parameters tell."""
        return ""

    def __repr__(self) -> str:
        return f"<action {self.name} version {self.version}, {self.effect.value}>"


Caller = Callable[[Action[Any, Any], tuple[Any, ...], Mapping[str, Any]], Any]
_caller: Caller | None = None

NOT_RECORDED = object()
Recall = Callable[[Action[Any, Any], Mapping[str, Any]], Any]
_recall: Recall | None = None


def set_caller(caller: Caller | None, recall: Recall | None = None) -> None:
    """The runtime says who records calls in this process (one step per process; None: no step).

    :param recall: what earlier attempts of the step have recorded of a call, ``NOT_RECORDED`` if they did not end it.
    """
    global _caller, _recall
    _caller, _recall = caller, recall


def recorded_result_of(action: Action[Any, Any], params: Mapping[str, Any]) -> Any:
    """What a call with these parameters had returned to an earlier attempt of the step; ``NOT_RECORDED`` if nothing."""
    return NOT_RECORDED if _recall is None else _recall(action, params)


class Registry:
    """Every action of the process, by name and version."""

    def __init__(self) -> None:
        self._actions: dict[tuple[str, int], Action[Any, Any]] = {}
        self._aliases: dict[str, str] = {}
        self._closed_by: str | None = None

    @property
    def closed(self) -> bool:
        return self._closed_by is not None

    def close(self, step: str) -> None:
        """From now on a new action is not registered (and refused before its call): a step has attached."""
        self._closed_by = step

    def reopen(self) -> None:
        """For the next step in the same process (tests, ``dag.test()``)."""
        self._closed_by = None

    def add(self, action: Action[Any, Any]) -> None:
        """:raises ActionDeclarationError: if another function has that name already, or the alias is taken."""
        known = self._actions.get((action.name, action.version))
        if known is not None and not action.may_replace(known) and not _of_different_dag_files(known, action):
            raise ActionDeclarationError(
                f"action {action.name!r} is declared twice: by {known.origin} and by {action.origin}. Names are how "
                f'the log finds a compensation; give one of them name="…".'
            )
        for alias in action.aliases:
            owner = self._aliases.get(alias, action.name)
            if owner != action.name or (alias, action.version) in self._actions:
                raise ActionDeclarationError(
                    f"action {action.name!r}: its alias {alias!r} belongs to another action"
                )
        self._actions[action.name, action.version] = action
        self._aliases.update(dict.fromkeys(action.aliases, action.name))

    def find(self, name: str, version: int) -> Action[Any, Any] | None:
        """The action of that name (or alias), in that version if it is there, else in the newest one."""
        name = self._aliases.get(name, name)
        exact = self._actions.get((name, version))
        if exact is not None:
            return exact
        versions = [found for (known, _), found in self._actions.items() if known == name]
        return max(versions, key=lambda found: found.version, default=None)

    def names(self) -> list[str]:
        return sorted({name for name, _ in self._actions})


def _of_different_dag_files(one: Action[Any, Any], other: Action[Any, Any]) -> bool:
    """Names count per DAG file and what it imports. A task loads one file; a process that loads several (a DagBag,
    the command line) keeps the newest, since Airflow gives each DAG file's module a prefix and name of its own.
    """
    files = {found.origin.partition(":")[0] for found in (one, other)}
    return len(files) == 2 and all(file.startswith(_DAG_FILE_PREFIX) for file in files)


_DAG_FILE_PREFIX = "unusual_prefix_"

registry = Registry()


def compensation_for(action: Action[Any, Any], version: int) -> Compensation | None:
    """What undoes a row of that version: this version's own compensation, or the one kept for the old version."""
    if version == action.version:
        return action.compensation
    return action.compensations.get(version)
