"""Asking verify probes what became of actions in doubt, for a person who looks before deciding.

Nothing is decided by the answers, and nothing else is called: the undo asks again when it comes to these actions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from airflow_saga.core.actions import Action, Registry, registry, set_caller
from airflow_saga.core.errors import NotApplied
from airflow_saga.core.records import ActionRecord, ActionRow, Applied, SagaRow, StepRow
from airflow_saga.core.states import ActionState, Effect
from airflow_saga.runtime.compensation import record_of
from airflow_saga.runtime.drive import probe_answer, resolve_awaitable
from airflow_saga.runtime.secrecy import KnownSecrets
from airflow_saga.runtime.undo import refuse_action
from airflow_saga.store.reader import SagaView

log = logging.getLogger(__name__)

MOST_ASKED = 200
LONGEST_SECONDS = 30.0
"""A person waits for it; the undo itself gives each probe its action's whole timeout."""
_CANNOT_TELL = "it cannot tell"


class Asked(NamedTuple):
    """:ivar said: what its probe said, or why it was not asked; one phrase for a person."""

    action: ActionRow
    said: str


def ask_probes(
    view: SagaView, now: datetime, secrets: KnownSecrets, actions: Registry = registry
) -> Iterator[Asked]:
    """Ask about each action in doubt, one after the other, newest first.

    :param now: the database's clock.
    """
    doubtful = [
        row for row in view.actions if row.state == ActionState.IN_DOUBT and row.effect != Effect.READ_ONLY
    ]
    set_caller(refuse_action)
    try:
        for row in sorted(doubtful, key=lambda row: -row.action_id)[:MOST_ASKED]:
            known = actions.find(row.name, row.version)
            yield Asked(row, secrets.scrub(_ask(view.saga, view.step_of(row), row, known, now)))
    finally:
        set_caller(None)


def _ask(saga: SagaRow, step: StepRow, row: ActionRow, known: Action[Any, Any] | None, now: datetime) -> str:
    if row.lands_by is not None and row.lands_by > now:
        return f"not asked: its call may still take effect until {row.lands_by:%H:%M:%S} UTC"
    if known is None:
        return "not asked: no action of that name is declared in the DAG file any more"
    if known.verify is None:
        return "not asked: it has no verify probe"
    try:
        record = record_of(saga, step, row, 0)
        answer = _within(min(known.timeout.total_seconds(), LONGEST_SECONDS), known.verify, record)
    except Exception as problem:
        log.warning("the probe of %s (action %d) failed", row.name, row.action_id, exc_info=True)
        return f"{_CANNOT_TELL}: {type(problem).__name__}: {problem}"[:500]
    told = probe_answer(answer)
    if isinstance(told, Applied):
        return "it took effect"
    return "it did not take effect" if isinstance(told, NotApplied) else _CANNOT_TELL


def _within(seconds: float, probe: Callable[[ActionRecord], Any], record: ActionRecord) -> Any:
    """What the probe returned; it is left behind if it does not return in time, since it changes nothing.

    :raises TimeoutError: it did not.
    """
    came: list[Any] = []

    def ask() -> None:
        try:
            came.append((resolve_awaitable(probe(record)), None))
        except BaseException as problem:  # noqa: BLE001 - handed to the thread that asked
            came.append((None, problem))

    thread = threading.Thread(target=ask, name=f"probe of {record.name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if not came:
        raise TimeoutError(f"no answer within {seconds:g} s")
    answer, problem = came[0]
    if problem is not None:
        raise problem
    return answer
