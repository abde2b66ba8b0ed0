"""How a capsule's factory makes an action: under the name its DAG file gave it, as if it were declared there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from airflow_saga.core.actions import Action, Marker
from airflow_saga.core.declare import action
from airflow_saga.core.errors import NotApplied
from airflow_saga.core.policies import DEFAULT_TIMEOUT
from airflow_saga.core.records import ActionRecord

SHARE_OF_TIMEOUT = 0.9
"""Of an action's timeout, for the network: so that a call tells by itself what went wrong before it is abandoned."""


def declare(
    act: Callable[..., Any],
    name: str,
    capsule: object,
    *,
    compensate: Callable[[ActionRecord], Any] | Marker,
    verify: Callable[[ActionRecord], Any] | None,
    **options: Any,
) -> Action[Any, Any]:
    """Make an action of a capsule's function, which takes ``key``.

    It counts as declared by the module that called the factory, so two DAG files may each have one of that name, and
    two different ones in one file are refused.

    :param capsule: how it was configured; its ``repr`` tells two configurations apart.
    :raises ActionDeclarationError: at import, naming the action.
    """
    act.__name__ = name
    act.__qualname__ = f"{name} = {capsule!r}"
    act.__module__ = sys._getframe(2).f_globals.get("__name__", act.__module__)
    return action(act, name=name, compensate=compensate, verify=verify, **options)


def seconds_for_network(timeout: timedelta | None) -> float:
    return (timeout or DEFAULT_TIMEOUT).total_seconds() * SHARE_OF_TIMEOUT


def connection_named(conn_id: str) -> Any:
    """An Airflow connection.

    :raises NotApplied: there is none; nothing was called.
    """
    from airflow_saga.settings import connection_of

    found = connection_of(conn_id)
    if found is None:
        raise NotApplied(f"Airflow knows no connection {conn_id!r}, so nothing was called; add it")
    return found
