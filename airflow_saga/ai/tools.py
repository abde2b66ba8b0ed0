"""An agent's tools as actions: what undoes a call is declared where the agent is, by the name of the tool.

The call itself is whatever the agent's toolsets make of it. So the action of a tool has no function of its own: the
capability hands it the way to make this one call, and the log sees its arguments and its true result.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from pydantic_ai.exceptions import (
    ApprovalRequired,
    CallDeferred,
    ModelRetry,
    ToolFailed,
    ToolFailedError,
    ToolRetryError,
)

from airflow_saga.ai.threads import Threads, current_threads
from airflow_saga.core.actions import NON_COMPENSABLE, Action, Compensation, Marker
from airflow_saga.core.declare import action
from airflow_saga.core.errors import ActionDeclarationError, NotApplied, RefusedForGood
from airflow_saga.core.policies import DEFAULT_TIMEOUT
from airflow_saga.core.states import Effect

UNDECLARED = "undeclared_tool"
"""Name of the action under which a person let an undeclared tool run."""

_SAID = "airflow_saga_tool_said"
"""A READ_ONLY tool that answered with an exception meant for the model: the log keeps it as its result."""

_key: ContextVar[str | None] = ContextVar("saga_tool_key", default=None)


def action_key() -> str:
    """The idempotency key of the tool call under way: the same in every attempt of it, another for each new call.

    For tools that are plain functions; an ``@action`` gets its ``key`` as an argument.

    :raises LookupError: no recorded tool call is under way here.
    """
    key = _key.get()
    if key is None:
        raise LookupError("action_key(): no tool call that a saga records is under way here")
    return key


@dataclass(frozen=True)
class ToolAction:
    """What undoes a tool, where a compensation alone does not say enough; the parameters are those of ``@action``.

    :param compensate: a function of one ``ActionRecord``, ``READ_ONLY`` or ``NON_COMPENSABLE``.
    :param refuses_with: exceptions by which the tool proves that it did nothing (``NotApplied`` always does): the model
        is told, and nothing is in doubt. Name ``ModelRetry`` here only if the tool raises it before it acts.
    :param options: ``verify``, ``confirm``, ``timeout``, ``settle_after``, ``retry``, ``idempotent``, ``version``, …
    """

    compensate: Compensation | Marker
    refuses_with: tuple[type[Exception], ...]
    options: Mapping[str, Any]

    def __init__(
        self,
        compensate: Compensation | Marker,
        *,
        refuses_with: Sequence[type[Exception]] = (),
        **options: Any,
    ) -> None:
        object.__setattr__(self, "compensate", compensate)
        object.__setattr__(self, "refuses_with", tuple(refuses_with))
        object.__setattr__(self, "options", options)

    def __repr__(self) -> str:
        """Without addresses: in a mapped task it is part of the serialised DAG."""
        undo = getattr(self.compensate, "__qualname__", self.compensate)
        return f"ToolAction({undo}, {', '.join(sorted(self.options))})"


Declared = Compensation | Marker | ToolAction | Action[Any, Any]
"""What may stand behind a tool's name: its compensation, a marker, both with options, or an action that is the tool."""


@dataclass(eq=False)
class ToolCall(Action[Any, Any]):
    """The action of one tool. Called with ``arguments`` and ``make``, which makes the call."""

    keeps_refusal: ClassVar[bool] = True
    refuses_with: tuple[type[Exception], ...] = field(default=())

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the log keeps are the tool's own arguments."""
        return dict(kwargs["arguments"])

    def may_replace(self, known: Action[Any, Any]) -> bool:
        """Two agents may declare a tool alike: what counts is that the undo finds the same compensation."""
        alike = (known.effect, known.compensation) == (self.effect, self.compensation)
        return super().may_replace(known) or (isinstance(known, ToolCall) and alike)


@dataclass
class Attempted:
    """One tool call of the agent, while it is asked of the log and perhaps made.

    :ivar shown: what the model gets to see of the result, once the call was made.
    :ivar true: what the tool returned before anything masked it; a list of none or one.
    """

    make: Callable[[], Awaitable[Any]]
    made: bool = False
    shown: Any = None
    true: list[Any] = field(default_factory=list)


current_attempt: ContextVar[Attempted | None] = ContextVar("saga_tool_attempt", default=None)


def declare_tools(
    declared: Mapping[str, Declared], *, timeout: timedelta = DEFAULT_TIMEOUT
) -> dict[str, Action[Any, Any]]:
    """The actions of tools, registered; names are the tools' own.

    :raises ActionDeclarationError: at import, naming the tool.
    """
    return {name: _declare(name, each, timeout) for name, each in declared.items()}


def undeclared_tool(timeout: timedelta = DEFAULT_TIMEOUT) -> Action[Any, Any]:
    """What a person lets run although nobody said how to undo it."""
    return _declare(UNDECLARED, NON_COMPENSABLE, timeout)


def _declare(name: str, declared: Declared, timeout: timedelta) -> Action[Any, Any]:
    if isinstance(declared, Action):
        return declared
    if not isinstance(declared, ToolAction):
        if not isinstance(declared, Marker) and not callable(declared):
            raise ActionDeclarationError(
                f"tool {name!r}: {declared!r} says nothing about its undo: give a function of one ActionRecord, "
                f"READ_ONLY, NON_COMPENSABLE, a ToolAction or an action"
            )
        declared = ToolAction(declared)
    made = action(
        _run_of(name, declared),
        compensate=declared.compensate,
        **{"name": name, "timeout": timeout, **declared.options, "kind": ToolCall},
    )
    assert isinstance(made, ToolCall)
    made.refuses_with = declared.refuses_with
    return made


def _run_of(name: str, declared: ToolAction) -> Callable[..., Any]:
    """The function behind a tool's action; its origin is the DAG file that declares it, and what undoes it."""
    reads = isinstance(declared.compensate, Marker) and declared.compensate.effect is Effect.READ_ONLY

    async def run(*, arguments: Mapping[str, Any], attempt: Attempted, key: str) -> Any:
        return await _make(attempt, key, reads, declared.refuses_with)

    undo = declared.compensate
    run.__name__ = name
    run.__qualname__ = f"tool {name}, undone by {getattr(undo, '__qualname__', undo)!s}"
    run.__module__ = _declaring_module()
    return run


def _declaring_module() -> str:
    """The module, usually of a DAG file, whose code declares an agent's tools."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("airflow_saga.", "airflow.", "pydantic_ai.", "dataclasses", "abc")):
            return module
        frame = frame.f_back
    return "__main__"


async def _make(attempt: Attempted, key: str, reads: bool, refuses_with: tuple[type[Exception], ...]) -> Any:
    """Make the call; its true result is what the log keeps."""
    threads = Threads()
    tokens = (_key.set(key), current_threads.set(threads), current_attempt.set(attempt))
    try:
        attempt.shown = await attempt.make()
        attempt.made = True
    except asyncio.CancelledError:
        # A thread cannot be cut short. What it comes to after all is an answer like any other, only late.
        found, answer = await threads.late_answer()
        if not found:
            raise
        attempt.shown, attempt.made = answer, True
        return answer
    except (ApprovalRequired, CallDeferred) as paused:
        raise _Paused(paused) from paused
    except TO_THE_MODEL as raised:
        said = _as_the_tool_said(raised)
        if reads:
            return {_SAID: type(said).__name__, "message": said.message}
        if isinstance(said, refuses_with):
            raise RefusedForGood(said.message) from said
        raise
    except refuses_with as refused:
        raise RefusedForGood(f"{type(refused).__name__}: {refused}") from refused
    finally:
        _key.reset(tokens[0])
        current_threads.reset(tokens[1])
        current_attempt.reset(tokens[2])
    return attempt.true[-1] if attempt.true else attempt.shown


TO_THE_MODEL = (ModelRetry, ToolFailed, ToolRetryError, ToolFailedError)
"""By these a tool speaks to the model; pydantic-ai turns the first two into the others on the way."""


def _as_the_tool_said(raised: BaseException) -> ModelRetry | ToolFailed:
    if isinstance(raised, ModelRetry | ToolFailed):
        return raised
    if isinstance(raised.__cause__, ModelRetry | ToolFailed):
        return raised.__cause__
    return (ToolFailed if isinstance(raised, ToolFailedError) else ModelRetry)(str(raised))


class _Paused(NotApplied):
    """The tool asks for something before it acts: nothing happened, and it is called again when that is there."""

    final = True

    def __init__(self, why: ApprovalRequired | CallDeferred) -> None:
        super().__init__(f"waits: {type(why).__name__}")
        self.why = why


def shown_again(recorded: Any) -> Any:
    """What the model is given of a recorded result.

    :raises ModelRetry, ToolFailed: if that is what the tool had said.
    """
    if isinstance(recorded, dict) and _SAID in recorded:
        kind = ModelRetry if recorded[_SAID] == "ModelRetry" else ToolFailed
        raise kind(recorded["message"])
    return recorded


def for_the_model(no: NotApplied) -> BaseException:
    """How a call that did not take effect is told to the model, which decides what to do about it."""
    if isinstance(no, _Paused):
        return no.why
    return ToolFailed(f"It was not done, nothing has changed: {no}")


def names_of(actions: Iterable[Action[Any, Any]]) -> str:
    """For ``repr``: names, versions and effects only, since Airflow makes a new DAG version where a text changes."""
    return ", ".join(f"{each.name} v{each.version} {each.effect.value}" for each in actions)
