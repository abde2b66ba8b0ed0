"""Train a small net in chunks, keep a checkpoint after each, and publish the result to a model registry.

Kill the task in the middle and clear it: it goes on from its last checkpoint (weights, optimizer, random generator),
and the weights come out as if nothing had happened, bit by bit. A run goes on from the model that is current. Mark the
run failed or undo it days later, and what was current before is current again, optimizer and all.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from airflow.sdk import task
from support import registry, training

from airflow_saga import READ_ONLY, ActionRecord, Applied, NotApplied, Saga, SagaDAG, Unavailable, action

PATIENCE = timedelta(seconds=5)
CHUNK_STEPS = 100


def take_back(record: ActionRecord) -> None:
    """Take this very version back, if it was published."""
    try:
        registry.take_back(record.params["model"], key=record.key)
    except registry.Busy as problem:
        raise Unavailable("the model registry", after=1) from problem


def find_published(record: ActionRecord) -> Applied | NotApplied:
    """Ask the registry what became of a version whose answer was lost."""
    found = registry.find(record.params["model"], record.key)
    return Applied(found) if found else NotApplied()


# All or nothing stands under its key: so it may be called again, and taken back without knowing if it is there.
@action(
    compensate=take_back, verify=find_published, idempotent=True, compensate_in_doubt=True, timeout=PATIENCE
)
def publish(model: str, packed: bytes, *, key: str) -> registry.Version:
    try:
        return registry.publish(model, packed, key=key)
    except registry.Busy as problem:
        raise NotApplied(str(problem)) from problem


@action(compensate=READ_ONLY)
def current_model(model: str) -> bytes | None:
    """Recorded: a task that is killed and cleared goes on from the model it began with, not from a newer one."""
    return registry.current(model)


with SagaDAG(
    "train_checkpoint",
    schedule=None,
    params={"model": "signs", "steps": 1000, "seed": 7, "pause_seconds": 1},
    tags=["demo"],
) as dag:

    @task.saga(retries=2)
    def train(saga: Saga, params: dict) -> dict[str, Any]:
        before = current_model(params["model"])
        start = training.unpack(before) if before else training.begin(params["seed"])
        state = saga.restored or start
        begin, goal = state["step"], start["step"] + params["steps"]
        while state["step"] < goal:
            saga.check()  # a long computation looks between its chunks whether it is to stop
            state = training.advance(state, min(CHUNK_STEPS, goal - state["step"]))
            saga.checkpoint(state)
            time.sleep(params["pause_seconds"])  # only so that somebody has time to press a button
        version = publish(params["model"], training.pack(state))
        return {**version, "steps": goal, "began_at": begin, "accuracy": training.accuracy(state)}

    train()
