"""The trigger around another one, and operators that a compensation gives back: what Airflow's parts get from them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
    TaskDeferred,
)
from airflow.triggers.base import (
    BaseTrigger,
    TaskFailedEvent,
    TaskSkippedEvent,
    TaskSuccessEvent,
    TriggerEvent,
)

from airflow_saga import ActionRecord, compensable
from airflow_saga.core.errors import ActionTimedOut, CompensationRejected
from airflow_saga.operators import carry_out
from airflow_saga.operators.carry_out import OperatorExecutor
from airflow_saga.operators.deferral import SagaTrigger, ended_by_trigger

RECORD = ActionRecord("d", "run-1", "t", -1, "d.t", 1, {"name": "b"}, {"id": 7}, "key", "undo-key")
heard: list[str] = []


class Counting(BaseTrigger):
    """Fires what it was told to, and tells what was asked of it."""

    def __init__(self, number: int, fires: str = "event", every: timedelta | None = None) -> None:
        super().__init__()
        self.number, self.fires, self.every = number, fires, every

    def serialize(self) -> tuple[str, dict[str, Any]]:
        kwargs = {"number": self.number, "fires": self.fires, "every": self.every}
        return f"{__name__}.Counting", kwargs

    async def run(self) -> AsyncIterator[TriggerEvent]:
        heard.append(f"run {self.trigger_id}")
        events: dict[str, Any] = {
            "event": TriggerEvent({"number": self.number}),
            "success": TaskSuccessEvent(xcoms={"return_value": self.number, "more": 2}),
            "failed": TaskFailedEvent(),
            "skipped": TaskSkippedEvent(),
        }
        yield events[self.fires]

    async def cleanup(self) -> None:
        heard.append("cleanup")

    async def on_kill(self) -> None:
        heard.append("on_kill")


@pytest.fixture(autouse=True)
def _forget() -> None:
    heard.clear()


def _events(trigger: BaseTrigger) -> list[TriggerEvent]:
    async def gather() -> list[TriggerEvent]:
        return [event async for event in trigger.run()]

    return asyncio.run(gather())


def _of(fires: str = "event") -> SagaTrigger:
    classpath, kwargs = SagaTrigger.around(Counting(3, fires, timedelta(seconds=1))).serialize()
    assert classpath == "airflow_saga.operators.deferral.SagaTrigger"
    made = SagaTrigger(**kwargs)
    made.trigger_id = 11
    return made


# -- the trigger ------------------------------------------------------------------------------------------------------


def test_trigger_inside_runs_as_it_is() -> None:
    trigger = _of()

    assert [event.payload for event in _events(trigger)] == [{"number": 3}]
    asyncio.run(trigger.cleanup())
    assert heard == ["run 11", "cleanup"]


def test_c01_kill_is_not_handed_on_since_the_undo_cancels() -> None:
    trigger = _of()
    _events(trigger)

    asyncio.run(trigger.on_kill())

    assert "on_kill" not in heard


@pytest.mark.parametrize(
    ("fires", "error"), [("failed", AirflowException), ("skipped", AirflowSkipException)]
)
def test_event_that_ends_the_task_wakes_it_and_then_ends_it_alike(fires: str, error: type[Exception]) -> None:
    (event,) = _events(_of(fires))
    assert type(event) is TriggerEvent
    ending = ended_by_trigger({"event": event.payload})
    assert ending is not None
    with pytest.raises(error):
        ending.carry_out({})


def test_event_that_ends_the_task_well_wakes_it_with_its_xcoms() -> None:
    (event,) = _events(_of("success"))
    pushed: dict[str, Any] = {}
    context = {"ti": SimpleNamespace(xcom_push=lambda key, value: pushed.update({key: value}))}
    ending = ended_by_trigger({"event": event.payload})
    assert ending is not None

    assert ending.carry_out(context) == 3
    assert pushed == {"more": 2}


@pytest.mark.parametrize("event", [None, "text", {"number": 3}])
def test_any_other_event_is_the_operators_own(event: Any) -> None:
    assert ended_by_trigger({"event": event}) is None
    assert ended_by_trigger(None) is None


def test_triggerer_loads_the_trigger_by_its_classpath_alone() -> None:
    code = (
        "import pkgutil, sys; t = pkgutil.resolve_name('airflow_saga.operators.deferral.SagaTrigger');"
        "print(t('a.b', {}).serialize())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "SagaTrigger" in done.stdout, done.stderr


# -- an operator as compensation --------------------------------------------------------------------------------------


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> OperatorExecutor:
    """As in the task of an undo run, where Airflow knows the run that is undone."""
    forward = SimpleNamespace(
        run_id="run-1",
        conf={"city": "LIS"},
        logical_date=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        data_interval_start=datetime(2026, 1, 1, tzinfo=UTC),
        data_interval_end=datetime(2026, 1, 2, tzinfo=UTC),
    )
    runs = {("d", "run-1"): forward}
    monkeypatch.setattr(
        carry_out, "SupervisorPlatform", lambda: SimpleNamespace(run=lambda *key: runs.get(key))
    )
    return OperatorExecutor({"run_id": "undo__1", "ds": "of the undo", "ti": "the undo's own"})


class Probe(BaseOperator):
    """Gives back its rendered text, or raises what it was given."""

    template_fields = ("text",)

    def __init__(self, *, text: str = "", problem: BaseException | None = None, **kwargs: Any) -> None:
        super().__init__(task_id="probe", **kwargs)
        self.text, self.problem, self.deferrable, self.killed = text, problem, True, False

    def execute(self, context: Any) -> Any:
        if self.problem is not None:
            raise self.problem
        return self.text, self.deferrable, context["ti"]

    def on_kill(self) -> None:
        self.killed = True


def test_plain_answer_is_given_back_as_it_is(executor: OperatorExecutor) -> None:
    assert executor({"status": "undone"}, RECORD) == {"status": "undone"}


def test_operator_sees_the_run_that_is_undone_and_the_record(executor: OperatorExecutor) -> None:
    text = "{{ run_id }} {{ ds }} {{ dag_run.conf.city }} {{ record.result.id }} {{ record.undo_key }}"

    said, deferrable, ti = executor(Probe(text=text), RECORD)

    assert said == "run-1 2026-01-02 LIS 7 undo-key"
    assert (deferrable, ti) == (False, "the undo's own")


def test_operator_that_runs_in_no_other_one_is_executed_too(executor: OperatorExecutor) -> None:
    assert executor(Probe(text="x", allow_nested_operators=False), RECORD)[0] == "x"


@pytest.mark.parametrize(
    "problem",
    [
        TaskDeferred(trigger=Counting(1), method_name="finish"),
        AirflowRescheduleException(datetime(2026, 1, 1, tzinfo=UTC)),
        AirflowFailException("never again"),
    ],
)
def test_operator_that_cannot_end_here_goes_to_a_person(
    executor: OperatorExecutor, problem: BaseException
) -> None:
    with pytest.raises(CompensationRejected):
        executor(Probe(problem=problem), RECORD)


def test_operator_that_starts_a_run_goes_to_a_person(executor: OperatorExecutor) -> None:
    with pytest.raises(CompensationRejected, match="TriggerDagRunOperator"):
        executor(TriggerDagRunOperator(task_id="x", trigger_dag_id="other"), RECORD)


def test_saga_step_as_compensation_is_refused_before_it_runs(executor: OperatorExecutor) -> None:
    step = compensable(Probe)(text="x", compensate=print)

    with pytest.raises(CompensationRejected, match="saga step"):
        executor(step, RECORD)


def test_operator_that_fails_is_one_failed_try(executor: OperatorExecutor) -> None:
    with pytest.raises(AirflowException, match="exit code"):
        executor(BashOperator(task_id="x", bash_command="exit 3"), RECORD)


def test_operator_that_is_abandoned_ends_its_own_work(executor: OperatorExecutor) -> None:
    probe = Probe(problem=ActionTimedOut())

    with pytest.raises(ActionTimedOut):
        executor(probe, RECORD)

    assert probe.killed
