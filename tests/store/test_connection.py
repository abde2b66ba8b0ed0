"""The one connection of a process: opening it, transient refusals, interrupts, outages, notifications."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest

from airflow_saga.core.errors import StoreUnavailableError, UnknownSagaError
from airflow_saga.core.records import Outcome
from airflow_saga.store import signals
from airflow_saga.store.attach import AttachVerbs
from airflow_saga.store.connect import TRANSIENT_TRIES, Address, behind_pooler
from airflow_saga.store.reader import Reader
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.runs import RunVerbs
from airflow_saga.store.steps import Checkpoint, StepVerbs
from airflow_saga.store.sweep import SweepVerbs
from airflow_saga.store.undo import EndedTry
from tests.conftest import TEMPLATE
from tests.store.scene import Scene, connect
from tests.support.postgres import PostgresServer

# -- opening --------------------------------------------------------------------------------------------------------


def test_a_connection_is_opened_again_from_an_open_one(store_url: str) -> None:
    with connect(store_url) as hook:
        address, database = Address.of(hook), hook.info.dbname
    assert "postgres" not in repr(address), "an address may hold a password"
    with address.open() as connection:
        assert (connection.info.dbname, connection.autocommit) == (database, True)
        assert connection.prepare_threshold == 1
        assert not behind_pooler(connection)
        name = connection.execute("SELECT current_setting('application_name')").fetchone()
        assert name == ("airflow_saga",)


def test_a_store_that_does_not_answer_is_said_to_be_away(own_server: PostgresServer) -> None:
    address = Address(own_server.url)
    own_server.stop()
    started = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="the saga store does not answer"):
        address.open()
    with pytest.raises(StoreUnavailableError):
        address.open_within(0.5)
    assert time.monotonic() - started < 10
    back = threading.Timer(0.3, own_server.start)
    back.start()
    with address.open_within(60) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    back.join()


def test_the_hot_statements_survive_a_verb_that_was_rolled_back(each_scene: Scene) -> None:
    """psycopg throws every prepared statement of the session away after a rollback, also those it did not prepare."""
    step = each_scene.act(each_scene.attach(), 1)
    with pytest.raises(UnknownSagaError):
        each_scene.requests.release("unknown", "unknown", actor="ann")
    assert each_scene.begin(step, 2)
    with pytest.raises(UnknownSagaError):
        each_scene.requests.release("unknown", "unknown", actor="ann")
    assert each_scene.end(step, 2)
    assert each_scene.steps.stop_if_held(step)
    each_scene.freeze(each_scene.cancel())
    attached = each_scene.undo_of()
    for row in attached.open_actions:
        with pytest.raises(UnknownSagaError):
            each_scene.requests.release("unknown", "unknown", actor="ann")
        each_scene.compensate(attached, row)


# -- C75: no transaction is left open -------------------------------------------------------------------------------


def test_c75_between_two_verbs_the_session_is_in_no_transaction(own_scene: Scene) -> None:
    own_scene.sql("SET idle_in_transaction_session_timeout = '100ms'")
    pid = own_scene.connection.info.backend_pid
    with connect(own_scene.url) as watcher:

        def session() -> str:
            row = watcher.execute("SELECT state FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchone()
            assert row is not None, "the server ended the session"
            return str(row[0])

        step = own_scene.attach()
        assert own_scene.begin(step, 1)
        assert session() == "idle", "this is where the call goes out"
        own_scene.write(
            step, ended=[Outcome(1, "DONE")], begin=[own_scene.intent(step, seq) for seq in (2, 3)]
        )
        assert session() == "idle"
        own_scene.cancel(stop_now=True)
        own_scene.freeze()
        own_scene.time_passes(12)
        attached = own_scene.undo_of()
        assert (
            own_scene.undos.write_undo(attached, None, own_scene.next_try(attached.open_actions[0]))[1] == 1
        )
        assert session() == "idle", "this is where the compensation goes out"


# -- C78: somebody else's turn --------------------------------------------------------------------------------------

VERBS: dict[str, Callable[[Scene], object]] = {
    "attach": lambda scene: scene.attach("hotel"),
    "begin": lambda scene: scene.begin(scene.step(), 2),
    "succeed": lambda scene: scene.end(scene.step(), 1),
    "both": lambda scene: (
        scene.write(scene.step(), ended=[Outcome(1, "DONE")], begin=[scene.intent(scene.step(), 2)]).begun
    ),
    "several": lambda scene: (
        scene.write(
            scene.step(),
            ended=[Outcome(1, "DONE")],
            begin=[scene.intent(scene.step(), seq) for seq in (2, 3)],
        ).begun
    ),
    "finish": lambda scene: scene.end(scene.step(), 1) and scene.finish(scene.step()),
    "cancel": lambda scene: scene.cancel(),
    "mark": lambda scene: scene.runs.mark_step_if_running(*scene.run, "flight", -1),
    "fail": lambda scene: scene.hint(),
    "late": lambda scene: scene.lates.record_late(scene.step(), Outcome(1, "DONE"), idempotent=False),
    "freeze": lambda scene: scene.freeze(scene.cancel(stop_now=True)),
}


@contextmanager
def refused_at_first(scene: Scene, code: str, times: int) -> Iterator[None]:
    """Postgres rolls the first writes back for somebody else's sake. A sequence counts them: it is not rolled back."""
    scene.sql("CREATE SEQUENCE writes")
    scene.sql(
        "CREATE FUNCTION refuse_at_first() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF nextval('writes') <= {times} THEN RAISE EXCEPTION 'try again' USING ERRCODE = '{code}'; END IF; "
        "RETURN NEW; END $$"
    )
    for table in ("saga", "step", "action"):
        scene.sql(
            f"CREATE TRIGGER a_refuse BEFORE INSERT OR UPDATE ON airflow_saga.{table} "
            "FOR EACH ROW EXECUTE FUNCTION refuse_at_first()"
        )
    yield
    for table in ("saga", "step", "action"):
        scene.sql(f"DROP TRIGGER a_refuse ON airflow_saga.{table}")


@pytest.mark.parametrize("code", ["40001", "40P01", "55P03"])
@pytest.mark.parametrize("verb", VERBS)
def test_c78_a_verb_rolled_back_for_anothers_sake_is_run_again(
    own_scene: Scene, verb: str, code: str
) -> None:
    step = own_scene.attach()
    assert own_scene.begin(step, 1)
    with refused_at_first(own_scene, code, 3):
        assert VERBS[verb](own_scene)
    assert own_scene.action(1).tries == 1
    assert len(own_scene.view.requests) <= 1
    assert own_scene.sql("SELECT last_value FROM writes")[0]["last_value"] > 3


def test_c78_a_refusal_that_does_not_end_is_told_after_a_bounded_time(own_scene: Scene) -> None:
    step = own_scene.attach()
    assert own_scene.begin(step, 1)
    started = time.monotonic()
    with refused_at_first(own_scene, "40001", 10_000), pytest.raises(psycopg.errors.SerializationFailure):
        own_scene.end(step, 1)
    assert time.monotonic() - started < 10
    assert own_scene.sql("SELECT last_value FROM writes")[0]["last_value"] == TRANSIENT_TRIES
    assert own_scene.end(step, 1)


def test_c78_ten_parallel_steps_that_fail_together_leave_one_undo(own_scene: Scene) -> None:
    def fail(number: int) -> int:
        with Address(own_scene.url).open() as connection:
            steps, runs = StepVerbs(connection), RunVerbs(connection)
            task = f"branch_{number}"
            step = AttachVerbs(connection).attach_if_allowed(own_scene.attempt(task)).step
            assert step is not None
            begun = len(steps.write_forward(step, [], [own_scene.intent(step)]).begun)
            assert steps.write_forward(step, [Outcome(1, "FAILED")], []).ended == {1}
            assert steps.stop_if_held(step)
            barrier.wait(30)
            runs.fail_and_hint(*own_scene.run, cause="failure")
            return begun

    barrier = threading.Barrier(10)
    own_scene.attach("first")
    with refused_at_first(own_scene, "40P01", 3), ThreadPoolExecutor(10) as pool:
        assert list(pool.map(fail, range(10))) == [1] * 10
    assert len(own_scene.view.requests) == 1
    assert {row.state for row in own_scene.view.actions} == {"FAILED"}


# -- C64: an interrupt in the middle of a verb ----------------------------------------------------------------------


class Interrupted(BaseException):
    """As KeyboardInterrupt, which pytest keeps for itself."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raises in this thread after that long, wherever it is then; not once the block is left."""

    def strike(*_: object) -> None:
        if armed:
            armed.clear()
            raise Interrupted

    armed = [True]
    before = signal.signal(signal.SIGUSR1, strike)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        armed.clear()
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def one_interrupted_trial(scene: Scene, number: int, rng: random.Random) -> bool:
    """True if the interrupt struck. The connection it struck is thrown away."""
    kind = rng.choice(["write", "together", "attach", "cancel"])
    run = (scene.dag_id, f"run_{number}")
    connection = Address(scene.url).open()
    steps = StepVerbs(connection)
    trial = Scene.__new__(Scene)
    trial.dag_id, trial.run_id = run
    attached = AttachVerbs(connection).attach_if_allowed(trial.attempt())
    assert attached.step is not None
    step = attached.step
    steps.write_forward(step, [], [scene.intent(step, 1)])
    struck = False
    try:
        with interrupted_after(rng.uniform(0, 0.012)):
            if kind == "write":
                steps.write_forward(step, [Outcome(1, "DONE")], [scene.intent(step, 2)])
            elif kind == "together":
                steps.write_forward(step, [Outcome(1, "DONE")], [scene.intent(step, seq) for seq in (2, 3)])
            elif kind == "attach":
                AttachVerbs(connection).attach_if_allowed(trial.attempt(try_number=2))
            else:
                RequestVerbs(connection).cancel(*run, actor="ann")
    except Interrupted:
        struck = True
    connection.close()
    with Address(scene.url).open() as fresh:
        decision = RequestVerbs(fresh).cancel(*run, actor="bob")
        assert decision.request is not None, "the cancel path uses a fresh connection and succeeds"
        view = Reader(fresh).view(*run)
    states = {row.seq: row.state for row in view.actions}
    events = [event["what"] for event in view.events]
    whole, none = {
        "write": ({1: "DONE", 2: "PENDING"}, {1: "PENDING"}),
        "together": ({1: "DONE", 2: "PENDING", 3: "PENDING"}, {1: "PENDING"}),
        "attach": ({1: "IN_DOUBT"}, {1: "PENDING"}),
        "cancel": ({1: "PENDING"}, {1: "PENDING"}),
    }[kind]
    assert states in (whole, none), (kind, states)
    if kind == "attach":
        assert (states == whole) == (view.steps[0].fence == 2) == ("step resume" in events)
    assert len(view.requests) == 1
    assert view.saga.state == "CANCELLING"
    if not struck:
        assert states == whole
    return struck


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_c64_an_interrupt_leaves_a_whole_verb_or_nothing_and_a_fresh_connection_works(
    own_scene: Scene,
) -> None:
    assert threading.current_thread() is threading.main_thread(), "signals arrive in the main thread only"
    own_scene.sql(
        "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.002); RETURN NEW; END $$"
    )
    own_scene.sql(
        "CREATE TRIGGER z_dawdle BEFORE INSERT OR UPDATE ON airflow_saga.action "
        "FOR EACH ROW EXECUTE FUNCTION dawdle()"
    )
    rng = random.Random(64)
    struck = sum(one_interrupted_trial(own_scene, number, rng) for number in range(200))
    assert struck >= 50, "most trials have to be interrupted for this to prove anything"
    stuck = own_scene.sql(
        "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() "
        "AND state LIKE 'idle in transaction%%' "
    )
    assert stuck[0]["n"] == 0


# -- C76: the server restarts inside a pass --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_c76_every_stale_step_is_picked_up_once_however_often_the_server_restarts(
    own_server: PostgresServer,
) -> None:
    url = own_server.create_database("c76", template=TEMPLATE)
    scene = Scene(url)
    for number in range(250):
        with_call = scene.another_run(f"run_{number}") if number % 50 == 0 else None
        if with_call is not None:
            assert with_call.begin(with_call.attach(), 1)
            with_call.close()
        else:
            scene.run_id = f"run_{number}"
            scene.attach()
    scene.time_passes(60)
    scene.close()
    handled = 0
    restart_at = list(range(20, 220, 20))
    restarts: list[threading.Thread] = []
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        with Address(url).open_within(60) as connection:
            try:
                lost = Reader(connection).lost_leases()
                if not lost:
                    break
                for row in lost:
                    if restart_at and handled >= restart_at[0]:
                        restart_at.pop(0)
                        restarts.append(threading.Thread(target=own_server.restart, args=("immediate",)))
                        restarts[-1].start()
                    handled += SweepVerbs(connection).stop_if_lost(row["saga_id"], row["step_id"])
            except psycopg.OperationalError:
                for thread in restarts:
                    thread.join(60)
    assert len(restarts) == 10
    after = Scene(url)
    events = after.sql(
        "SELECT step_id, count(*) AS n FROM airflow_saga.event WHERE what LIKE 'step lost%%' GROUP BY step_id"
    )
    assert len(events) == 250
    assert {row["n"] for row in events} == {1}, "each once"
    states = after.sql(
        "SELECT DISTINCT state FROM airflow_saga.step UNION SELECT state FROM airflow_saga.action"
    )
    assert {row["state"] for row in states} == {"STOPPED", "IN_DOUBT"}
    after.close()


# -- notifications --------------------------------------------------------------------------------------------------

LONG = {"dag_id": "d" * 236, "run_id": "manual__" + "🛫" * 242}


def heard(connection: psycopg.Connection, seconds: float) -> list[str]:
    return [notice.payload for notice in connection.notifies(timeout=seconds, stop_after=1)]


def test_c71_long_names_and_large_params_are_committed_and_the_wake_up_arrives(each_store_url: str) -> None:
    scene = Scene(each_store_url, run_id=LONG["run_id"], dag_id=LONG["dag_id"])
    step = scene.attach("t" * 237, map_index=123_456)
    params = '{"text": "' + "🏨" * 262_144 + '"}'
    assert len(params.encode()) > 1_000_000
    with Address(scene.url).open() as listener:
        assert signals.are_delivered(listener)
        signals.listen(listener, scene.saga.saga_id)
        assert scene.begin(step, 1, params=params, name="n" * 200)
        assert scene.end(step, 1, result=params)
        assert heard(listener, 0.05) == []
        scene.cancel(reason="🚫" * 4000)
        (payload,) = heard(listener, 10)
    assert payload == "cancel"
    (row,) = scene.view.actions
    assert (row.params, row.result) == (params, params)
    assert scene.saga.reason == "🚫" * 4000
    scene.freeze(scene.cancel(stop_now=True))
    scene.close()


@pytest.mark.parametrize(
    "decide",
    [
        lambda scene: scene.cancel(),
        lambda scene: scene.requests.cancel(*scene.run, actor="ann", keep=True),
        lambda scene: scene.ask(cause="marked_failed"),
        lambda scene: scene.runs.mark_step_if_running(*scene.run, "flight", -1),
    ],
)
def test_every_decision_that_concerns_a_running_step_wakes_it(scene: Scene, decide) -> None:  # type: ignore[no-untyped-def]
    scene.attach()
    with Address(scene.url).open() as listener:
        signals.listen(listener, scene.saga.saga_id)
        decide(scene)
        (payload,) = heard(listener, 10)
    assert len(payload) < 32


def test_what_waits_for_an_undo_is_woken_when_it_freezes_and_when_it_settles(scene: Scene) -> None:
    step = scene.act(scene.attach(), 1)
    scene.cancel()
    with Address(scene.url).open() as listener:
        signals.listen(listener, scene.saga.saga_id)
        scene.steps.stop_if_held(step)
        assert heard(listener, 10) == ["step"], "plan waits for this"
        scene.freeze()
        assert heard(listener, 10) == ["frozen"]
        scene.undo_step()
        scene.settle()
        assert heard(listener, 10) == ["settled"]


def test_c72_the_action_path_notifies_nobody(each_store_url: str) -> None:
    scene = Scene(each_store_url)
    scene.attach("first")
    saga_id = scene.saga.saga_id

    def write(number: int) -> None:
        with Address(each_store_url).open() as connection:
            steps = StepVerbs(connection)
            step = AttachVerbs(connection).attach_if_allowed(scene.attempt(f"step_{number}")).step
            assert step is not None
            for seq in range(1, 26):
                ended = [Outcome(seq - 1, "DONE")] if seq > 1 else []
                assert steps.write_forward(step, ended, [scene.intent(step, seq)]).begun == {seq}
                steps.heartbeat_if_held(step, 15, Checkpoint(str(seq), 1))
            steps.write_forward(step, [Outcome(25, "DONE")], [])
            assert steps.finish_if_held(step, None, False)

    with Address(each_store_url).open() as listener:
        listener.execute(f"LISTEN airflow_saga_{saga_id}".encode())
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(8)))
        assert heard(listener, 0.1) == []
        scene.cancel()
        assert heard(listener, 10) == ["cancel"], "the listener did listen"
    assert len(scene.view.actions) == 200
    scene.close()


def test_an_undo_writes_its_compensations_without_a_notice(scene: Scene) -> None:
    scene.stopped("flight", 1, 2)
    scene.freeze(scene.cancel())
    with Address(scene.url).open() as listener:
        signals.listen(listener, scene.saga.saga_id)
        attached = scene.undo_of()
        for row in attached.open_actions:
            assert scene.undos.write_undo(attached, None, scene.next_try(row))[1] == 1
            assert scene.undos.write_undo(attached, EndedTry(row.action_id, "COMPENSATED"), None)[0]
        assert heard(listener, 0.1) == []
