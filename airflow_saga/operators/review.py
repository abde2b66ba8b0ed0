"""What a person is asked about an action that still stands, and what each answer means for the log."""

from __future__ import annotations

from airflow_saga.core.records import ActionRow, SagaRow
from airflow_saga.core.states import ActionState

UNDONE_BY_HAND = "I have undone it by hand"
ACCEPTED = "Let it stand"
LEAVE_OPEN = "Leave it open"
OPTIONS: dict[str, str | None] = {
    UNDONE_BY_HAND: ActionState.COMPENSATED,
    ACCEPTED: ActionState.ACCEPTED,
    LEAVE_OPEN: None,
}
"""Option → the state the action gets; None leaves it as it is."""

_MEANING = {
    ActionState.IN_DOUBT: "nobody knows whether it took effect",
    ActionState.NON_COMPENSABLE: "it cannot be undone",
    ActionState.COMPENSATION_FAILED: "its compensation failed",
    ActionState.DONE: "it stands",
    ActionState.COMPENSATING: "its compensation began and did not end",
    ActionState.PENDING: "it may be under way",
}


def question_of(saga: SagaRow, row: ActionRow, step_label: str) -> dict[str, str]:
    """Subject and body (Markdown) of one question. Values of the call are not shown here: the saga's timeline masks."""
    meaning = _MEANING.get(ActionState(row.state), row.state)
    lines = [
        f"`{row.name}` of step `{step_label}` in {saga.dag_id} / {saga.run_id}: {meaning}.",
        "",
        "| | |",
        "|---|---|",
        f"| action | {row.action_id} |",
        f"| state | {row.state} |",
        f"| began | {row.begun_at:%Y-%m-%d %H:%M:%S} UTC |",
        f"| idempotency key | `{row.key}` |",
        f"| tries to undo | {row.undo_tries} |",
        f"| why | {_cell(row.error or 'nothing more is known')} |",
        "",
        f"Details: `airflow saga show {saga.dag_id} {saga.run_id}`. "
        f"It may be settled there as well: `airflow saga resolve {saga.dag_id} {saga.run_id} {row.action_id} "
        f"--undone --note …`",
    ]
    return {"subject": f"{row.name} ({step_label}): {meaning}", "body": "\n".join(lines)}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")[:500]
