"""Reading a DAG as a saga: which tasks are steps, what comes after what (through plain tasks too), what is mapped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

STEP_MARK = "is_saga_step"
"""Class attribute of every operator whose task instances can act."""


def is_step(task: Any) -> bool:
    """Whether a task of a parsed DAG is a saga step; a mapped one is known by the operator it maps."""
    return bool(getattr(getattr(task, "operator_class", None) or type(task), STEP_MARK, False))


def is_mapped(task: Any) -> bool:
    """Whether one task has many instances: it is expanded itself, or stands in an expanded task group."""
    return bool(getattr(task, "is_mapped", False)) or mapped_group_of(task) is not None


def mapped_group_of(task: Any) -> str | None:
    """The innermost expanded task group that a task stands in; its instances are ordered per index."""
    for group in _groups_of(task):
        if type(group).__name__ == "MappedTaskGroup":
            return str(group.group_id)
    return None


def mapped_item(operator: Any) -> dict[str, Any]:
    """What one instance of a mapped task is mapped over, by argument; empty where it is not mapped.

    :param operator: the unmapped operator as it runs, its arguments rendered.
    """
    declared = operator.dag.get_task(operator.task_id) if operator.has_dag() else operator
    if not hasattr(operator, "op_kwargs"):
        return _mapped_fields(operator, declared)
    if getattr(declared, "is_mapped", False):
        partial = declared.partial_kwargs
        whole = {name: getattr(operator, name) for name in ("op_args", "op_kwargs") if name not in partial}
        fixed = partial.get("op_kwargs") or {}
        return whole or {name: value for name, value in operator.op_kwargs.items() if name not in fixed}
    if mapped_group_of(declared) is None:
        return {}
    named = {
        name: operator.op_kwargs[name]
        for name, value in declared.op_kwargs.items()
        if _is_mapped_argument(value)
    }
    placed = {
        str(place): operator.op_args[place]
        for place, value in enumerate(declared.op_args)
        if _is_mapped_argument(value)
    }
    return named | placed


def _mapped_fields(operator: Any, declared: Any) -> dict[str, Any]:
    """For an operator of any provider: what it is mapped over is in its template fields."""
    fields = [name for name in operator.template_fields if hasattr(operator, name)]
    if getattr(declared, "is_mapped", False):
        expanded = getattr(declared.expand_input, "value", None)
        names = expanded if isinstance(expanded, dict) else set(fields) - set(declared.partial_kwargs)
        return {name: getattr(operator, name) for name in fields if name in names}
    if mapped_group_of(declared) is None:
        return {}
    return {
        name: getattr(operator, name) for name in fields if _is_mapped_argument(getattr(declared, name, None))
    }


def _is_mapped_argument(value: Any) -> bool:
    return type(value).__name__ == "MappedArgument"


def _groups_of(task: Any) -> Iterator[Any]:
    group = getattr(task, "task_group", None)
    while group is not None:
        yield group
        group = getattr(group, "parent_group", None)


def steps_of(dag: Any) -> list[Any]:
    return [task for task in dag.tasks if is_step(task)]


def ancestors_of(task: Any) -> tuple[str, ...]:
    """The task_ids of all saga steps that a task comes after, sorted."""
    return tuple(sorted(found.task_id for found in _walk(task, "upstream_task_ids") if is_step(found)))


def next_steps_of(task: Any) -> set[str]:
    """The saga steps that directly follow a task, looking through plain tasks in between."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [task]
    while waiting:
        for task_id in waiting.pop().downstream_task_ids:
            if task_id in seen:
                continue
            seen.add(task_id)
            following = task.dag.get_task(task_id)
            if is_step(following):
                found.add(task_id)
            else:
                waiting.append(following)
    return found


def _walk(task: Any, direction: str) -> Iterator[Any]:
    seen: set[str] = set()
    waiting = list(getattr(task, direction))
    while waiting:
        task_id = waiting.pop()
        if task_id in seen:
            continue
        seen.add(task_id)
        found = task.dag.get_task(task_id)
        yield found
        waiting.extend(getattr(found, direction))


@dataclass(frozen=True)
class SagaPolicy:
    """What a DAG says about failures; stored with the saga at the first attach, since listeners cannot see the DAG."""

    on_failure: Literal["compensate", "keep"] = "compensate"
    on_compensation_failure: Literal["continue", "halt"] = "continue"

    def __post_init__(self) -> None:
        if self.on_failure not in ("compensate", "keep"):
            raise ValueError(f"on_failure={self.on_failure!r}: it is 'compensate' or 'keep'")
        if self.on_compensation_failure not in ("continue", "halt"):
            raise ValueError(
                f"on_compensation_failure={self.on_compensation_failure!r}: it is 'continue' or 'halt'"
            )


_policies: dict[str, SagaPolicy] = {}


def set_policy(dag_id: str, policy: SagaPolicy) -> None:
    """Said once per parse of the DAG file, in every process that loads it."""
    _policies[dag_id] = policy


def policy_of(dag_id: str) -> SagaPolicy:
    return _policies.get(dag_id, SagaPolicy())
