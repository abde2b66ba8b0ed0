"""What the runtime needs to know of Airflow, said without Airflow. The airflow layer implements it, tests fake nothing:
they run the same code with a platform of their own that keeps its answers in plain fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from airflow_saga.core.marks import FailedRun


@dataclass(frozen=True)
class Limits:
    """How long things may take, all in seconds; the ``[saga]`` section of Airflow's configuration.

    :ivar lease_seconds: a step whose process is silent this long is taken for lost.
    :ivar heartbeat_seconds: how often a process renews its lease and looks for a cancel if no notification comes.
    :ivar outcome_flush_seconds: how long an outcome waits for the next intent to ride with.
    :ivar flush_seconds: how long READ_ONLY results and checkpoints may wait.
    :ivar checkpoint_every: how many checkpoints may wait; the last one is the one that counts.
    :ivar stop_grace_seconds: how long a body may go on without a call after a cancel, before its process is ended.
    :ivar abandon_grace_seconds: how long an abandoned call may take to end, before its process is ended.
    :ivar wait_in_process_seconds: how long a step waits for an undo in its slot before it gives the slot back.
    :ivar store_outage_seconds: how long a running step waits for the store to come back.
    """

    lease_seconds: float = 15.0
    heartbeat_seconds: float = 1.0
    outcome_flush_seconds: float = 0.002
    flush_seconds: float = 0.5
    checkpoint_every: int = 100
    stop_grace_seconds: float = 30.0
    abandon_grace_seconds: float = 5.0
    wait_in_process_seconds: float = 10.0
    store_outage_seconds: float = 60.0
    max_value_bytes: int = 8 * 1024 * 1024
    mass_undo_threshold: int = 20
    mass_undo_window_seconds: float = 60.0
    start_alert_seconds: float = 300.0


class TaskPlatform(Protocol):
    """What a step may ask about its own task instance and run, from its own thread, never from a signal handler."""

    def task_state(self) -> str | None:
        """The state of this task instance as Airflow's database has it now; None if it was cleared."""

    def run_state(self) -> str | None:
        """The state of this DAG run now."""

    def trigger_undo(self, request_uuid: UUID) -> None:
        """Start the run of the compensation DAG that carries this request out; doing it twice is harmless."""


class RunPlatform(Protocol):
    """What the reconciler and the undo may ask about any run."""

    def run_state(self, dag_id: str, run_id: str) -> str | None:
        """``queued``, ``running``, ``success``, ``failed``; None if there is no such run."""

    def run_clear_number(self, dag_id: str, run_id: str) -> int:
        """How often the run was cleared; 0 if it is not known."""

    def failed_run(self, dag_id: str, run_id: str) -> FailedRun:
        """What shows whether a person marked this run failed, which has failed."""

    def task_state(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
        """The state of a task instance; None if it has none."""

    def trigger_undo(self, dag_id: str, run_id: str, request_uuid: UUID, *, reset: bool) -> bool:
        """Start the compensation run of a request; ``reset``: start one that is over again. False: could not."""
