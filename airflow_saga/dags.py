"""``SagaDAG``: a DAG together with the DAG that undoes its runs; ``compensation_dag`` does the same for a plain DAG.

The compensation DAG is generated while the file is loaded: the mirror image of the forward graph, one ``undo.<task>``
per step, between ``plan`` and ``settle``. It is never paused at creation, and has no limit on runs that matters: one
may wait for a person for days.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from airflow.sdk import DAG
from airflow.sdk.definitions.param import Param

from airflow_saga.core.errors import ActionDeclarationError
from airflow_saga.core.identity import UNDO_TASK_PREFIX, check_dag_id, check_task_id, compensation_dag_id
from airflow_saga.graph import SagaPolicy, is_mapped, next_steps_of, set_policy, steps_of
from airflow_saga.operators.answers import ApplyOperator, ReviewOperator
from airflow_saga.operators.compensable import declare_operators
from airflow_saga.operators.compensation import (
    APPLY_TASK,
    GONE_TASK,
    PLAN_TASK,
    PlanOperator,
)
from airflow_saga.operators.reconcile import ReconcileOperator
from airflow_saga.operators.review import OPTIONS, REVIEW_TASK, SETTLE_TASK
from airflow_saga.operators.settlement import SettleOperator
from airflow_saga.operators.undo import GoneOperator, IndexesOperator, UndoOperator

SAGA_TAG = "saga"
COMPENSATION_TAG = "saga-compensation"
UNLIMITED_RUNS = 10_000
_START = datetime(2020, 1, 1, tzinfo=UTC)
_AIRFLOW_RETRIES = 5
"""Of each task of an undo. Tries of a compensation are counted in the log; these are for lost processes."""
_PATIENT = {
    "retries": _AIRFLOW_RETRIES,
    "retry_delay": timedelta(seconds=2),
    "retry_exponential_backoff": True,
    "max_retry_delay": timedelta(minutes=2),
    "trigger_rule": "all_done",
}


class SagaDAG(DAG):
    """A DAG whose runs are sagas, and ``<dag_id>__compensation``, which undoes them.

    Takes everything a DAG takes, and:

    :param on_failure: ``"compensate"`` undoes a run that failed; ``"keep"`` leaves its effects to a person.
    :param on_compensation_failure: ``"continue"`` undoes the others after a compensation failed for good; ``"halt"``
        stops there.
    :param notifiers: Airflow notifiers, called once per undo that leaves something standing, and once per undo that is
        stuck since its own tasks failed. Their templates may say ``{{ saga.dag_id }}``: see the README.
    :raises NameTooLongError: at parse, if the compensation DAG or one of its tasks could not be named.
    """

    def __init__(
        self,
        dag_id: str,
        *args: Any,
        on_failure: Literal["compensate", "keep"] = "compensate",
        on_compensation_failure: Literal["continue", "halt"] = "continue",
        notifiers: Sequence[Any] = (),
        **kwargs: Any,
    ) -> None:
        check_dag_id(dag_id)
        policy = SagaPolicy(on_failure, on_compensation_failure)
        kwargs["tags"] = {*(kwargs.get("tags") or ()), SAGA_TAG}
        super().__init__(dag_id, *args, **kwargs)
        set_policy(dag_id, policy)
        self.saga_notifiers = list(notifiers)

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        super().__exit__(error_type, error, trace)
        if error_type is None:
            _generate(self, self.saga_notifiers)


def compensation_dag(
    dag: DAG,
    *,
    on_failure: Literal["compensate", "keep"] = "compensate",
    on_compensation_failure: Literal["continue", "halt"] = "continue",
    notifiers: Sequence[Any] = (),
) -> DAG:
    """The DAG that undoes the runs of a plain DAG; call it after the DAG's last task is made.

    Parameters as of :class:`SagaDAG`. The result need not be kept in a variable.
    """
    check_dag_id(dag.dag_id)
    set_policy(dag.dag_id, SagaPolicy(on_failure, on_compensation_failure))
    dag.tags.add(SAGA_TAG)
    return _generate(dag, list(notifiers))


def reconciler_dag(
    dag_id: str = "saga_reconciler",
    *,
    every: timedelta = timedelta(minutes=1),
    notifiers: Sequence[Any] = (),
    **kwargs: Any,
) -> DAG:
    """The DAG that catches what every hook missed; one per Airflow deployment.

    :param every: how often; what no hook reported is found within this.
    :param notifiers: Airflow notifiers, called once per undo for what none of its own tasks can tell, of all DAGs: a
        cancel or a compensation whose deadline passed, and an undo that nobody carries out for ``[saga]
        start_alert_seconds``, or that is held. Their context has ``saga``, as that of a :class:`SagaDAG`'s.
    """
    with DAG(
        dag_id,
        schedule=every,
        start_date=_START,
        catchup=False,
        max_active_runs=1,
        is_paused_upon_creation=False,
        dagrun_timeout=max(every * 10, timedelta(minutes=10)),
        tags={"saga-reconciler"},
        doc_md="Looks at every open saga and moves on what no hook did. See the README of airflow-saga.",
        **kwargs,
    ) as dag:
        ReconcileOperator(task_id="reconcile", notifiers=notifiers)
    return dag


def _adopt_agents(dag: DAG) -> None:
    """Only where the file uses them: the provider is not a dependency, and loading it takes seconds."""
    if "airflow.providers.common.ai.operators" in sys.modules:
        from airflow_saga.operators.agent import adopt_agents

        adopt_agents(dag.tasks)


def _generate(dag: DAG, notifiers: list[Any]) -> DAG:
    _adopt_agents(dag)
    steps = {task.task_id: task for task in steps_of(dag)}
    for task_id in steps:
        check_task_id(task_id)
    if not steps:
        raise ActionDeclarationError(
            f"{dag.dag_id} has no saga step, so nothing to undo: use SagaOperator or @task.saga, or a plain DAG"
        )
    declare_operators(dag.dag_id, steps.values())
    with DAG(
        compensation_dag_id(dag.dag_id),
        schedule=None,
        start_date=_START,
        catchup=False,
        max_active_runs=UNLIMITED_RUNS,
        is_paused_upon_creation=False,
        default_args={"owner": dag.default_args.get("owner", "airflow")},
        tags={COMPENSATION_TAG},
        params={
            "run_id": Param(None, type=["null", "string"], description=f"the run of {dag.dag_id} to undo")
        },
        doc_md=f"Undoes runs of `{dag.dag_id}`, newest action first. Generated; trigger it with "
        '`{"run_id": "…"}` to undo a run by hand.',
    ) as undo_dag:
        _wire(dag, steps, notifiers)
    return undo_dag


def _wire(dag: DAG, steps: dict[str, Any], notifiers: list[Any]) -> None:
    """plan → what the file has no more → undo tasks, edges reversed → settle → review → apply."""
    plan = PlanOperator(
        task_id=PLAN_TASK,
        saga_dag_id=dag.dag_id,
        notifiers=notifiers,
        retries=_AIRFLOW_RETRIES,
        retry_delay=timedelta(seconds=2),
    )
    mapped = {task_id: is_mapped(task) for task_id, task in steps.items()}
    gone = GoneOperator(task_id=GONE_TASK, steps=mapped, **_PATIENT)
    plan >> gone
    heads: dict[str, Any] = {}
    tails: dict[str, Any] = {}
    for task_id in steps:
        heads[task_id], tails[task_id] = _undo_tasks(task_id, mapped)
    settle = SettleOperator(task_id=SETTLE_TASK, saga_dag_id=dag.dag_id, notifiers=notifiers, **_PATIENT)
    review = ReviewOperator.partial(
        task_id=REVIEW_TASK,
        saga_dag_id=dag.dag_id,
        options=list(OPTIONS),
        params={
            "note": Param(None, type=["null", "string"], description="what you did, or why it may stand")
        },
        trigger_rule="all_success",
        retries=_AIRFLOW_RETRIES,  # Airflow can lose an answer within seconds of a question: then it is asked anew
        retry_delay=timedelta(seconds=2),
    ).expand_kwargs(settle.output)
    apply = ApplyOperator(task_id=APPLY_TASK, saga_dag_id=dag.dag_id, **_PATIENT)
    following = {task_id: next_steps_of(task) for task_id, task in steps.items()}
    followed = {after for afters in following.values() for after in afters}
    for task_id, afters in following.items():
        for after in afters:
            tails[after] >> heads[task_id]
        if not afters:
            gone >> heads[task_id]
        if task_id not in followed:
            tails[task_id] >> settle
    settle >> review >> apply
    settle >> apply


def _undo_tasks(task_id: str, mapped: dict[str, bool]) -> tuple[Any, Any]:
    """The first and the last task that undo a step: one, or two where the step has many instances."""
    undo_id = f"{UNDO_TASK_PREFIX}{task_id}"
    if not mapped[task_id]:
        undo = UndoOperator(task_id=undo_id, step_task_id=task_id, steps=mapped, **_PATIENT)
        return undo, undo
    indexes = IndexesOperator(task_id=f"{undo_id}.indexes", step_task_id=task_id, **_PATIENT)
    undo = UndoOperator.partial(task_id=undo_id, step_task_id=task_id, steps=mapped, **_PATIENT).expand(
        indexes=indexes.output
    )
    return indexes, undo
