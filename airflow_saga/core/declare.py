"""``@action``: a function declared together with what undoes it, and refused at once where that could not work."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, overload

from airflow_saga.core.actions import Action, Compensation, Marker, P, Probe, R, registry
from airflow_saga.core.errors import ActionDeclarationError
from airflow_saga.core.identity import ACTION_NAME_LIMIT
from airflow_saga.core.policies import DEFAULT_TIMEOUT, DEFAULT_UNDO_DEADLINE, Retry
from airflow_saga.core.states import Effect


class _Missing:
    pass


_MISSING = _Missing()


@overload
def action(fn: Callable[P, R], /, *, compensate: Compensation | Marker, **options: Any) -> Action[P, R]: ...


@overload
def action(
    fn: None = None,
    /,
    *,
    compensate: Compensation | Marker,
    name: str | None = None,
    version: int = 1,
    aliases: Iterable[str] = (),
    compensations: Mapping[int, Compensation] | None = None,
    verify: Probe | None = None,
    confirm: Probe | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    settle_after: timedelta = timedelta(0),
    retry: Retry | None = None,
    undo_retry: Retry | None = None,
    undo_deadline: timedelta = DEFAULT_UNDO_DEADLINE,
    compensate_in_doubt: bool = False,
    idempotent: bool = False,
    key_lifetime: timedelta | None = None,
) -> Callable[[Callable[P, R]], Action[P, R]]: ...


def action(  # type: ignore[misc]  # the first overload's **options are these
    fn: Callable[..., Any] | None = None,
    /,
    *,
    compensate: Compensation | Marker | _Missing = _MISSING,
    name: str | None = None,
    version: int = 1,
    aliases: Iterable[str] = (),
    compensations: Mapping[int, Compensation] | None = None,
    verify: Probe | None = None,
    confirm: Probe | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    settle_after: timedelta = timedelta(0),
    retry: Retry | None = None,
    undo_retry: Retry | None = None,
    undo_deadline: timedelta = DEFAULT_UNDO_DEADLINE,
    compensate_in_doubt: bool = False,
    idempotent: bool = False,
    key_lifetime: timedelta | None = None,
    kind: type[Action[Any, Any]] = Action,
) -> Any:
    """Declare that calls of a function are recorded, and what undoes one.

    A keyword argument ``key`` of the function, where it has one, receives the stable idempotency key: the same in
    every attempt of the call, so that a service that knows it makes one effect of many attempts.

    :param compensate: a function of one :class:`ActionRecord`, or ``NON_COMPENSABLE``, or ``READ_ONLY``. Required.
    :param name: stable name in the log; default is the function's name. Renamed? Keep the old one in ``aliases``.
    :param version: grows when old records need another compensation; keep that one in ``compensations={1: …}``.
    :param verify: asks the world what became of a call in doubt: ``Applied(result) | NotApplied() | Unknown()``.
    :param confirm: asks the world whether a compensation took (``NotApplied()``: the effect is gone, it took).
    :param timeout: wall-clock limit of one call; at it the call is abandoned and in doubt. Default 10 s.
    :param settle_after: how long after its timeout an abandoned call may still take effect (assumption A1).
    :param retry: tries of the call; only calls that proved ``NotApplied``, or ``idempotent`` ones, are tried again.
    :param undo_retry: tries of the compensation. Both default to 3 tries, 1 s doubling to at most 30 s.
    :param undo_deadline: how long ``Later`` and ``Unavailable`` may go on. Default 24 h.
    :param compensate_in_doubt: the compensation copes with an effect that may never have happened.
    :param idempotent: the service takes the same key for the same effect, within ``key_lifetime``.
    :param kind: what is made; the kinds of agents' actions are in ``airflow_saga.ai``.
    :raises ActionDeclarationError: at import, naming the action.
    """

    def declare(function: Callable[..., Any]) -> Action[Any, Any]:
        named = name or getattr(function, "__name__", None)
        if not named or named == "<lambda>":
            raise ActionDeclarationError(f'{function!r} has no stable name; give the action name="…"')
        if len(named) > ACTION_NAME_LIMIT:
            raise ActionDeclarationError(
                f"action {named[:40]}…: its name is longer than {ACTION_NAME_LIMIT} characters"
            )
        if isinstance(compensate, _Missing) or compensate is None:
            raise ActionDeclarationError(
                f"action {named!r} says nothing about its undo: give compensate= a function of one ActionRecord, "
                f"or NON_COMPENSABLE, or READ_ONLY."
            )
        marker = compensate if isinstance(compensate, Marker) else None
        for role, function_ in _functions_of(compensate, compensations, verify, confirm):
            _check_function(named, role, function_)
        if timeout <= timedelta(0) or settle_after < timedelta(0):
            raise ActionDeclarationError(
                f"action {named!r}: timeout must be positive, settle_after not negative"
            )
        signature = _without_key(function)
        made: Action[Any, Any] = kind(
            fn=function,
            name=named,
            version=version,
            effect=marker.effect if marker else Effect.COMPENSABLE,
            compensation=None if isinstance(compensate, Marker) else compensate,
            compensations=dict(compensations or {}),
            verify=verify,
            confirm=confirm,
            timeout=timeout,
            settle_after=settle_after,
            retry=retry or Retry(),
            undo_retry=undo_retry or Retry(),
            undo_deadline=undo_deadline,
            compensate_in_doubt=compensate_in_doubt,
            idempotent=idempotent,
            key_lifetime=key_lifetime,
            aliases=tuple(aliases),
            wants_key=_wants_key(function),
            origin=_origin(function),
            signature=signature,
            plain_names=_plain_names(signature),
            registered=not registry.closed,
        )
        if made.registered:
            registry.add(made)
        return made

    return declare if fn is None else declare(fn)


def _functions_of(
    compensate: object, compensations: Mapping[int, Compensation] | None, verify: object, confirm: object
) -> list[tuple[str, object]]:
    roles = [("compensate", compensate), ("verify", verify), ("confirm", confirm)]
    roles += [(f"compensations[{version}]", function) for version, function in (compensations or {}).items()]
    return [
        (role, function)
        for role, function in roles
        if function is not None and not isinstance(function, Marker)
    ]


def _check_function(action_name: str, role: str, function: object) -> None:
    """The undo runs in another process, days later: what it calls must be found there, and take one record."""
    if not callable(function):
        raise ActionDeclarationError(f"action {action_name!r}: {role}={function!r} is not a function")
    if getattr(function, "__name__", "") == "<lambda>":
        raise ActionDeclarationError(
            f"action {action_name!r}: {role}= is a lambda; the undo needs a named function"
        )
    if getattr(function, "__closure__", None):
        raise ActionDeclarationError(
            f"action {action_name!r}: {role}= closes over local variables, which are gone when the undo runs; "
            f"move {getattr(function, '__name__', function)!r} to module level."
        )
    reason = takes_one_record(function)
    if reason:
        raise ActionDeclarationError(f"action {action_name!r}: {role}= must take one ActionRecord: {reason}")


def takes_one_record(function: Callable[..., Any]) -> str | None:
    """None if it can be called with one ActionRecord, else why not."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as problem:
        return str(problem)
    except ValueError:
        return None
    return None


def _wants_key(function: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get("key")
    except ValueError:
        return False
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY


def _without_key(function: Callable[..., Any]) -> inspect.Signature:
    """What a caller may pass; a callable that tells no signature (some builtins) takes anything."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return _ANYTHING
    if not _wants_key(function):
        return signature
    return signature.replace(parameters=[p for name, p in signature.parameters.items() if name != "key"])


def _plain_names(signature: inspect.Signature) -> tuple[str, ...] | None:
    parameters = signature.parameters.values()
    if any(parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
        return None
    return tuple(signature.parameters)


def _anything(*args: Any, **kwargs: Any) -> None:
    return None


_ANYTHING = inspect.signature(_anything)


def _origin(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}:{getattr(function, '__qualname__', type(function).__qualname__)}"
