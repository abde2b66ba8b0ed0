"""``compensable(SomeOperator)`` as far as a DAG file shows it: its arguments, its action, what Airflow makes of it."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from airflow.providers.amazon.aws.operators.s3 import S3CreateBucketOperator
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, BaseOperator
from airflow.serialization.serialized_objects import DagSerialization

from airflow_saga import (
    NON_COMPENSABLE,
    READ_ONLY,
    ActionRecord,
    SagaDAG,
    SagaOperator,
    compensable,
    compensation_dag,
)
from airflow_saga.core import declare
from airflow_saga.core.actions import Action, Registry
from airflow_saga.core.errors import ActionDeclarationError
from airflow_saga.graph import is_step
from airflow_saga.operators import compensable as module

Bash = compensable(BashOperator)


def undo(record: ActionRecord) -> None: ...


def stop(record: ActionRecord) -> str:
    return "stopped"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry of this test's own."""
    made = Registry()
    monkeypatch.setattr(declare, "registry", made)
    return made


def _action(registry: Registry, name: str) -> Action[Any, Any]:
    found = registry.find(name, 1)
    assert found is not None, registry.names()
    return found


# -- the class --------------------------------------------------------------------------------------------------------


def test_class_is_made_once_and_is_a_step() -> None:
    assert compensable(BashOperator) is Bash
    assert issubclass(Bash, BashOperator)
    assert is_step(Bash(task_id="t", bash_command="true", compensate=undo))


def test_compensate_is_required() -> None:
    with pytest.raises(TypeError, match="compensate"):
        Bash(task_id="t", bash_command="true")


@pytest.mark.parametrize("what", [SagaOperator, Bash, "bash", ActionRecord])
def test_what_is_no_operator_or_a_step_already_is_refused(what: Any) -> None:
    with pytest.raises(ActionDeclarationError):
        compensable(what)


def test_argument_that_the_operator_has_itself_stays_its_own(registry: Registry) -> None:
    bucket = compensable(S3CreateBucketOperator)
    with SagaDAG("d", schedule=None):
        made = bucket(task_id="t", bucket_name="b", verify=False, compensate=undo, saga_verify=stop)

    assert made.verify is False
    assert _action(registry, "d.t").verify is stop


def test_operator_is_never_deferred_without_a_process() -> None:
    class FromTrigger(BashOperator):
        start_from_trigger = True

    made = compensable(FromTrigger)(task_id="t", bash_command="true", compensate=undo)

    assert made.start_from_trigger is False


# -- its action -------------------------------------------------------------------------------------------------------


def test_action_is_declared_with_the_dag_and_named_after_dag_and_task(registry: Registry) -> None:
    for dag_id in ("one", "two"):
        with SagaDAG(dag_id, schedule=None):
            Bash(task_id="t", bash_command="true", compensate=undo, aliases=("former",), version=3)
    plain = DAG("three", schedule=None)
    Bash(task_id="t", bash_command="true", compensate=NON_COMPENSABLE, dag=plain)
    compensation_dag(plain)

    assert registry.names() == ["one.t", "three.t", "two.t"]
    found = registry.find("two.former", 3)
    assert found is not None
    assert (found.name, found.compensation) == ("two.t", undo)


def test_mapped_operator_is_declared_by_what_partial_was_given(registry: Registry) -> None:
    with SagaDAG("d", schedule=None):
        Bash.partial(task_id="t", compensate=undo, timeout=timedelta(seconds=7)).expand(
            bash_command=["a", "b"]
        )
        Bash.partial(task_id="kwargs", compensate=undo).expand_kwargs([{"bash_command": "a"}])

    assert _action(registry, "d.t").timeout == timedelta(seconds=7)
    assert _action(registry, "d.kwargs").compensation is undo


def test_mapped_operator_whose_compensation_is_mapped_over_is_refused() -> None:
    with pytest.raises(ActionDeclarationError, match=r"partial"), SagaDAG("d", schedule=None):
        Bash.partial(task_id="t", bash_command="true").expand(compensate=[undo])


def test_timeout_is_the_tasks_own_or_an_hour(registry: Registry) -> None:
    with SagaDAG("d", schedule=None):
        Bash(task_id="plain", bash_command="true", compensate=undo)
        limited = {"execution_timeout": timedelta(minutes=5)}
        Bash(task_id="limited", bash_command="true", compensate=undo, **limited)
        Bash(task_id="said", bash_command="true", compensate=undo, timeout=timedelta(minutes=1), **limited)

    found = [_action(registry, f"d.{task}").timeout for task in ("plain", "limited", "said")]
    assert found == [timedelta(hours=1), timedelta(minutes=5), timedelta(minutes=1)]


def test_read_only_operator_is_left_to_airflows_retries(registry: Registry) -> None:
    with SagaDAG("d", schedule=None):
        Bash(task_id="t", bash_command="true", compensate=READ_ONLY)

    assert _action(registry, "d.t").retry.tries == 1


def test_compensation_that_the_undo_could_not_find_is_an_import_error() -> None:
    for wrong in (lambda record: None, "undo", None):
        with pytest.raises(ActionDeclarationError, match=r"d\.t"), SagaDAG("d", schedule=None):
            Bash(task_id="t", bash_command="true", compensate=wrong)


@pytest.mark.parametrize("wrong", [{"cancel_deferred": "stop"}, {"compensate": NON_COMPENSABLE}])
def test_cancel_deferred_that_could_not_be_called_is_an_import_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ActionDeclarationError, match="cancel_deferred"), SagaDAG("d", schedule=None):
        Bash(task_id="t", bash_command="true", **{"compensate": undo, "cancel_deferred": stop} | wrong)


@pytest.mark.parametrize(
    ("more", "said"),
    [({"deferred": {"kwargs": {}}}, "stopped"), ({}, None), ({"deferred": {}, "in_doubt": True}, None)],
)
def test_cancel_deferred_is_for_what_was_stopped_while_it_waited(
    registry: Registry, more: dict[str, Any], said: str | None
) -> None:
    with SagaDAG("d", schedule=None):
        Bash(task_id="t", bash_command="true", compensate=undo, cancel_deferred=stop)
    record = ActionRecord("d", "r", "t", -1, "d.t", 1, {}, None, "k", "u", **more)

    compensation = _action(registry, "d.t").compensation

    assert compensation is not None
    assert compensation(record) == said


def test_name_of_a_long_dag_and_task_is_cut_and_stays_the_only_one() -> None:
    names = {module.action_name("d" * 150, f"{'t' * 100}{number}") for number in range(2)}

    assert {len(name) for name in names} == {declare.ACTION_NAME_LIMIT}


# -- what Airflow keeps of it -----------------------------------------------------------------------------------------


def _serialised() -> str:
    with SagaDAG("d", schedule=None) as dag:
        Bash(task_id="t", bash_command="echo {{ run_id }}", compensate=undo)
        Bash.partial(task_id="m", compensate=undo, verify=stop).expand(bash_command=["a", "b"])
    return json.dumps(DagSerialization.to_dict(dag), sort_keys=True)


def test_dag_is_serialised_alike_at_every_parse() -> None:
    first = _serialised()

    assert first == _serialised()
    assert " at 0x" not in first
    assert "compensable(BashOperator)" in first


def test_operator_without_the_mark_is_no_step() -> None:
    assert not is_step(BaseOperator(task_id="t"))
