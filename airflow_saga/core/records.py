"""What passes between the layers: rows of the log, and what users' functions receive and return. All frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from airflow_saga.core.errors import NotApplied
from airflow_saga.core.states import StepState

# -- what users' functions receive and return -----------------------------------------------------------------------


@dataclass(frozen=True)
class ActionRecord:
    """All that a compensation, a ``verify`` or a ``confirm`` probe gets to know about the action it is about.

    :ivar params: the arguments by name, equal to the ones of the call, defaults filled in.
    :ivar result: what the call returned; None if it is in doubt or ``result_lost``.
    :ivar key: the idempotency key of the call, the same in each of its attempts.
    :ivar undo_key: the idempotency key of this undo, the same in each of its tries.
    :ivar in_doubt: nobody knows whether the call took effect.
    :ivar attempt: which try of the compensation this is, from 1; 0 in a forward probe.
    :ivar later_token: what the previous try gave to ``Later(token)``.
    :ivar deferred: of a deferrable operator that began and is not known to have ended: what its trigger was told, with
        the id of the remote work (``{"trigger", "kwargs", "method", "method_kwargs"}``, secrets masked); else None.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    name: str
    version: int
    params: Mapping[str, Any]
    result: Any
    key: str
    undo_key: str
    in_doubt: bool = False
    attempt: int = 0
    result_lost: bool = False
    later_token: Any = None
    deferred: Any = None


@dataclass(frozen=True)
class Applied:
    """A probe's yes: the outside world shows the effect.

    :param result: what the call would have returned; the compensation gets it as ``record.result``.
    """

    result: Any = None


@dataclass(frozen=True)
class Unknown:
    """A probe's "I cannot tell". A probe that raises or times out says the same."""


ProbeAnswer = Applied | NotApplied | Unknown


@dataclass(frozen=True)
class Later:
    """A compensation's "under way": asked for again after a while (a refund that settles tomorrow).

    :param token: kept, and given back as ``record.later_token``.
    :param after: when to ask again; ``undo_deadline`` of the action bounds the whole.
    """

    token: Any = None
    after: timedelta = timedelta(hours=1)


# -- rows of the log ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SagaRow:
    """One DAG run.

    :ivar pruned_at: since when its actions are gone: nobody can tell any more what it did.
    """

    saga_id: int
    saga_uuid: UUID
    dag_id: str
    run_id: str
    state: str
    mode: str | None
    cause: str | None
    actor: str | None
    reason: str | None
    clear_number: int
    stop_clear_number: int
    on_failure: str
    on_compensation_failure: str
    cancel_deadline_seconds: float
    deadline_at: datetime | None
    stop_now: bool
    created_at: datetime
    changed_at: datetime
    pruned_at: datetime | None


@dataclass(frozen=True)
class StepRow:
    """One task instance that can act.

    :ivar ancestors: task_ids of all saga steps upstream of this one, also through plain tasks.
    :ivar checkpoint_seq: of the first action after the checkpoint.
    :ivar removed: its index is no more, since the mapping has become shorter.
    :ivar mapped_group: the mapped task group it stands in; steps of one such group are ordered per index only.
    """

    step_id: int
    saga_id: int
    task_id: str
    map_index: int
    item_fingerprint: str | None
    ancestors: list[str]
    mapped_group: str | None
    state: str
    generation: int
    fence: int
    lease_until: datetime | None
    ti_id: UUID | None
    try_number: int
    max_tries: int
    retries: int
    clear_number: int
    host: str | None
    pid: int | None
    dag_version: str | None
    output: str | None
    output_lost: bool
    checkpoint: str | None
    attached_at: datetime
    changed_at: datetime
    checkpoint_seq: int
    removed: bool

    @property
    def is_gone(self) -> bool:
        """Nobody runs it again, and nothing of it stands."""
        return self.removed and self.state == StepState.UNDONE

    @property
    def label(self) -> str:
        return self.task_id if self.map_index < 0 else f"{self.task_id}[{self.map_index}]"


@dataclass(frozen=True)
class ActionRow:
    """One recorded call.

    :ivar tries_before: of its ``tries``, those that no longer count: a clear grants new ones.
    :ivar lands_by: until then an attempt that did not report may still take effect (A1).
    :ivar kept: an undo of a later part of its step has left it standing on purpose.
    :ivar deferred: it is PENDING without a process, and waits in Airflow's triggerer.
    :ivar deferral: what its trigger was told, as kept; until the call is done.
    """

    action_id: int
    saga_id: int
    step_id: int
    generation: int
    seq: int
    parallel: bool
    name: str
    version: int
    effect: str
    fingerprint: str
    key: str
    state: str
    in_doubt: bool
    tries: int
    tries_before: int
    params: str
    result: str | None
    result_lost: bool
    error: str | None
    lands_by: datetime | None
    begun_at: datetime
    finished_at: datetime | None
    undo_key: str | None
    undo_tries: int
    undo_failures: int
    undo_begun_at: datetime | None
    undo_finished_at: datetime | None
    undo_deadline_at: datetime | None
    reconcile_at: datetime | None
    waiting_for: str | None
    later_token: str | None
    probed: bool
    reopened: int
    twin_of: int | None
    note: str | None
    settled: bool
    residual: bool
    kept: bool
    deferred: bool = False
    deferral: str | None = None


class RecordedCall(NamedTuple):
    """What a resumed step has to know of an action, loaded by the thousand: see :class:`ActionRow`."""

    action_id: int
    seq: int
    parallel: bool
    name: str
    version: int
    effect: str
    fingerprint: str
    key: str
    state: str
    tries: int
    tries_before: int
    params: str
    result: str | None
    result_lost: bool
    error: str | None
    twin_of: int | None


@dataclass(frozen=True)
class RequestRow:
    """One wish to undo: the row that everything else of an undo follows from."""

    request_id: int
    request_uuid: UUID
    saga_id: int
    number: int
    whole_run: bool
    state: str
    cause: str
    actor: str
    reason: str | None
    clear_number: int
    stop_now: bool
    plan: dict[str, Any] | None
    plan_hash: str | None
    owner_run_id: str | None
    owner_lease_until: datetime | None
    triggered_at: datetime | None
    deadline_at: datetime | None
    asked_at: datetime
    frozen_at: datetime | None
    ended_at: datetime | None


# -- what the forward side hands to the store ------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """What a task process knows about itself when it attaches to its step.

    :ivar item_fingerprint: of what a mapped task instance was mapped over; None where there is nothing to tell it by.
    :ivar others_cleared: labels of the task instances of the run that are cleared.
    :ivar others_removed: labels of mapped ones that are no more: the mapping has become shorter.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    ti_id: UUID
    try_number: int
    max_tries: int
    retries: int
    clear_number: int
    ancestors: tuple[str, ...] = ()
    mapped_group: str | None = None
    item_fingerprint: str | None = None
    host: str | None = None
    pid: int | None = None
    dag_version: str | None = None
    on_failure: str = "compensate"
    on_compensation_failure: str = "continue"
    cancel_deadline_seconds: float = 3600.0
    lease_seconds: float = 15.0
    others_cleared: frozenset[str] | None = None
    others_removed: frozenset[str] = frozenset()

    @property
    def step_label(self) -> str:
        return self.task_id if self.map_index < 0 else f"{self.task_id}[{self.map_index}]"

    @property
    def label(self) -> str:
        return f"{self.dag_id} / {self.run_id} / {self.step_label}"


class Intent(NamedTuple):
    """A call that is about to begin. ``action_id`` set: another try of a row that is FAILED or IN_DOUBT."""

    seq: int
    name: str
    version: int
    effect: str
    fingerprint: str
    key: str
    params: str
    timeout_seconds: float
    settle_after_seconds: float
    parallel: bool = False
    action_id: int | None = None
    idempotent: bool = False
    key_lifetime_seconds: float | None = None
    max_tries: int = 1


class Outcome(NamedTuple):
    """How a call ended. ``own``: the attempt itself reported, so nothing of it can land any more."""

    seq: int
    state: str
    result: str | None = None
    result_lost: bool = False
    error: str | None = None
    own: bool = True
    tries: int = 1
