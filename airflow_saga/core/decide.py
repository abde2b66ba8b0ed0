"""Every decision that needs no I/O: may this attempt begin, what does a kill mean, what does the undo do next.

Pure functions over rows. The store calls them inside its transactions, so that a decision and the rows it rests on are
one; the tests call them with made-up rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from airflow_saga.core.actions import Action, compensation_for
from airflow_saga.core.declare import takes_one_record
from airflow_saga.core.records import ActionRow, Attempt, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import ActionState, Effect, SagaState, StepState

# -- attach ---------------------------------------------------------------------------------------------------------


class Go(StrEnum):
    """What an attempt that wants to attach to its step may do."""

    START = "start"
    RESUME = "resume"
    ANEW = "begin anew"
    REPLAY = "replay"
    REDO = "redo"
    WAIT = "wait"
    REFUSE = "refuse"


@dataclass(frozen=True)
class AttachDecision:
    """:ivar message: for WAIT and REFUSE, what a person should know and do.

    :ivar spares_saga: a REFUSE for a reason of this step alone: if the run fails for it, the failure policy does not
        apply (cause ``refused``). Not so for a second copy of an attempt: that one says nothing about the saga.
    """

    go: Go
    message: str = ""
    spares_saga: bool = True


def cleared_since_stop(attempt: Attempt, saga: SagaRow, step: StepRow | None) -> bool:
    """The run was cleared after the decision to stop and, where the step had begun before, this step was too."""
    if attempt.clear_number <= saga.stop_clear_number:
        return False
    return step is None or cleared_itself(attempt, step)


def cleared_itself(attempt: Attempt, step: StepRow) -> bool:
    """This task instance was cleared: Airflow raises ``max_tries`` then, and only then (AIRFLOW 14)."""
    return attempt.max_tries != step.max_tries


def decide_attach(
    attempt: Attempt,
    saga: SagaRow | None,
    step: StepRow | None,
    upstream: Sequence[StepRow],
    covering: RequestRow | None,
    lease_is_live: bool,
) -> AttachDecision:
    """May this attempt begin, go on, or must it wait or end?

    :param upstream: the steps this one comes after.
    :param covering: the open undo request that covers this step or the whole run, if any.
    :param lease_is_live: whether the step's last attempt still holds its lease; asked for where it was this very one.
    """
    if saga is not None:
        verdict = _saga_verdict(attempt, saga, step)
        if verdict is not None:
            return verdict
    verdict = _upstream_verdict(attempt, upstream)
    if verdict is not None:
        return verdict
    if step is None:
        return AttachDecision(Go.START)
    if step.state != StepState.SUCCEEDED and attempt.try_number < step.try_number:
        return AttachDecision(
            Go.REFUSE,
            f"{attempt.label}: try {attempt.try_number} comes after try {step.try_number} had begun; fenced",
            spares_saga=False,
        )
    verdict = _item_verdict(attempt, step)
    if verdict is not None:
        return verdict
    if step.state == StepState.SUCCEEDED and (covering is None or not cleared_itself(attempt, step)):
        return _succeeded_verdict(attempt, step)
    if step.state == StepState.UNDOING or covering is not None:
        return AttachDecision(Go.WAIT, f"{attempt.label}: its earlier effects are being undone")
    if step.state in (StepState.RUNNING, StepState.STOPPED):
        return _resume_verdict(attempt, step, lease_is_live)
    if step.state == StepState.UNDONE:
        return AttachDecision(Go.ANEW)
    return AttachDecision(
        Go.REFUSE,
        f"{attempt.label}: an undo left some of its effects standing. Settle them first: "
        f"airflow saga show {attempt.dag_id} {attempt.run_id}, then airflow saga resolve … or undo.",
    )


def pruned(saga: SagaRow) -> str:
    """Why nothing can be said or done about a saga any more: one that is cleared now must not look like a new one."""
    return (
        f"what this run did was forgotten on {saga.pruned_at:%Y-%m-%d} (retention_days), so it can be neither resumed "
        f"nor undone; nothing was called"
    )


def _saga_verdict(attempt: Attempt, saga: SagaRow, step: StepRow | None) -> AttachDecision | None:
    if saga.pruned_at is not None:
        return AttachDecision(Go.REFUSE, f"{attempt.label}: {pruned(saga)}. Trigger a new run instead.")
    who = f"by {saga.actor or 'the product'}" + (f" ({saga.reason})" if saga.reason else "")
    if saga.state == SagaState.CANCELLING:
        if cleared_since_stop(attempt, saga, step):
            return AttachDecision(
                Go.WAIT, f"{attempt.label}: the saga is being stopped {who}; waiting for its end"
            )
        return AttachDecision(
            Go.REFUSE, f"{attempt.label}: the saga is being stopped {who}; nothing was called"
        )
    if saga.state in (SagaState.CANCELLED, SagaState.SUSPENDED) and not cleared_since_stop(
        attempt, saga, step
    ):
        return AttachDecision(
            Go.REFUSE,
            f"{attempt.label}: the saga was stopped {who} and is {saga.state}; nothing was called. "
            f"Clear this task to run it again.",
        )
    if saga.state == SagaState.PARTIALLY_CANCELLED:
        return AttachDecision(
            Go.REFUSE,
            f"{attempt.label}: an undo left something standing, and nobody has settled it; nothing was called. "
            f"See airflow saga show {attempt.dag_id} {attempt.run_id}, settle it with airflow saga resolve …, "
            f"clear again.",
        )
    return None


def _upstream_verdict(attempt: Attempt, upstream: Sequence[StepRow]) -> AttachDecision | None:
    if any(step.state == StepState.UNDOING for step in upstream):
        return AttachDecision(Go.WAIT, f"{attempt.label}: a step it depends on is being undone")
    states = (StepState.UNDONE, StepState.PARTLY_UNDONE)
    undone = [step.label for step in upstream if step.state in states and not step.is_gone]
    if undone:
        return AttachDecision(
            Go.REFUSE,
            f"{attempt.label}: it depends on steps that were undone and not run again: {', '.join(undone)}. "
            f"Clear them too.",
        )
    return None


def _item_verdict(attempt: Attempt, step: StepRow) -> AttachDecision | None:
    """A mapped step is the same only for the same item: another one at its index begins after the undo of the first."""
    same = step.item_fingerprint in (None, attempt.item_fingerprint) or attempt.item_fingerprint is None
    if same or step.state not in (StepState.RUNNING, StepState.STOPPED, StepState.SUCCEEDED):
        return None
    if cleared_itself(attempt, step):
        return AttachDecision(Go.REDO)
    return AttachDecision(
        Go.REFUSE,
        f"{attempt.label}: what it did was done for another item than the one that is at index {attempt.map_index} "
        f"now; nothing was called. Clear this task: then that is undone first.",
    )


def _resume_verdict(attempt: Attempt, step: StepRow, lease_is_live: bool) -> AttachDecision:
    if step.state == StepState.RUNNING and attempt.ti_id == step.ti_id and lease_is_live:
        return AttachDecision(
            Go.REFUSE,
            f"{attempt.label}: already running in process {step.pid} on {step.host}; "
            f"this second copy of the same try called nothing",
            spares_saga=False,
        )
    return AttachDecision(Go.RESUME)


def _succeeded_verdict(attempt: Attempt, step: StepRow) -> AttachDecision:
    if cleared_itself(attempt, step):
        return AttachDecision(Go.REDO)
    if attempt.clear_number > step.clear_number and attempt.retries != step.retries:
        return AttachDecision(
            Go.REFUSE,
            f"{attempt.label}: the run was cleared and the task's retries changed from {step.retries} to "
            f"{attempt.retries}, so whether this task was cleared cannot be told. Clear it once more.",
        )
    return AttachDecision(Go.REPLAY)


# -- a kill ---------------------------------------------------------------------------------------------------------


class Killed(StrEnum):
    """Why Airflow wants a process gone, read from its own task instance."""

    MARKED_FAILED = "marked failed"
    CLEARED = "cleared"
    PLATFORM = "platform"
    OVER = "over"


_KILLED_BY_TASK_STATE: dict[str | None, Killed] = {
    "failed": Killed.MARKED_FAILED,
    "restarting": Killed.CLEARED,
    None: Killed.CLEARED,
    "scheduled": Killed.CLEARED,
    "queued": Killed.CLEARED,
    "up_for_retry": Killed.CLEARED,
    "up_for_reschedule": Killed.CLEARED,
    "running": Killed.PLATFORM,
    "skipped": Killed.OVER,
    "success": Killed.OVER,
    "removed": Killed.OVER,
    "upstream_failed": Killed.OVER,
}


def why_killed(task_state: str | None) -> Killed:
    """What a SIGTERM meant: *failed* = somebody marked it, *restarting* = cleared, *running* = the platform."""
    return _KILLED_BY_TASK_STATE.get(task_state, Killed.PLATFORM)


# -- the undo -------------------------------------------------------------------------------------------------------


class UndoMove(StrEnum):
    """What the undo does next with one action."""

    NOTHING = "settled"
    WAIT = "wait"
    VERIFY = "verify"
    COMPENSATE = "compensate"
    STAND = "stand"
    HAND_OVER = "hand over"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class UndoDecision:
    move: UndoMove
    reason: str = ""
    until: datetime | None = None


def decide_undo(
    row: ActionRow, known: Action[..., object] | None, now: datetime, probed: bool = False
) -> UndoDecision:
    """What the undo does next with this action.

    :param known: the action as this process knows it, None if nothing of that name is declared any more.
    :param now: the database's clock.
    :param probed: this undo has already asked its probe and got no answer.
    """
    if row.settled:
        return UndoDecision(UndoMove.NOTHING)
    if row.lands_by is not None and row.lands_by > now:
        return UndoDecision(
            UndoMove.WAIT,
            f"an unreported call of {row.name} may take effect until {row.lands_by:%H:%M:%S}",
            row.lands_by,
        )
    if row.state == ActionState.IN_DOUBT:
        return _decide_in_doubt(row, known, probed)
    if row.effect == Effect.NON_COMPENSABLE:
        return UndoDecision(UndoMove.STAND, f"{row.name} is declared NON_COMPENSABLE")
    missing = missing_compensation(row, known)
    if missing:
        return UndoDecision(UndoMove.GIVE_UP, missing)
    return UndoDecision(UndoMove.COMPENSATE)


def _decide_in_doubt(row: ActionRow, known: Action[..., object] | None, probed: bool) -> UndoDecision:
    if known is not None and known.verify is not None and not probed:
        return UndoDecision(UndoMove.VERIFY)
    if row.effect == Effect.NON_COMPENSABLE:
        return UndoDecision(
            UndoMove.STAND, f"{row.name} is declared NON_COMPENSABLE; nobody knows whether it happened"
        )
    if known is not None and known.compensate_in_doubt and not missing_compensation(row, known):
        return UndoDecision(UndoMove.COMPENSATE)
    why = "its verify probe could not tell" if probed else "it has no verify probe"
    return UndoDecision(
        UndoMove.HAND_OVER,
        f"nobody knows whether {row.name} took effect: {why}, and its compensation needs to know",
    )


def missing_compensation(row: ActionRow, known: Action[..., object] | None) -> str | None:
    """Why this row cannot be compensated by the code that is here, None if it can."""
    if known is None:
        return (
            f"no action named {row.name!r} is declared in the DAG file any more, so nothing knows how to undo it. "
            f"Bring it back, or name the new one with aliases=({row.name!r},), and undo again."
        )
    compensation = compensation_for(known, row.version)
    if compensation is None:
        if row.version != known.version:
            return (
                f"{row.name!r} was called in version {row.version}, the DAG file declares version {known.version} "
                f"and no compensations={{{row.version}: …}} for the old one"
            )
        return (
            f"{row.name!r} is declared {known.effect.value} now and has no compensation; "
            f"it was called as {row.effect}"
        )
    problem = takes_one_record(compensation)
    if problem:
        return f"the compensation of {row.name!r} does not take one ActionRecord any more: {problem}"
    return None
