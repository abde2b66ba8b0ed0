"""States in the words and shapes in which people read them; the shape says it where colours cannot be told apart."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_saga.core.records import ActionRow
from airflow_saga.core.states import ActionState, Effect, SagaState


@dataclass(frozen=True)
class Word:
    """:ivar mark: one sign. :ivar tone: ``ok``, ``warn``, ``bad``, ``busy`` or ``quiet``."""

    text: str
    mark: str
    tone: str


SAGA_WORDS: dict[str, Word] = {
    SagaState.PENDING: Word("Not begun", "·", "quiet"),
    SagaState.RUNNING: Word("Running", "▸", "busy"),
    SagaState.COMPLETED: Word("Completed", "✓", "ok"),
    SagaState.FAILED: Word("Failed", "×", "bad"),
    SagaState.CANCELLING: Word("Stopping", "■", "busy"),
    SagaState.SUSPENDED: Word("Stopped, effects kept", "‖", "warn"),
    SagaState.CANCELLED: Word("Cancelled", "✓", "ok"),
    SagaState.PARTIALLY_CANCELLED: Word("Partly cancelled", "!", "warn"),
}
ACTION_WORDS: dict[str, Word] = {
    ActionState.PENDING: Word("under way", "▸", "busy"),
    ActionState.DONE: Word("done", "●", "quiet"),
    ActionState.FAILED: Word("no effect", "∅", "quiet"),
    ActionState.IN_DOUBT: Word("in doubt", "?", "warn"),
    ActionState.COMPENSATING: Word("being undone", "↺", "busy"),
    ActionState.COMPENSATED: Word("undone", "✓", "ok"),
    ActionState.COMPENSATION_FAILED: Word("undo failed", "×", "bad"),
    ActionState.NON_COMPENSABLE: Word("stands", "–", "warn"),
    ActionState.ACCEPTED: Word("accepted", "=", "quiet"),
}
_READ = Word("read only", "·", "quiet")
_WAITS = Word("undo awaited", "◷", "busy")


def word_of(action: ActionRow) -> Word:
    """How an action stands, in a word."""
    if action.effect == Effect.READ_ONLY and action.state == ActionState.DONE:
        return _READ
    if action.state == ActionState.COMPENSATING and action.reconcile_at is not None:
        return _WAITS
    return ACTION_WORDS[action.state]
