"""The handle that a body asks for by naming a parameter ``saga``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from airflow_saga.runtime import codec

if TYPE_CHECKING:
    from airflow_saga.core.records import StepRow
    from airflow_saga.runtime.journal import Journal
    from airflow_saga.runtime.secrecy import KnownSecrets


class Saga:
    """What a step's body may ask of its saga."""

    def __init__(
        self, journal: Journal, dag_id: str, run_id: str, step: StepRow, secrets: KnownSecrets
    ) -> None:
        self.dag_id = dag_id
        self.run_id = run_id
        self.task_id = step.task_id
        self.map_index = step.map_index
        self.generation = step.generation
        self.restored: Any = codec.decode(step.checkpoint) if step.checkpoint is not None else None
        """The newest checkpoint of an earlier attempt, None if there was none."""
        self._journal = journal
        self._secrets = secrets
        self._lock = threading.Lock()
        self._newest: str | None = None
        journal.set_checkpoint(self._take)

    @property
    def cancelled(self) -> bool:
        """Whether the step has to stop; a long computation may look here between its calls."""
        return self._journal.stop_order is not None

    def check(self) -> None:
        """:raises StepInterrupted: if the step has to stop; let it through."""
        self._journal.check()

    def checkpoint(self, value: Any) -> None:
        """Keep a value for the next attempt. Never blocks on the database; the newest one wins.

        It is written with the next heartbeat and when the step ends. At most ``heartbeat_seconds`` of it are lost to
        a SIGKILL.

        :raises ValueNotKeptError: it would not come back as it is (or is too large); nothing is kept of it.
        :raises SecretInParamsError: it holds a secret.
        """
        text = codec.encode(
            value,
            secrets=self._secrets.pattern(),
            where="checkpoint",
            max_bytes=self._journal.limits.max_value_bytes,
        )
        with self._lock:
            self._newest = text

    def _take(self) -> str | None:
        with self._lock:
            newest, self._newest = self._newest, None
        return newest
