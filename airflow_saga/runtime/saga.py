"""The handle that a body asks for by naming a parameter ``saga``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from airflow_saga.core.errors import StepFencedError
from airflow_saga.runtime import codec, statements
from airflow_saga.store.rewind import RewindVerbs
from airflow_saga.store.steps import Checkpoint

if TYPE_CHECKING:
    from airflow_saga.core.actions import Marker
    from airflow_saga.core.records import StepRow
    from airflow_saga.runtime.journal import Journal
    from airflow_saga.runtime.replay import Replay
    from airflow_saga.runtime.secrecy import KnownSecrets


class Saga:
    """What a step's body may ask of its saga."""

    def __init__(
        self, journal: Journal, dag_id: str, run_id: str, step: StepRow, secrets: KnownSecrets, replay: Replay
    ) -> None:
        self.dag_id = dag_id
        self.run_id = run_id
        self.task_id = step.task_id
        self.map_index = step.map_index
        self.generation = step.generation
        self.restored: Any = codec.decode(step.checkpoint) if step.checkpoint is not None else None
        """The newest checkpoint of an earlier attempt, None if there was none."""
        self._step = step
        self._journal = journal
        self._secrets = secrets
        self._replay = replay
        self._lock = threading.Lock()
        self._newest: Checkpoint | None = None
        """Not taken by the journal yet."""
        self._latest = step.checkpoint
        self._waiting = 0
        self._savepoints: set[str] = set()
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

        It is committed within ``flush_ms`` of the first that waits, when ``checkpoint_every`` of them wait, before the
        next action is called, and when the step ends. So a SIGKILL loses at most ``flush_ms`` of them, and never one
        that was made before the newest action.

        :raises ValueNotKeptError: it would not come back as it is (or is too large); nothing is kept of it.
        :raises SecretInParamsError: it holds a secret.
        """
        text = codec.encode(
            value,
            secrets=self._secrets.pattern(),
            where="checkpoint",
            max_bytes=self._journal.limits.max_value_bytes,
        )
        newest = Checkpoint(text, self._position())
        with self._lock:
            self._newest = newest
            self._latest = text
            self._waiting += 1
            waiting = self._waiting
        if waiting == 1 or waiting % self._journal.limits.checkpoint_every == 0:
            self._journal.checkpoint_waits(long_enough=waiting > 1)

    def sql(
        self,
        conn_id: str,
        statement: str,
        params: statements.Params | None = None,
        *,
        compensate: str | Marker,
    ) -> Any:
        """Run one SQL statement as an action, together with a receipt of it in the same transaction.

        So it takes effect exactly once, whatever is killed or retried, and so does its undo: nothing stays in doubt.
        The database needs the table of receipts: ``airflow saga db migrate --receipts --conn-id CONN`` makes it.

        :param conn_id: an Airflow connection to a database (any ``DbApiHook``).
        :param statement: one statement, without ``COMMIT``, in the driver's own style (``%(name)s`` on Postgres).
        :param params: by name, or by place. A ``Secret`` is revealed for the statement and logged by its name.
        :param compensate: the SQL that undoes it, with the named ``params`` and what the statement RETURNed as its
            parameters; it runs once for each row that was RETURNed, so not at all where none was. Or
            ``NON_COMPENSABLE``; or ``READ_ONLY``, which takes no receipt and keeps nothing that the statement changes.
        :returns: the rows as dicts where the statement returned any kind of rows, else how many it changed.
        :raises NotApplied: it failed, or the table of receipts is missing; nothing of it was kept. Like any action it
            is tried again before the body gets to hear of it, and an Airflow retry does not repeat what is DONE.
        """
        return statements.call(conn_id, statement, params, compensate)

    def resume_from(self, default: Any = None) -> Any:
        """The newest checkpoint of an earlier attempt, or ``default``; the body goes on from there.

        So the actions that were called before that checkpoint are not asked for again, and what READ_ONLY ones had said
        then is forgotten: keep in the checkpoint what the body needs of it. A body that only looks at :attr:`restored`
        asks for all of them, and gets their recorded results.

        :raises RuntimeError: the body has called an action already: the place to go on from lies behind it.
        """
        if self._step.checkpoint is None:
            return default
        if self._replay.asked or self._latest != self._step.checkpoint:
            raise RuntimeError(
                f"{self._step.label}: resume_from() comes first, before the step calls an action or makes a checkpoint"
            )
        self._replay.skip_before(self._step.checkpoint_seq)
        return self.restored

    def savepoint(self, name: str) -> None:
        """Give this place a name: ``airflow saga rewind DAG RUN --to NAME`` undoes what came after it and goes on from
        it, with the checkpoint that is the newest one here.

        Committed when this returns.

        :param name: once per step; a body that is resumed comes past the same names again.
        :raises ValueError: this body has given the name already, or other calls of the step are under way.
        :raises StepFencedError: a newer attempt or the undo owns the step.
        """
        if not name or ":" in name or len(name) > 200:
            raise ValueError(f"save-point {name[:50]!r}: a name has 1 to 200 characters and no colon")
        if name in self._savepoints:
            raise ValueError(
                f"save-point {name!r} is made twice in one step; give each place a name of its own"
            )
        if self._journal.calls.seqs():
            raise ValueError(
                f"save-point {name!r}: calls of this step are under way, so it is no single place"
            )
        seq = self._position()
        step, checkpoint = self._step, self._latest
        if not self._journal.ask(lambda c: RewindVerbs(c).savepoint_if_held(step, seq, name, checkpoint)):
            raise StepFencedError(f"{step.label}: a newer attempt or the undo owns this step")
        self._savepoints.add(name)

    def _position(self) -> int:
        return self._replay.position(self._journal.calls.seqs())

    def _take(self) -> Checkpoint | None:
        with self._lock:
            newest, self._newest, self._waiting = self._newest, None, 0
        return newest
