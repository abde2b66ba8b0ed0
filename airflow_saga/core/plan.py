"""The undo plan: which actions, in which order, and what will be done with each. Frozen with the request, hashed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from airflow_saga.core.identity import plan_hash
from airflow_saga.core.records import ActionRow, StepRow
from airflow_saga.core.states import ActionState, Effect

_EXPECTED: dict[str, str] = {
    ActionState.PENDING: "wait for it, then undo",
    ActionState.DONE: "undo",
    ActionState.IN_DOUBT: "find out, then undo",
    ActionState.COMPENSATING: "undo again",
    ActionState.COMPENSATION_FAILED: "undo again",
    ActionState.NON_COMPENSABLE: "cannot be undone",
}


def comes_after(later: StepRow, earlier: StepRow) -> bool:
    """Whether ``later`` ran after ``earlier`` by the DAG's edges, so that it is undone first (P5).

    Mapped tasks are ordered all indexes x all indexes, except inside one mapped task group.
    """
    if earlier.task_id not in later.ancestors:
        return False
    same_group = later.mapped_group is not None and later.mapped_group == earlier.mapped_group
    return later.map_index == earlier.map_index if same_group else True


def undo_order(steps: Iterable[StepRow]) -> list[StepRow]:
    """Steps in an order in which they may be undone: a step stands before everything it came after."""
    return sorted(steps, key=lambda step: (-len(step.ancestors), step.task_id, -step.map_index))


def build_plan(
    steps: Sequence[StepRow], actions: Iterable[ActionRow], from_seq: dict[int, int], *, goes_on: bool = False
) -> dict[str, Any]:
    """What an undo of these steps has to settle, as plain JSON data.

    :param from_seq: step_id → first seq of the current generation that the undo is about (0: the whole step).
    :param goes_on: nobody asked anew (a date fell due, a late answer): what was given up before is not tried again.
    """
    by_step: dict[int, list[ActionRow]] = {}
    for row in actions:
        by_step.setdefault(row.step_id, []).append(row)
    planned = []
    for step in undo_order(steps):
        rows = [
            row
            for row in by_step.get(step.step_id, [])
            if row.residual and not _stays(row, step, from_seq.get(step.step_id, 0), goes_on=goes_on)
        ]
        rows.sort(key=lambda row: (row.generation, row.seq), reverse=True)
        if rows:
            planned.append(
                {
                    "step_id": step.step_id,
                    "task_id": step.task_id,
                    "map_index": step.map_index,
                    "actions": [_planned(row, goes_on) for row in rows],
                }
            )
    return {"steps": planned}


def _stays(row: ActionRow, step: StepRow, from_seq: int, *, goes_on: bool) -> bool:
    """It stands before the place that the undo goes back to; what an undo that only goes on finds kept, stays kept."""
    return row.kept if goes_on else row.generation == step.generation and row.seq < from_seq


def _planned(row: ActionRow, goes_on: bool) -> dict[str, Any]:
    expected = "cannot be undone" if row.effect == Effect.NON_COMPENSABLE else _EXPECTED[row.state]
    if goes_on and row.settled and row.state != ActionState.NON_COMPENSABLE:
        expected = "waits for its date" if row.state == ActionState.COMPENSATING else "waits for a person"
    return {
        "action_id": row.action_id,
        "generation": row.generation,
        "seq": row.seq,
        "name": row.name,
        "version": row.version,
        "state": row.state,
        "expected": expected,
    }


def hash_of(plan: dict[str, Any]) -> str:
    """Equal plans have equal hashes; a person signs a plan by it."""
    return plan_hash(json.dumps(plan, sort_keys=True, separators=(",", ":")))


def action_ids(plan: dict[str, Any]) -> list[int]:
    return [planned["action_id"] for step in plan["steps"] for planned in step["actions"]]
