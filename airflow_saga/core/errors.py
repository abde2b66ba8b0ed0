"""Every error of the product, with what it means for the run and what an Airflow retry does then.

Two roots. ``SagaError`` is an ordinary exception. ``StepInterrupted`` is a ``BaseException``: it ends the body of a
step (a cancel, a lost fence, a timeout), and a body that catches ``Exception`` around each of its calls must not be
able to swallow it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any


class SagaError(Exception):
    """Something about a saga is wrong; the message says what, to which saga and action, and what to do next."""


# -- declaring actions (raised while the DAG file is loaded) -------------------------------------------------------


class ActionDeclarationError(SagaError):
    """An ``@action`` is declared wrongly; raised at import, so Airflow shows it as an import error of the DAG file."""


class NameTooLongError(SagaError):
    """A dag_id, task_id or action name is longer than the log and the generated DAG allow; raised at parse."""


# -- calling actions ------------------------------------------------------------------------------------------------


class NotInSagaError(SagaError):
    """An action was called outside a step; nothing was called. Use ``.fn(...)`` for the bare function."""


class NestedActionError(SagaError):
    """An action was called inside another action's call or inside a compensation; the inner one was not called."""


class NotRegisteredError(SagaError):
    """An action made after the DAG file was loaded was refused before its call; an Airflow retry refuses again."""


class ValueNotKeptError(SagaError):
    """A value would not come back from the log as it went in; names the path inside the value and the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class ParamsNotKeptError(ValueNotKeptError):
    """Parameters cannot be kept exactly: refused before the call. An Airflow retry refuses again."""


class ValueTooLargeError(ValueNotKeptError):
    """A value is larger than ``[saga] max_value_bytes``."""

    def __init__(self, size_bytes: int, limit_bytes: int, path: str = "value") -> None:
        super().__init__(
            path, f"{size_bytes} bytes are more than the {limit_bytes} of [saga] max_value_bytes"
        )
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class ResultNotStoredError(SagaError):
    """The call took effect, its result could not be stored: the action is DONE and undoable, without result.

    Not retried by Airflow: the effect stands, and calling again would make a second one.
    """


class SecretInParamsError(SagaError):
    """A parameter holds a value that Airflow knows as a secret: refused before the call. Pass a ``Secret``."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} holds a value that is known as a secret; nothing was called and nothing was stored. "
            f"Pass Secret('<conn_id>') instead and read it with .reveal() inside the action."
        )
        self.path = path


class ValueNotReadableError(SagaError):
    """A stored value cannot be read back here: its class is gone, renamed or another kind now; names what is missing.

    An Airflow retry fails alike until the code has that class again; the stored text is untouched.
    """


class SecretNotResolvedError(SagaError):
    """``Secret.reveal()`` found nothing to read: no connection or field of that name, or no Airflow to ask.

    Nothing was called; an Airflow retry asks again.
    """


class NotApplied(SagaError):
    """Raise this in an action to prove that the outside world did not change: the action is FAILED, not in doubt."""

    final = False
    """Another try would be told the same."""


class RefusedForGood(NotApplied):
    """A :class:`NotApplied` that another try would only meet again: the call is not tried a second time."""

    final = True


class Unavailable(SagaError):
    """Raise this in a compensation while the service is down: costs no try, the action waits.

    :param service: what is down, for people ("payments").
    :param after: seconds to wait before the next call; jitter is added.
    """

    def __init__(self, service: str, after: float = 30.0) -> None:
        super().__init__(f"{service} is unavailable, next call in about {after:g} s")
        self.service = service
        self.after = after


class CompensationRejected(SagaError):
    """Raise this in a compensation that can never succeed: no further try, a person decides."""


class SagaDivergedError(SagaError):
    """On resume the step asked for another action than the log holds at this place; an Airflow retry diverges again.

    :ivar from_seq: of the recorded action that it did not ask for.
    """

    def __init__(self, message: str, from_seq: int = 0) -> None:
        super().__init__(message)
        self.from_seq = from_seq


class InDoubtError(SagaError):
    """Nobody knows whether an action took effect, and it may not be called again; not retried by Airflow."""


_LONGEST_CHAIN = 100
"""Of causes; somebody may have made a circle of them."""


def in_doubt_by(problem: BaseException) -> str | None:
    """Which action nobody knows about has ended a step, if that is why: the body sees what its call raised."""
    link: BaseException | None = problem
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return None
        if found := getattr(link, "saga_in_doubt", None):
            return str(found)
        link = link.__cause__
    return None


class ActionRefusedError(SagaError):
    """The log refused to begin an action for a reason that a retry does not change; nothing was called."""


class UndeclaredToolError(SagaError):
    """An agent wanted to call a tool that nobody said how to undo; it was refused before it ran. Not retried."""


class ActionFailedError(NotApplied):
    """An action proved that it did not take effect, also after its last try."""


# -- the step as a whole --------------------------------------------------------------------------------------------


class StepRefusedError(SagaError):
    """The log does not let this step begin; the task fails, is not retried, and the failure policy does not apply."""


class StepWaitError(SagaError):
    """The step has to wait for an undo; it gives its slot back and is rescheduled by Airflow, no try is used up.

    :ivar request_uuid: the undo request that is waited for, if there is one.
    """

    def __init__(self, message: str, request_uuid: str | None = None) -> None:
        super().__init__(message)
        self.request_uuid = request_uuid


class StepInterrupted(BaseException):
    """The body of a step has to end now. A ``BaseException``, so that ``except Exception`` lets it through."""


class SagaCancelledError(StepInterrupted):
    """Somebody decided to stop the saga: no new action begins. The task fails without an Airflow retry."""


class StepFencedError(StepInterrupted):
    """A newer attempt, or the undo, owns this step: this process may write no intent and start no call."""


class StepKilledError(StepInterrupted):
    """Airflow asked this process to go (SIGTERM); what that means is read from the task instance afterwards."""


class StepOverdueError(StepInterrupted):
    """The ``execution_timeout`` of the task is over, and the body went on: no new action begins.

    Airflow ends a task by an exception in its body; this is for the body that catches it. An Airflow retry resumes.
    """


class StepCutOffError(StepInterrupted):
    """The saga store has been away for too long: nothing more can be written, so nothing more is called.

    The step ends with :class:`StoreUnavailableError`; an Airflow retry resumes it.
    """


class ActionTimedOut(StepInterrupted):
    """An action was abandoned at its timeout, and is in doubt. Raised into the thread that made the call.

    :ivar answered: the call ended after all, too late to count as its outcome; ``result`` is what it returned.
    """

    def __init__(
        self, message: str = "abandoned at its timeout", *, answered: bool = False, result: Any = None
    ) -> None:
        super().__init__(message)
        self.answered = answered
        self.result = result


# -- the store ------------------------------------------------------------------------------------------------------


class StoreError(SagaError):
    """Something about the saga store."""


class StoreUnavailableError(StoreError):
    """The saga store cannot be reached. Before a call: nothing was called, an Airflow retry tries again."""


class StoreNotMigratedError(StoreError):
    """The saga store has no tables, or older or newer ones than this version; says which command to run."""


class StoreNotConfiguredError(StoreError):
    """The connection of the saga store is missing; says how to make it."""


class UnknownSagaError(StoreError):
    """There is no saga of that name in the store."""


class VerbRefusedError(StoreError):
    """A verb (cancel, undo, resolve …) is not legal in the state the saga is in; says who decided what before.

    :ivar until: when it becomes legal by itself, if that is known (A1 not waited out yet).
    """

    def __init__(self, message: str, until: datetime | None = None) -> None:
        super().__init__(message)
        self.until = until


class UndoOutOfOrderError(StoreError):
    """A later step still has unsettled actions, so this step may not be undone yet (P5); nothing was called."""


class UndoFencedError(StoreError):
    """A newer attempt of the undo owns this step; this one stops without a further call."""
