"""What each verb does, refuses and answers; its exit code and its data."""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable

import pytest

from tests.airflow.conftest import Command
from tests.store.scene import Scene

AirflowRun = Callable[..., None]


def data_of(command: Command, *arguments: object) -> dict[str, object]:
    said = command(*arguments, "--output", "json")
    assert said.code == 0, said.err
    data: dict[str, object] = json.loads(said.out)
    return data


# -- cancel -----------------------------------------------------------------------------------------------------------


def test_cancel_answers_with_data(scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command) -> None:
    airflow_run(*scene.run)
    scene.stopped("flight", 1)
    data = data_of(airflow_saga_cli, "cancel", *scene.run)
    assert data["verdict"] == "cancelling"
    assert data["saga"]["state"] == "CANCELLING"  # type: ignore[index]
    assert data["saga"]["actor"] == f"cli:{getpass.getuser()}"  # type: ignore[index]
    assert data["request"]["uuid"] == str(scene.request.request_uuid)  # type: ignore[index]
    assert data["undo_run"]["triggered"] is True  # type: ignore[index]


def test_cancel_keeps_the_clear_number_of_the_airflow_run(
    scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command
) -> None:
    airflow_run(*scene.run, clear_number=3)
    scene.stopped("flight", 1)
    assert airflow_saga_cli("cancel", *scene.run).code == 0
    assert scene.saga.stop_clear_number == 3


def test_cancel_asked_twice_is_done_twice_with_one_request(
    scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command
) -> None:
    airflow_run(*scene.run)
    scene.stopped("flight", 1)
    airflow_saga_cli("cancel", *scene.run)
    again = airflow_saga_cli("cancel", *scene.run)
    assert again.code == 0
    assert "is being undone already, asked for by cli:" in again.out
    assert len(scene.view.requests) == 1


def test_cancel_of_a_run_that_has_finished_is_refused_and_offers_undo(
    scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command
) -> None:
    airflow_run(*scene.run, state="success")
    scene.ran("flight", 1)
    said = airflow_saga_cli("cancel", *scene.run)
    assert (said.code, said.out) == (1, "")
    assert "airflow saga undo" in said.err
    assert scene.view.requests == ()


def test_cancel_keep_stops_without_a_request(
    scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command
) -> None:
    airflow_run(*scene.run)
    scene.attach("flight")
    data = data_of(airflow_saga_cli, "cancel", *scene.run, "--keep")
    assert data["verdict"] == "keeping"
    assert (scene.saga.state, scene.saga.mode, scene.view.requests) == ("CANCELLING", "keep", ())
    assert airflow_saga_cli("cancel", *scene.run, "--keep").code == 0
    assert data_of(airflow_saga_cli, "undo", *scene.run)["verdict"] == "cancelling"
    late = airflow_saga_cli("cancel", *scene.run, "--keep")
    assert (late.code, late.out) == (1, "")


def test_cancel_now_abandons_the_call_under_way(
    scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command
) -> None:
    airflow_run(*scene.run)
    scene.begin(scene.attach("flight"))
    assert airflow_saga_cli("cancel", *scene.run, "--now").code == 0
    assert scene.saga.stop_now
    assert scene.request.stop_now


def test_keep_and_now_exclude_each_other(scene: Scene, airflow_saga_cli: Command) -> None:
    scene.attach("flight")
    said = airflow_saga_cli("cancel", *scene.run, "--keep", "--now")
    assert said.code == 2
    assert "exclude each other" in said.err
    assert scene.saga.state == "RUNNING"


def test_a_run_that_nobody_knows_is_refused_and_gets_no_row(scene: Scene, airflow_saga_cli: Command) -> None:
    for verb in ("cancel", "undo"):
        said = airflow_saga_cli(verb, "book_trip", "no_such_run")
        assert (said.code, said.out) == (1, "")
        assert "neither Airflow nor the saga store knows" in said.err
    assert scene.reader.find("book_trip", "no_such_run") is None


def test_a_run_of_a_dag_without_sagas_is_refused_and_gets_no_row(
    scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command
) -> None:
    airflow_run("no_saga", scene.run_id)
    said = airflow_saga_cli("cancel", "no_saga", scene.run_id)
    assert said.code == 1
    assert "Airflow knows no DAG no_saga__compensation" in said.err
    assert scene.reader.find("no_saga", scene.run_id) is None


def test_a_compensation_dag_is_not_a_saga(scene: Scene, airflow_saga_cli: Command) -> None:
    said = airflow_saga_cli("cancel", "book_trip__compensation", "undo__1")
    assert said.code == 1
    assert "name book_trip and the run that is undone" in said.err


def test_a_run_whose_first_step_has_not_begun_is_cancelled_with_nothing_to_undo(
    scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command
) -> None:
    airflow_run(*scene.run, state="queued")
    data = data_of(airflow_saga_cli, "cancel", *scene.run)
    assert (data["verdict"], data["undo_run"]) == ("nothing", None)
    assert scene.saga.state == "CANCELLED"


def test_a_saga_that_airflow_has_forgotten_is_undone_by_what_the_store_knows(
    scene: Scene, airflow_saga_cli: Command
) -> None:
    scene.ran("flight", 1, clear_number=2)
    assert airflow_saga_cli("undo", *scene.run).code == 0
    assert scene.saga.stop_clear_number == 2


def test_without_a_compensation_dag_the_request_is_kept_for_the_reconciler(
    store_url: str, airflow_saga_cli: Command
) -> None:
    orphan = Scene(store_url, dag_id="dag_of_last_year")
    orphan.ran("flight", 1)
    data = data_of(airflow_saga_cli, "undo", *orphan.run)
    assert data["undo_run"]["triggered"] is False  # type: ignore[index]
    assert "the reconciler" in data["undo_run"]["message"]  # type: ignore[index]
    assert (orphan.request.state, orphan.request.triggered_at) == ("REQUESTED", None)
    orphan.close()


def test_an_undo_run_of_a_paused_dag_is_said_to_wait_for_it(
    scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command, paused_compensation: None
) -> None:
    airflow_run(*scene.run)
    scene.stopped("flight", 1)
    said = airflow_saga_cli("cancel", *scene.run)
    assert said.code == 0
    assert "airflow dags unpause book_trip__compensation" in said.out


@pytest.fixture
def paused_compensation(airflow_home: object) -> object:
    from airflow.models.dag import DagModel
    from airflow.utils.session import create_session

    def pause(is_paused: bool) -> None:
        with create_session(scoped=False) as session:
            session.get(DagModel, "book_trip__compensation").is_paused = is_paused

    pause(True)
    yield
    pause(False)


# -- undo, plan -------------------------------------------------------------------------------------------------------


def test_undo_by_the_hash_that_plan_showed(
    scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command
) -> None:
    airflow_run(*scene.run, state="success")
    scene.ran("flight", 1)
    scene.ran("hotel", 1, 2, after=["flight"])
    shown = data_of(airflow_saga_cli, "plan", *scene.run)
    order = [(row["step"], row["name"], row["expected"]) for row in shown["actions"]]  # type: ignore[attr-defined]
    assert order == [("hotel", "book", "undo"), ("hotel", "book", "undo"), ("flight", "book", "undo")]
    assert shown["command"] == f"airflow saga undo {scene.dag_id} {scene.run_id} --plan {shown['hash']}"
    said = airflow_saga_cli("undo", *scene.run, "--plan", str(shown["hash"])[:12])
    assert said.code == 0, said.err
    assert scene.saga.state == "CANCELLING"


def test_undo_by_a_plan_that_no_longer_holds_is_refused(scene: Scene, airflow_saga_cli: Command) -> None:
    step = scene.act(scene.attach("flight"), 1)
    digest = str(data_of(airflow_saga_cli, "plan", *scene.run)["hash"])
    scene.finish(scene.act(step, 2))
    said = airflow_saga_cli("undo", *scene.run, "--plan", digest)
    assert (said.code, said.out) == (1, "")
    assert "something moved since" in said.err
    assert scene.view.requests == ()


def test_plan_of_a_saga_without_effects_calls_nothing(scene: Scene, airflow_saga_cli: Command) -> None:
    scene.attach("flight")
    said = airflow_saga_cli("plan", *scene.run)
    assert (said.code, said.out.strip()) == (0, "nothing stands: an undo would call nothing")


# -- resolve, release -------------------------------------------------------------------------------------------------


@pytest.fixture
def in_doubt(scene: Scene) -> int:
    """An action in doubt of a step that stopped."""
    step = scene.attach("flight")
    scene.begin(step)
    scene.end(step, 1, "IN_DOUBT", own=True, error="no answer")
    assert scene.steps.stop_if_held(step)
    return scene.action().action_id


def test_a_person_says_that_an_action_in_doubt_happened(
    scene: Scene, in_doubt: int, airflow_saga_cli: Command
) -> None:
    said = airflow_saga_cli("resolve", *scene.run, in_doubt, "--happened", '{"id": "F1"}', "--note", "saw it")
    assert said.code == 0, said.err
    action = scene.action()
    assert (action.state, json.loads(str(action.result))) == ("DONE", {"id": "F1"})
    assert action.note == f"cli:{getpass.getuser()}: saw it"


def test_happened_needs_no_result(scene: Scene, in_doubt: int, airflow_saga_cli: Command) -> None:
    assert airflow_saga_cli("resolve", *scene.run, in_doubt, "--note", "saw it", "--happened").code == 0
    assert (scene.action().state, scene.action().result) == ("DONE", None)


def test_a_person_says_that_an_action_in_doubt_did_not_happen(
    scene: Scene, in_doubt: int, airflow_saga_cli: Command
) -> None:
    assert airflow_saga_cli("resolve", *scene.run, in_doubt, "--did-not-happen", "--note", "asked").code == 0
    assert scene.action().state == "FAILED"


def test_an_answer_before_an_undo_is_refused_for_an_action_that_stands(
    scene: Scene, airflow_saga_cli: Command
) -> None:
    scene.stopped("flight", 1)
    said = airflow_saga_cli("resolve", *scene.run, scene.action().action_id, "--undone", "--note", "by hand")
    assert (said.code, said.out) == (1, "")
    assert "undo the saga first" in said.err


@pytest.mark.parametrize(
    ("answers", "complaint"),
    [
        ((), "exactly one of"),
        (("--undone", "--accepted"), "exactly one of"),
        (("--happened", "not JSON"), "as JSON"),
    ],
)
def test_a_wrong_answer_is_wrong_usage(
    scene: Scene, in_doubt: int, airflow_saga_cli: Command, answers: tuple[str, ...], complaint: str
) -> None:
    said = airflow_saga_cli("resolve", *scene.run, in_doubt, *answers, "--note", "why")
    assert said.code == 2
    assert complaint in said.err
    assert scene.action().state == "IN_DOUBT"


def test_resolve_without_a_note_is_wrong_usage(
    scene: Scene, in_doubt: int, airflow_saga_cli: Command
) -> None:
    assert airflow_saga_cli("resolve", *scene.run, in_doubt, "--accepted").code == 2
    assert airflow_saga_cli("resolve", *scene.run, in_doubt, "--accepted", "--note", " ").code == 2
    assert scene.action().state == "IN_DOUBT"


def test_what_a_person_types_is_kept_without_known_secrets(
    scene: Scene, in_doubt: int, airflow_saga_cli: Command
) -> None:
    from airflow.sdk.log import mask_secret

    mask_secret("hunter2-is-secret")
    said = airflow_saga_cli(
        "resolve",
        *scene.run,
        in_doubt,
        "--happened",
        '{"id": "F1", "via": "hunter2-is-secret"}',
        "--note",
        "with hunter2-is-secret",
    )
    assert said.code == 0, said.err
    assert "hunter2" not in f"{scene.tables()}{said}"
    assert json.loads(str(scene.action().result)) == {"id": "F1", "via": "***"}


def test_a_held_undo_is_released(scene: Scene, airflow_saga_cli: Command) -> None:
    assert airflow_saga_cli("release", *scene.run).code == 1  # no such saga
    scene.stopped("flight", 1)
    scene.hint(cause="lost_worker")
    assert scene.sweeps.hold_if_mass_outage(causes=["lost_worker"], threshold=0, window_seconds=60) == 1
    assert airflow_saga_cli("release", *scene.run).code == 0
    assert scene.request.state == "HINTED"
    assert airflow_saga_cli("release", *scene.run).code == 1


# -- list, reconcile, prune -------------------------------------------------------------------------------------------


def test_list_shows_what_needs_a_person_first(scene: Scene, airflow_saga_cli: Command) -> None:
    scene.stopped("flight", 1)
    scene.ask()
    scene.freeze()
    undo = scene.undo_of()
    scene.compensate(undo, undo.open_actions[0], "COMPENSATION_FAILED", failed=True, error="502")
    scene.settle()
    younger = scene.another_run("younger")
    younger.ran("flight", 1)
    rows = json.loads(airflow_saga_cli("list", "--output", "json").out)
    assert [row["run_id"] for row in rows] == [scene.run_id, "younger"]
    assert rows[0]["needs"] == "1 effect to settle, or to undo again"
    assert rows[0]["standing"] == 1
    assert (rows[1]["needs"], rows[1]["standing"]) == (None, 0)
    only = json.loads(airflow_saga_cli("list", "--state", "RUNNING", "--output", "json").out)
    assert [row["run_id"] for row in only] == ["younger"]
    assert json.loads(airflow_saga_cli("list", "-d", "another", "--output", "json").out) == []
    younger.close()


def test_list_prints_names_as_they_are(store_url: str, airflow_saga_cli: Command) -> None:
    odd = Scene(store_url, run_id="[red]run[/red]")
    odd.attach("flight")
    assert "[red]run[/red]" in airflow_saga_cli("list").out
    odd.close()


def test_reconcile_tells_the_log_how_a_run_ended_and_starts_its_undo(
    scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command
) -> None:
    airflow_run(*scene.run, state="failed")
    scene.stopped("flight", 1)
    data = data_of(airflow_saga_cli, "reconcile")
    assert data["moved"]["failed"] == 1  # type: ignore[index]
    assert data["moved"]["triggered"] == 1  # type: ignore[index]
    assert scene.saga.state == "FAILED"
    assert scene.request.triggered_at is not None


def test_reconcile_clears_an_undo_run_that_ended_without_carrying_out_its_request(
    scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command
) -> None:
    from airflow_saga.metadata import run_of

    airflow_run(*scene.run)
    scene.stopped("flight", 1)
    airflow_saga_cli("undo", *scene.run)
    undo_run = ("book_trip__compensation", f"undo__{scene.request.request_uuid}")
    _set_state(*undo_run, "failed")
    scene.time_passes(60)
    assert data_of(airflow_saga_cli, "reconcile")["moved"]["triggered"] == 1  # type: ignore[index]
    seen = run_of(*undo_run)
    assert seen is not None
    assert (seen.state, seen.clear_number) == ("queued", 1)


def _set_state(dag_id: str, run_id: str, state: str) -> None:
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session(scoped=False) as session:
        run = session.scalar(select(DagRun).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id))
        assert run is not None
        run.state = state
        for instance in run.get_task_instances(session=session):
            instance.state = state


def test_prune_deletes_the_actions_of_old_settled_sagas_when_told_to(
    scene: Scene, airflow_saga_cli: Command
) -> None:
    scene.ran("flight", 1, 2)
    scene.runs.complete_if_over(*scene.run)
    young = airflow_saga_cli("prune", "--yes")
    nothing = "nothing to delete: no settled saga has been at rest for more than 90 days"
    assert (young.code, young.out) == (0, f"{nothing}\n")
    scene.time_passes(100 * 86_400)
    unasked = airflow_saga_cli("prune")
    assert unasked.code == 1
    assert "2 actions of 1 settled saga older than 90 days would go" in unasked.err
    assert len(scene.view.actions) == 2
    assert data_of(airflow_saga_cli, "prune", "--yes")["deleted_actions"] == 2
    assert (scene.view.actions, scene.saga.state) == ((), "COMPLETED")


def test_prune_keeps_for_as_long_as_it_is_told(scene: Scene, airflow_saga_cli: Command) -> None:
    scene.ran("flight", 1)
    scene.runs.complete_if_over(*scene.run)
    scene.time_passes(10 * 86_400)
    assert data_of(airflow_saga_cli, "prune", "--yes")["deleted_actions"] == 0
    assert data_of(airflow_saga_cli, "prune", "--yes", "--retention-days", 9)["deleted_actions"] == 1
    assert airflow_saga_cli("prune", "--yes", "--retention-days", -1).code == 2


def test_c21_an_undo_that_airflow_does_not_start_is_said_to_wait(
    scene: Scene, airflow_saga_cli: Command
) -> None:
    scene.stopped("flight", 1)
    scene.cancel(reason="wrong date")
    calm = airflow_saga_cli("show", *scene.run)
    assert "nobody does it" not in calm.out
    scene.time_passes(301)
    (row,) = data_of(airflow_saga_cli, "list", "--dag-id", scene.dag_id)
    assert "not carried out" in row["needs"]
    shown = airflow_saga_cli("show", *scene.run)
    assert "and nobody does it: is book_trip__compensation paused?" in shown.out
    assert "airflow dags unpause book_trip__compensation" in shown.out


# -- a part of it, and one action -------------------------------------------------------------------------------------


def test_undo_from_does_what_the_plan_showed(
    scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command
) -> None:
    airflow_run(*scene.run, state="success")
    scene.ran("flight", 1, 2, 3)
    second = scene.action(2).action_id
    shown = airflow_saga_cli("plan", *scene.run, "--from", second)
    assert f"--from {second} --plan " in shown.out
    digest = shown.out.rsplit("--plan ", 1)[1].split()[0]
    data = data_of(airflow_saga_cli, "undo", *scene.run, "--from", second, "--plan", digest[:12])
    assert (data["verdict"], scene.saga.state) == ("cancelling", "CANCELLING")
    assert [row["from_seq"] for row in scene.sql("SELECT from_seq FROM airflow_saga.undo_scope")] == [2]
    assert airflow_saga_cli("undo", *scene.run, "--from", second, "--now").code == 2


def test_retry_names_what_it_tries_again(
    partly: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command
) -> None:
    airflow_run(*partly.run, state="failed")
    said = airflow_saga_cli("retry", *partly.run, partly.action(1, "pay").action_id)
    assert (said.code, "the undo of charge_card is tried again" in said.out) == (0, True)
    shown = airflow_saga_cli("show", *partly.run).out
    assert "asked for by alice" in shown.splitlines()[0], (
        "who wanted the undo, not who had one action tried again"
    )


def test_probe_says_which_run_asks(scene: Scene, airflow_run: AirflowRun, airflow_saga_cli: Command) -> None:
    airflow_run(*scene.run)
    step = scene.attach()
    assert "nothing is in doubt" in airflow_saga_cli("probe", *scene.run).err
    scene.begin(step)
    scene.end(step, state="IN_DOUBT")
    said = airflow_saga_cli("probe", *scene.run)
    assert "asking the verify probes about book; nothing else is called" in said.out
    assert "book_trip__compensation / probe__" in said.out
