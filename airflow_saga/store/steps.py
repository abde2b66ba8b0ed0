"""Verbs of a step that an attempt holds: write, heartbeat, finish, stop. How it came to hold it is in ``attach``.

Invariant: every write is guarded by the fence of the attach, so an attempt that lost its step writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from itertools import zip_longest
from typing import Any, NamedTuple

import psycopg

from airflow_saga.core.records import ActionRow, Intent, Outcome, StepRow
from airflow_saga.core.states import ActionState
from airflow_saga.store.connect import retried
from airflow_saga.store.prepared import Prepared
from airflow_saga.store.queries import Q
from airflow_saga.store.rows import first, one

Reading = tuple[Intent, Outcome]
"""A READ_ONLY call: it needs no intent, so its row is born with its outcome."""

LANDING_ALLOWANCE_SECONDS = 1.0
"""A1: a call starts within this of its intent, so it lands by allowance + timeout + settle_after."""


class Written(NamedTuple):
    """What became of one batch: seqs whose outcome was taken, seqs that may begin, and the state that was seen."""

    ended: frozenset[int]
    begun: frozenset[int]
    saga_state: str
    step_state: str
    fence: int


class Beat(NamedTuple):
    """What a heartbeat learned. ``held`` False: a newer attempt, or the undo, owns the step.

    ``cancelled_for_seconds``: how long ago the saga was told to stop, by the database's clock; None if it was not.
    """

    held: bool
    state: str
    mode: str | None
    stop_now: bool
    actor: str | None
    reason: str | None
    cancelled_for_seconds: float | None


class Checkpoint(NamedTuple):
    """What a body keeps for its next attempt. ``seq``: of the first action after it."""

    text: str
    seq: int


class StepVerbs:
    """One verb, one transaction. The connection is in autocommit and belongs to one thread."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    # -- the end of an attempt --------------------------------------------------------------------------------------

    @retried
    def finish_if_held(self, step: StepRow, output: str | None, output_lost: bool) -> bool:
        """RUNNING → SUCCEEDED with its output, in any saga state; False if the fence is lost or a call is open."""
        row = first(
            self.connection,
            Q.finish_step,
            {**_held(step), "output": output, "output_lost": output_lost},
        )
        return bool(row and row["done"])

    @retried
    def stop_if_held(self, step: StepRow) -> bool:
        """RUNNING → STOPPED: the attempt is over, what it did stays and can be resumed or undone."""
        row = first(self.connection, Q.stop_step, _held(step))
        return bool(row and row["done"])

    # -- while it runs ----------------------------------------------------------------------------------------------

    @retried
    def write_forward(
        self,
        step: StepRow,
        outcomes: Sequence[Outcome],
        intents: Sequence[Intent],
        readings: Sequence[Reading] = (),
    ) -> Written:
        """How calls ended, what READ_ONLY calls said, and which calls may begin: one commit, and one statement unless
        several calls end or begin at once."""
        if len(outcomes) <= 1 and len(intents) + len(readings) <= 1:
            outcome = outcomes[0] if outcomes else None
            birth = (intents[0], None) if intents else readings[0] if readings else None
            row = _WRITE_FORWARD.run(self.connection, write_params(step, outcome, birth))
            assert row is not None, "a step's rows are never deleted while it runs"
            return _written(row)
        if len(outcomes) <= 1 and len(intents) <= 1:
            return self._write_with_readings(step, outcomes, intents, readings)
        births = sorted([*((i, None) for i in intents), *readings], key=lambda birth: birth[0].seq)
        pairs = list(zip_longest(outcomes, births))
        rows = self._write_together([write_params(step, outcome, birth) for outcome, birth in pairs])
        seen = rows[-1]
        ended = frozenset(row[3] for row in rows if row and row[3] is not None)
        begun = frozenset(row[4] for row in rows if row and row[4] is not None)
        return Written(ended, begun, seen[0], seen[1], seen[2])

    def _write_with_readings(
        self,
        step: StepRow,
        outcomes: Sequence[Outcome],
        intents: Sequence[Intent],
        readings: Sequence[Reading],
    ) -> Written:
        outcome = outcomes[0] if outcomes else None
        write = write_params(step, outcome, (intents[0], None) if intents else None)
        write["readings"] = json.dumps([_told(*reading) for reading in readings])
        row = _WRITE_WITH_READINGS.run(self.connection, write)
        assert row is not None, "a step's rows are never deleted while it runs"
        *seen, begun = row
        seqs = frozenset() if begun is None else frozenset(map(int, begun[1:-1].split(b",")))
        return _written([*seen, None])._replace(begun=seqs)

    def _write_together(self, writes: list[dict[str, Any]]) -> list[Any]:
        """What parallel calls have to say goes out in one round trip and one commit."""
        try:
            with self.connection.pipeline(), self.connection.transaction():
                cursors = [self.connection.execute(Q.write_forward, write) for write in writes]
                return [cursor.fetchone() for cursor in cursors]
        except psycopg.OperationalError as problem:
            struck = problem.__context__
            if struck is not None and not isinstance(struck, psycopg.Error):
                raise struck from None  # an interruption, which a pipeline that cannot be left would hide
            raise

    @retried
    def reassert_if_allowed(self, step: StepRow, intent: Intent) -> Written:
        """An intent that is older than A1 allows, or may not have been committed, is asserted again before its call."""
        row = self.connection.execute(
            Q.reassert_intent,
            {
                **_held(step),
                "generation": step.generation,
                "seq": intent.seq,
                "lands_seconds": lands_seconds(intent),
            },
        ).fetchone()
        assert row is not None
        begun = frozenset() if row[3] is None else frozenset({intent.seq})
        return Written(frozenset(), begun, row[0], row[1], row[2])

    @retried
    def retry_if_allowed(self, step: StepRow, intent: Intent) -> tuple[int | None, Written]:
        """Another try of a recorded call; the number of the try, or None if a guard of begin refused it."""
        row = self.connection.execute(
            Q.retry_action,
            {
                **_held(step),
                "generation": step.generation,
                "seq": intent.seq,
                "name": intent.name,
                "fingerprint": intent.fingerprint,
                "max_tries": intent.max_tries,
                "idempotent": intent.idempotent,
                "key_lifetime_seconds": intent.key_lifetime_seconds,
                "lands_seconds": lands_seconds(intent),
            },
        ).fetchone()
        assert row is not None
        begun = frozenset() if row[3] is None else frozenset({intent.seq})
        return row[3], Written(frozenset(), begun, row[0], row[1], row[2])

    @retried
    def heartbeat_if_held(
        self, step: StepRow, lease_seconds: float, checkpoint: Checkpoint | None = None
    ) -> Beat:
        """Renew the lease, keep a new checkpoint, and read what the saga wants."""
        row = self.connection.execute(
            Q.heartbeat,
            {
                **_held(step),
                "lease_seconds": lease_seconds,
                "with_checkpoint": checkpoint is not None,
                "checkpoint": checkpoint and checkpoint.text,
                "checkpoint_seq": checkpoint and checkpoint.seq,
            },
        ).fetchone()
        assert row is not None
        state, mode, stop_now, actor, reason, held, cancelled_for = row
        return Beat(held, state, mode, stop_now, actor, reason, cancelled_for)

    @retried
    def verified_if_held(
        self,
        step: StepRow,
        action_id: int,
        state: str,
        result: str | None,
        note_text: str,
        result_lost: bool = False,
    ) -> bool:
        """IN_DOUBT → DONE or FAILED by a probe, A1 waited out."""
        params = {
            **_held(step),
            "action_id": action_id,
            "state": state,
            "result": result,
            "note": note_text,
            "result_lost": result_lost,
        }
        return self.connection.execute(Q.verified, params).fetchone() is not None

    def clock(self) -> datetime:
        """The database's clock."""
        row = self.connection.execute(Q.now_row).fetchone()
        assert row is not None
        return row[0]  # type: ignore[no-any-return]

    def recorded_action(self, step: StepRow, seq: int) -> ActionRow | None:
        params = {"step_id": step.step_id, "generation": step.generation, "seq": seq}
        return one(self.connection, ActionRow, Q.action_by_seq, params)


def _held(step: StepRow) -> dict[str, Any]:
    return {"saga_id": step.saga_id, "step_id": step.step_id, "fence": step.fence}


def lands_seconds(intent: Intent) -> float:
    return LANDING_ALLOWANCE_SECONDS + intent.timeout_seconds + intent.settle_after_seconds


_NO_OUTCOME: dict[str, Any] = {
    "ended_seq": None,
    "ended_state": None,
    "ended_result": None,
    "ended_lost": False,
    "ended_error": None,
    "ended_own": False,
}
_NO_BIRTH: dict[str, Any] = {
    "seq": None,
    "parallel": False,
    "name": None,
    "version": 0,
    "effect": None,
    "fingerprint": None,
    "key": None,
    "state": None,
    "params": None,
    "result": None,
    "lost": False,
    "error": None,
    "lands_seconds": None,
}


_WRITE_FORWARD = Prepared("saga_write_forward", Q.write_forward)
_WRITE_WITH_READINGS = Prepared("saga_write_with_readings", Q.write_forward_with_readings)


def _told(intent: Intent, read: Outcome) -> dict[str, Any]:
    """A READ_ONLY call as one row of the statement's JSON."""
    return {
        "seq": intent.seq,
        "parallel": intent.parallel,
        "name": intent.name,
        "version": intent.version,
        "effect": intent.effect,
        "fingerprint": intent.fingerprint,
        "key": intent.key,
        "params": intent.params,
        "state": read.state,
        "result": read.result,
        "lost": read.result_lost,
        "error": read.error,
    }


def _written(row: list[bytes | None]) -> Written:
    saga_state, step_state, fence, ended, begun = row
    assert saga_state is not None
    assert step_state is not None
    assert fence is not None
    return Written(
        frozenset() if ended is None else frozenset((int(ended),)),
        frozenset() if begun is None else frozenset((int(begun),)),
        saga_state.decode(),
        step_state.decode(),
        int(fence),
    )


def write_params(
    step: StepRow, outcome: Outcome | None, birth: tuple[Intent, Outcome | None] | None
) -> dict[str, Any]:
    write = {**_held(step), "generation": step.generation, **_NO_OUTCOME, **_NO_BIRTH}
    if outcome is not None:
        write["ended_seq"] = outcome.seq
        write["ended_state"] = outcome.state
        write["ended_result"] = outcome.result
        write["ended_lost"] = outcome.result_lost
        write["ended_error"] = outcome.error
        write["ended_own"] = outcome.own
    if birth is not None:
        intent, read = birth
        write["seq"] = intent.seq
        write["parallel"] = intent.parallel
        write["name"] = intent.name
        write["version"] = intent.version
        write["effect"] = intent.effect
        write["fingerprint"] = intent.fingerprint
        write["key"] = intent.key
        write["params"] = intent.params
        write["state"] = ActionState.PENDING.value if read is None else read.state
        if read is None:
            write["lands_seconds"] = lands_seconds(intent)
        else:
            write["result"] = read.result
            write["lost"] = read.result_lost
            write["error"] = read.error
    return write
