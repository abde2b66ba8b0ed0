"""Whom an undo concerns is told by Airflow's notifiers: once per occasion, in words, and whatever a notifier does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from airflow.sdk.bases.notifier import BaseNotifier

from airflow_saga import reconciler_dag
from airflow_saga.core.identity import undo_run_id
from airflow_saga.metadata import MetadataPlatform
from airflow_saga.operators import notices, reconcile
from airflow_saga.operators.compensation import tell_stuck
from airflow_saga.operators.settlement import SettleOperator
from airflow_saga.settings import Settings
from tests.store.scene import Scene

pytestmark = pytest.mark.timeout(120)
LATE = Settings.load().start_alert_seconds + 60


class FileNotifier(BaseNotifier):
    """Appends its message to a file, as one of a chat would send it."""

    template_fields: Sequence[str] = ("message",)

    def __init__(self, path: Path, message: str) -> None:
        super().__init__()
        self.path = path
        self.message = message

    def notify(self, context: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([self.message, context["saga"]]) + "\n")


class BrokenNotifier(BaseNotifier):
    def notify(self, context: Any) -> None:
        raise ConnectionError("the chat is away")


MESSAGE = "{{ saga.what }}: {{ saga.dag_id }} / {{ saga.run_id }}{% for s in saga.standing %} {{ s.name }}{% endfor %}"


class Post:
    """A notifier, one that fails before it, and what has come out of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notifiers = [BrokenNotifier(), FileNotifier(path, MESSAGE)]

    @property
    def sent(self) -> list[tuple[str, dict[str, Any]]]:
        return (
            [tuple(json.loads(line)) for line in self.path.read_text().splitlines()]
            if self.path.exists()
            else []
        )

    @property
    def whats(self) -> list[str]:
        return [told["what"] for _, told in self.sent]


@pytest.fixture
def post(tmp_path: Path) -> Post:
    return Post(tmp_path / "sent")


@pytest.fixture
def reconciled(scene: Scene, post: Post, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Run the reconciler's task once, as one of its DAG."""
    monkeypatch.setattr(reconcile, "SupervisorPlatform", lambda: MetadataPlatform("cli"))
    dag = reconciler_dag(f"reconciler_{scene.run_id}", notifiers=post.notifiers)

    def run() -> None:
        dag.get_task("reconcile").execute({"dag": dag})

    return run


def left_standing(scene: Scene) -> str:
    """An effect that cannot be undone is all that is left to settle; the undo run that is to do so."""
    params = json.dumps({"card": "tok_4242"})
    scene.act(scene.attach(), 1, name="send_mail", effect="NON_COMPENSABLE", params=params)
    assert scene.steps.stop_if_held(scene.step())
    request = scene.cancel(reason="wrong dates")
    owner = undo_run_id(request.request_uuid)
    scene.freeze(request, owner)
    attached = scene.undo_of("flight", request, owner)
    assert scene.undos.settle_action_if_held(attached, attached.open_actions[0], "NON_COMPENSABLE")
    return owner


def task_context(scene: Scene, owner: str) -> dict[str, Any]:
    planned = {"request": str(scene.request.request_uuid)}
    ti = SimpleNamespace(xcom_pull=lambda **_: planned, xcom_push=lambda **_: None)
    run = SimpleNamespace(dag_id="book_trip__compensation", run_id=owner, conf={})
    return {"ti": ti, "dag_run": run}


def test_an_undo_that_leaves_something_tells_it_once_in_words_and_without_values(
    scene: Scene, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example/team/")
    owner = left_standing(scene)
    settle = SettleOperator(task_id="settle", saga_dag_id=scene.dag_id, notifiers=post.notifiers)
    context = task_context(scene, owner)
    assert len(settle.execute(context)) == 1
    settle.execute(context)
    ((message, told),) = post.sent
    assert message == f"partially cancelled: book_trip / {scene.run_id} send_mail"
    where = f"dags/book_trip/runs/{quote(scene.run_id, safe='')}/plugin/saga-run"
    action = {"name": "send_mail", "state": "NON_COMPENSABLE", "step": "flight"}
    assert told == {
        "dag_id": "book_trip",
        "run_id": scene.run_id,
        "state": "PARTIALLY_CANCELLED",
        "what": "partially cancelled",
        "reason": "1 effects still stand, or may: send_mail of flight (NON_COMPENSABLE)",
        "standing": [action | {"action": scene.action().action_id}],
        "url": f"https://airflow.example/team/{where}",
    }
    assert "saga" not in context
    assert "message" not in context


def test_without_an_address_of_airflow_there_is_no_link(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "")
    scene.attach()
    told = notices.notice(scene.connection, scene.saga.saga_id, "stuck", "why")
    assert told["url"] is None


def test_an_undo_whose_own_task_failed_for_good_is_stuck(scene: Scene, post: Post) -> None:
    scene.stopped("flight", 1)
    context = task_context(scene, undo_run_id(scene.cancel().request_uuid))
    context["task"] = SimpleNamespace(task_id="plan", notifiers=post.notifiers)
    context["exception"] = ValueError("no such DAG")
    tell_stuck(context)
    tell_stuck(context)
    ((_, told),) = post.sent
    assert told["what"] == "stuck"
    assert told["reason"].startswith("plan of book_trip__compensation / undo__")
    assert told["reason"].endswith("failed: no such DAG")


def test_a_cancel_past_its_deadline_is_told_by_the_reconciler_once(
    scene: Scene, post: Post, reconciled: Callable[[], None]
) -> None:
    scene.stopped("flight", 1)
    scene.cancel(actor="ann")
    reconciled()
    assert post.sent == []
    scene.time_passes(7200)
    reconciled()
    reconciled()
    ((message, told),) = post.sent
    assert message == f"deadline passed: book_trip / {scene.run_id} book"
    assert (told["state"], told["standing"][0]["state"]) == ("PARTIALLY_CANCELLED", "DONE")
    assert told["reason"] == "the deadline of the cancel passed before undo 1, asked for by ann, had ended"


def test_what_somebody_else_let_expire_is_told_too(
    scene: Scene, post: Post, reconciled: Callable[[], None]
) -> None:
    scene.stopped("flight", 1)
    scene.cancel()
    scene.time_passes(7200)
    assert scene.settles.expire_if_past_deadline(scene.saga.saga_id) is not None
    reconciled()
    assert post.whats == ["deadline passed"]


def test_an_undo_that_nobody_carries_out_is_told_after_a_while(
    scene: Scene, post: Post, reconciled: Callable[[], None]
) -> None:
    scene.stopped("flight", 1)
    scene.cancel(actor="ann")
    scene.time_passes(LATE - 120)
    reconciled()
    assert post.sent == []
    scene.time_passes(120)
    reconciled()
    reconciled()
    ((_, told),) = post.sent
    assert (told["what"], told["state"]) == ("stuck", "CANCELLING")
    assert told["reason"].endswith("is carried out by nobody: is book_trip__compensation paused?")


def test_an_undo_that_was_told_to_be_stuck_is_not_told_again(
    scene: Scene, post: Post, reconciled: Callable[[], None]
) -> None:
    scene.stopped("flight", 1)
    assert scene.requests.claim_notice(scene.cancel().request_id, "stuck")
    scene.time_passes(LATE)
    reconciled()
    assert post.sent == []


def test_an_undo_that_is_held_since_many_failed_at_once_is_told_with_what_to_do(
    scene: Scene, post: Post, reconciled: Callable[[], None]
) -> None:
    scene.stopped("flight", 1)
    scene.hint(cause="lost_worker")
    scene.sql("UPDATE airflow_saga.undo_request SET state = 'HELD'")
    scene.time_passes(LATE)
    reconciled()
    ((_, told),) = post.sent
    assert told["what"] == "stuck"
    assert told["reason"].endswith(f"airflow saga release book_trip {scene.run_id}")


@pytest.mark.parametrize(
    "busy",
    [
        "UPDATE airflow_saga.undo_request SET owner_lease_until = clock_timestamp()",
        "UPDATE airflow_saga.step SET changed_at = clock_timestamp()",
        "UPDATE airflow_saga.step SET lease_until = clock_timestamp() + interval '9 seconds'",
        "UPDATE airflow_saga.action SET lands_by = clock_timestamp() + interval '1 hour'",
    ],
)
def test_an_undo_that_waits_for_its_turn_or_goes_on_is_no_alarm(
    scene: Scene, post: Post, reconciled: Callable[[], None], busy: str
) -> None:
    scene.stopped("flight", 1)
    scene.cancel()
    scene.time_passes(LATE)
    scene.sql(busy)
    reconciled()
    assert post.sent == []


def waits_for_a_refund(scene: Scene) -> None:
    scene.stopped("flight", 1)
    request = scene.cancel()
    scene.freeze(request)
    attached = scene.undo_of("flight", request)
    later = {"reconcile_seconds": 200_000.0, "waiting_for": "the bank"}
    scene.compensate(attached, attached.open_actions[0], "COMPENSATING", **later)
    assert scene.settle(request) is not None


def test_a_compensation_past_its_deadline_is_told_while_it_waits_and_not_again_when_it_is_given_up(
    scene: Scene, post: Post, reconciled: Callable[[], None]
) -> None:
    waits_for_a_refund(scene)
    reconciled()
    assert post.sent == []
    scene.time_passes(90_000)
    reconciled()
    ((_, told),) = post.sent
    assert (told["what"], told["standing"][0]["state"]) == ("deadline passed", "COMPENSATING")
    scene.time_passes(120_000)
    reconciled()
    scene.freeze(scene.request, "undo__2")
    attached = scene.undo_of("flight", scene.request, "undo__2")
    scene.compensate(attached, attached.open_actions[0], "COMPENSATION_FAILED", failed=True)
    assert scene.settle(scene.request, "undo__2") is not None
    scene.sql("UPDATE airflow_saga.notice SET claimed_at = clock_timestamp()")
    reconciled()
    assert post.whats == ["deadline passed"]


def test_a_compensation_that_was_given_up_at_its_deadline_between_two_passes_is_told(
    scene: Scene, post: Post, reconciled: Callable[[], None]
) -> None:
    waits_for_a_refund(scene)
    scene.time_passes(210_000)
    request = scene.ask(cause="due")
    scene.sql("UPDATE airflow_saga.action SET undo_deadline_at = clock_timestamp() - interval '1 second'")
    scene.freeze(request, "undo__2")
    attached = scene.undo_of("flight", request, "undo__2")
    scene.compensate(attached, attached.open_actions[0], "COMPENSATION_FAILED", failed=True)
    assert scene.settle(request, "undo__2") is not None
    reconciled()
    assert post.whats == ["deadline passed"]


def test_an_outage_does_not_flood(scene: Scene, post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "NOTICES_PER_PASS", 2)
    runs = [scene.another_run(f"{scene.run_id}_{number}") for number in range(5)]
    for run in runs:
        run.stopped("flight", 1)
        run.cancel()
        run.close()
    scene.time_passes(LATE)
    told = [
        notices.tell_untold(scene.connection, post.notifiers, {}, start_alert_seconds=LATE - 60)
        for _ in range(4)
    ]
    assert told == [2, 2, 1, 0]
    assert len({told["run_id"] for _, told in post.sent}) == 5


def test_without_notifiers_nothing_is_claimed(scene: Scene, post: Post) -> None:
    scene.stopped("flight", 1)
    scene.cancel()
    scene.time_passes(LATE)
    assert notices.tell_untold(scene.connection, [], {}, start_alert_seconds=1) == 0
    assert notices.tell_untold(scene.connection, post.notifiers, {}, start_alert_seconds=1) == 1


def test_the_reconciler_of_old_takes_no_notifiers() -> None:
    dag = reconciler_dag("saga_reconciler_plain", every=timedelta(minutes=2), owner_links={})
    assert dag.get_task("reconcile").notifiers == []
