"""What a person is asked about an action that still stands, and what each answer means for the log.

Also which question is about which action. The tasks of an undo need both, and who answers from outside of them does;
so nothing of Airflow is loaded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from airflow_saga.core.records import ActionRow, RequestRow, SagaRow
from airflow_saga.core.states import ActionState, RequestState

SETTLE_TASK = "settle"
REVIEW_TASK = "review"
REVIEWED_KEY = "reviewed"
"""Of the XCom in which ``settle`` says what each index of ``review`` is about: a list of actions."""
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


@dataclass(frozen=True)
class Asked:
    """One question that an undo run has put: ``review`` of this index."""

    run_id: str
    map_index: int
    action_id: int


def questions_put(
    requests: Iterable[RequestRow], reviewed_in: Callable[[str], Sequence[int] | None]
) -> Iterator[Asked]:
    """All that the undos of a saga have asked of people, open or not.

    :param reviewed_in: the XCom ``REVIEWED_KEY`` of an undo run, where its questions are of interest.
    """
    for request in requests:
        if request.owner_run_id is not None and request.state == RequestState.SETTLED:
            for index, action_id in enumerate(reviewed_in(request.owner_run_id) or ()):
                yield Asked(request.owner_run_id, index, action_id)


def option_of(state: str) -> str | None:
    """The answer that gives an action this state; None if no question has one."""
    return next((option for option, given in OPTIONS.items() if given == state), None)


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
