"""Names and keys that must stay the same for ever: what the log and the outside world recognise an action by."""

from __future__ import annotations

import hashlib
from uuid import UUID

from airflow_saga.core.errors import NameTooLongError

COMPENSATION_SUFFIX = "__compensation"
UNDO_RUN_PREFIX = "undo__"
PROBE_RUN_PREFIX = "probe__"
UNDO_TASK_PREFIX = "undo."
AIRFLOW_ID_LIMIT = 250
DAG_ID_LIMIT = AIRFLOW_ID_LIMIT - len(COMPENSATION_SUFFIX)
"""236: ``<dag_id>__compensation`` has to be a legal dag_id."""
TASK_ID_LIMIT = 237
"""``undo.<task_id>.indexes`` has to be a legal task_id."""
ACTION_NAME_LIMIT = 200
MODEL_REQUEST = "model_request"
"""Name of the action of every request to a model."""


def action_key(saga_uuid: UUID, task_id: str, map_index: int, generation: int, seq: int) -> str:
    """The idempotency key of one action: the same in each attempt of it, another one in each generation."""
    return _key_of(saga_uuid, f"do/{task_id}/{map_index}/{generation}/{seq}")


def undo_key(saga_uuid: UUID, action_key: str, reopened: int) -> str:
    """The idempotency key of an undo: the same in each try of it, another one once a late answer reopened it."""
    return _key_of(saga_uuid, f"undo/{action_key}/{reopened}")


def _key_of(saga_uuid: UUID, name: str) -> str:
    """32 hexadecimal digits: what services that take keys accept everywhere."""
    return hashlib.blake2b(
        name.encode("utf-8", "surrogatepass"), digest_size=16, key=saga_uuid.bytes
    ).hexdigest()


def compensation_dag_id(dag_id: str) -> str:
    return dag_id + COMPENSATION_SUFFIX


def forward_dag_id(dag_id: str) -> str | None:
    """The saga DAG that this compensation DAG undoes, None if it is not one."""
    return dag_id.removesuffix(COMPENSATION_SUFFIX) if dag_id.endswith(COMPENSATION_SUFFIX) else None


def probe_run_id(probe_uuid: UUID) -> str:
    """Of a run of a compensation DAG that only asks verify probes."""
    return f"{PROBE_RUN_PREFIX}{probe_uuid}"


def undo_run_id(request_uuid: UUID) -> str:
    return f"{UNDO_RUN_PREFIX}{request_uuid}"


def request_uuid_of(run_id: str) -> UUID | None:
    """The undo request that a run of a compensation DAG is named after; None if it was started by hand."""
    if not run_id.startswith(UNDO_RUN_PREFIX):
        return None
    try:
        return UUID(run_id.removeprefix(UNDO_RUN_PREFIX))
    except ValueError:
        return None


def plan_hash(canonical_plan: str) -> str:
    return hashlib.sha256(canonical_plan.encode("utf-8", "surrogatepass")).hexdigest()


def check_dag_id(dag_id: str) -> None:
    """:raises NameTooLongError: at parse, if the compensation DAG could not be named."""
    if len(dag_id) > DAG_ID_LIMIT:
        raise NameTooLongError(
            f"dag_id {dag_id[:40]}… has {len(dag_id)} characters; a saga DAG may have at most {DAG_ID_LIMIT}, so "
            f"that <dag_id>{COMPENSATION_SUFFIX} is still a legal dag_id. Shorten it."
        )


def check_task_id(task_id: str) -> None:
    """:raises NameTooLongError: at parse, if the task that undoes this step could not be named."""
    if len(task_id) > TASK_ID_LIMIT:
        raise NameTooLongError(
            f"task_id {task_id[:40]}… has {len(task_id)} characters; a saga step may have at most {TASK_ID_LIMIT}, "
            f"so that the tasks that undo it are still legal task_ids. Shorten it."
        )
