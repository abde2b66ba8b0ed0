"""``saga.sql``: a statement and its receipt are one transaction, and so are its undo and the receipt of that."""

from __future__ import annotations

import sqlite3
import threading
import time
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from airflow_saga.capsules import databases
from airflow_saga.core.actions import NON_COMPENSABLE, READ_ONLY
from airflow_saga.core.errors import (
    ActionDeclarationError,
    CompensationRejected,
    NotApplied,
    SagaError,
    StepInterrupted,
    Unavailable,
)
from airflow_saga.core.policies import Retry
from airflow_saga.core.records import Applied
from airflow_saga.core.secret import Secret, set_secret_resolver
from airflow_saga.runtime import statements
from airflow_saga.runtime.saga import Saga
from tests.capsules.conftest import SetConnection, Shop, record_of
from tests.runtime.lab import Lab, Running
from tests.support.ports import free_port

ADD = "INSERT INTO things (name, price) VALUES (%(name)s, %(price)s) RETURNING id"
REMOVE = "DELETE FROM things WHERE id = %(id)s"
PARAMS = {"name": "chair", "price": 5}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in (statements.sql, statements.sql_for_good, statements.sql_read):
        monkeypatch.setattr(made, "timeout", timedelta(seconds=3))
        monkeypatch.setattr(made, "retry", Retry(first=timedelta(seconds=0.01), tries=3))
        monkeypatch.setattr(made, "undo_retry", Retry(first=timedelta(seconds=0.01), tries=3))


def run(shop: Shop, statement: str, params: Any, key: str) -> Any:
    return databases.run(shop.conn_id, statement, params, key=key, timeout_seconds=3.0)


def look_up(shop: Shop, key: str) -> Any:
    return databases.look_up(record_of("saga.sql", {"conn_id": shop.conn_id}, key), timeout_seconds=3.0)


def undo(shop: Shop, key: str, **more: Any) -> None:
    params = {"conn_id": shop.conn_id, "statement": ADD, "params": PARAMS, "compensate": REMOVE}
    databases.undo(record_of("saga.sql", params, key, **more), timeout_seconds=3.0)


def test_a_statement_is_run_once_and_undone_once(lab: Lab, shop: Shop) -> None:
    def body(saga: Saga) -> Any:
        return saga.sql(shop.conn_id, ADD, PARAMS, compensate=REMOVE)

    assert lab.step(body).output == [{"id": 1}]
    assert [(name, str(price)) for _, name, price in shop.things()] == [("chair", "5.00")]
    assert lab.undo().saga.state == "CANCELLED"
    assert shop.things() == []
    assert lab.states() == [("saga.sql", "COMPENSATED")]
    assert shop.receipts() == 2


def test_the_same_key_gives_the_recorded_result_and_runs_nothing(shop: Shop) -> None:
    assert run(shop, ADD, PARAMS, "k") == [{"id": 1}]
    assert run(shop, ADD, PARAMS, "k") == [{"id": 1}]
    assert len(shop.things()) == 1


def test_the_undo_of_many_rows_runs_for_each_of_them_newest_first(lab: Lab, shop: Shop) -> None:
    shop.ask("CREATE TABLE gone (place serial, id int)")
    many = "INSERT INTO things (name) VALUES ('a'), ('b'), ('c') RETURNING id"
    note = "INSERT INTO gone (id) VALUES (%(id)s)"
    lab.step(lambda saga: saga.sql(shop.conn_id, many, compensate=note))
    lab.undo()
    assert shop.ask("SELECT id FROM gone ORDER BY place") == [(3,), (2,), (1,)]


def test_a_statement_without_rows_returns_how_many_it_changed(lab: Lab, shop: Shop) -> None:
    shop.ask("INSERT INTO things (name, price) VALUES ('a', 1), ('b', 1)")

    def body(saga: Saga) -> Any:
        up = "UPDATE things SET price = price + %(by)s"
        return saga.sql(shop.conn_id, up, {"by": 2}, compensate="UPDATE things SET price = price - %(by)s")

    assert lab.step(body).output == 2
    assert [int(price) for _, _, price in shop.things()] == [3, 3]
    lab.undo()
    assert [int(price) for _, _, price in shop.things()] == [1, 1]


def test_a_statement_that_fails_is_rolled_back_with_its_receipt(lab: Lab, shop: Shop) -> None:
    shop.ask("INSERT INTO things (name) VALUES ('chair')")

    def body(saga: Saga) -> None:
        saga.sql(shop.conn_id, ADD, PARAMS, compensate=REMOVE)

    problem = lab.fails(body, NotApplied)
    assert "UniqueViolation" in str(problem)
    assert lab.states() == [("saga.sql", "FAILED")]
    assert shop.receipts() == 0


@pytest.mark.parametrize(
    "statement",
    ["INSERT INTO things (name) VALUES ('a'); COMMIT", "COMMIT; INSERT INTO things (nonsense) VALUES (1)"],
)
def test_a_statement_that_commits_by_itself_is_no_proof_of_anything(shop: Shop, statement: str) -> None:
    with pytest.raises(SagaError, match="ended the transaction") as raised:
        run(shop, statement, None, "k")
    assert not isinstance(raised.value, NotApplied)
    assert isinstance(look_up(shop, "k"), Applied)


def test_an_undo_that_commits_by_itself_is_for_a_person(shop: Shop) -> None:
    run(shop, "INSERT INTO things (name) VALUES ('a')", None, "k")
    params = {"conn_id": shop.conn_id, "params": None, "compensate": "COMMIT; DELETE FROM things"}
    with pytest.raises(CompensationRejected, match="ended the transaction"):
        databases.undo(record_of("saga.sql", params, "k"), timeout_seconds=3.0)


def test_a_percent_sign_means_itself_where_there_are_no_parameters(shop: Shop) -> None:
    run(shop, "INSERT INTO things (name) VALUES ('100%')", None, "k")
    assert shop.things()[0][1] == "100%"


def test_without_the_table_of_receipts_nothing_runs_and_the_command_is_named(
    lab: Lab, bare_shop: Shop
) -> None:
    problem = lab.fails(lambda saga: saga.sql(bare_shop.conn_id, ADD, PARAMS, compensate=REMOVE), NotApplied)
    assert "airflow saga db migrate --receipts --conn-id shop" in str(problem)
    assert bare_shop.things() == []


def test_the_table_of_receipts_is_made_once(bare_shop: Shop) -> None:
    assert databases.make_table(bare_shop.conn_id) is True
    assert databases.make_table(bare_shop.conn_id) is False
    assert bare_shop.receipts() == 0


def test_the_table_of_receipts_is_made_from_many_places_at_once(bare_shop: Shop) -> None:
    makers = [Running(lambda: databases.make_table(bare_shop.conn_id)) for _ in range(6)]
    made = [maker.result() for maker in makers]
    assert True in made
    assert bare_shop.receipts() == 0


def test_a_read_keeps_nothing_and_takes_no_receipt(lab: Lab, shop: Shop) -> None:
    def body(saga: Saga) -> Any:
        saga.sql(shop.conn_id, "INSERT INTO things (name) VALUES ('sneaked in')", compensate=READ_ONLY)
        return saga.sql(shop.conn_id, "SELECT %(n)s::int AS n", {"n": 4}, compensate=READ_ONLY)

    assert lab.step(body).output == [{"n": 4}]
    assert shop.things() == []
    assert shop.receipts() == 0
    assert lab.undo().saga.state == "CANCELLED"


def test_what_cannot_be_undone_is_named(lab: Lab, shop: Shop) -> None:
    lab.step(lambda saga: saga.sql(shop.conn_id, ADD, PARAMS, compensate=NON_COMPENSABLE))
    assert lab.undo().saga.state == "PARTIALLY_CANCELLED"
    assert lab.states() == [("saga.sql_for_good", "NON_COMPENSABLE")]
    assert len(shop.things()) == 1


@pytest.mark.parametrize("compensate", ["", "  ", None, 3])
def test_a_statement_that_says_nothing_of_its_undo_is_refused(lab: Lab, shop: Shop, compensate: Any) -> None:
    lab.fails(lambda saga: saga.sql(shop.conn_id, ADD, PARAMS, compensate=compensate), ActionDeclarationError)
    assert (shop.things(), lab.actions()) == ([], [])


def test_a_secret_is_revealed_for_the_statement_and_logged_by_name(lab: Lab, shop: Shop) -> None:
    lab.known_secrets = ["hidden-value"]
    set_secret_resolver(lambda conn_id, field: "hidden-value")
    try:
        params = {"name": Secret("vault"), "price": 1}
        lab.step(lambda saga: saga.sql(shop.conn_id, ADD, params, compensate=REMOVE))
    finally:
        set_secret_resolver(None)
    assert shop.things()[0][1] == "hidden-value"
    assert "hidden-value" not in lab.actions()[0].params


# -- who was first ----------------------------------------------------------------------------------------------------


def test_a_probe_waits_for_an_attempt_in_the_middle_of_it(shop: Shop) -> None:
    with databases.opened(shop.conn_id, 3.0) as slow:
        slow.find("k")
        slow._ask("take", "k")
        slow.execute("INSERT INTO things (name) VALUES ('late')")
        asked = Running(lambda: look_up(shop, "k"))
        time.sleep(0.3)
        assert not asked.over
        slow._ask("keep_result", "7", "k")
        slow.connection.commit()
        assert asked.result() == Applied(7)


def test_a_probe_learns_that_the_attempt_it_waited_for_was_rolled_back(shop: Shop) -> None:
    with databases.opened(shop.conn_id, 3.0) as slow:
        slow._ask("take", "k")
        asked = Running(lambda: look_up(shop, "k"))
        time.sleep(0.3)
        assert not asked.over
        slow.connection.rollback()
        assert isinstance(asked.result(), NotApplied)
    assert shop.receipts() == 0, "a probe leaves nothing"


def test_two_attempts_at_once_make_one_effect(shop: Shop) -> None:
    together = threading.Barrier(5)

    def attempt() -> Any:
        together.wait(10)
        return run(shop, ADD, PARAMS, "k")

    answers = [Running(attempt) for _ in range(5)]
    assert [answer.result() for answer in answers] == [[{"id": 1}]] * 5
    assert len(shop.things()) == 1


def test_an_attempt_that_stands_still_in_its_transaction_is_ended_by_the_server(shop: Shop) -> None:
    with databases.opened(shop.conn_id, 0.5) as zombie:
        zombie._ask("take", "k")
        zombie.execute("INSERT INTO things (name) VALUES ('zombie')")
        assert isinstance(Running(lambda: look_up(shop, "k")).result(10), NotApplied)
        with pytest.raises(psycopg.Error, match="idle-in-transaction"):
            zombie.connection.commit()
    assert shop.things() == []


def test_an_attempt_that_was_held_up_before_its_transaction_is_rolled_back(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = databases.connect

    def held_up(conn_id: str) -> Any:
        time.sleep(0.4)
        return connect(conn_id)

    monkeypatch.setattr(databases, "connect", held_up)
    with pytest.raises(NotApplied, match=r"longer than 0\.3 s"):
        databases.run(shop.conn_id, ADD, PARAMS, key="k", timeout_seconds=0.3)
    assert (shop.things(), shop.receipts()) == ([], 0)


def test_a_stricter_limit_of_the_database_stays(shop: Shop) -> None:
    name = shop.url.rpartition("/")[2]
    shop.ask(f"ALTER DATABASE {name} SET statement_timeout = '50ms'")
    with pytest.raises(NotApplied, match="statement timeout"):
        run(shop, "SELECT pg_sleep(1)", None, "k")


# -- the undo ---------------------------------------------------------------------------------------------------------


def test_an_undo_is_done_once_whatever_key_it_comes_under(shop: Shop) -> None:
    run(shop, ADD, PARAMS, "other")
    run(shop, "INSERT INTO things (name) VALUES ('x') RETURNING id", None, "n")
    undo(shop, "n")
    shop.ask("INSERT INTO things (id, name) VALUES (2, 'of somebody else, by the same id')")
    undo(shop, "n")
    undo(shop, "n", undo_key="another")
    assert [name for _, name, _ in shop.things()] == ["chair", "of somebody else, by the same id"]
    assert isinstance(look_up(shop, "n"), NotApplied)


def test_undos_at_once_under_different_keys_undo_once(shop: Shop) -> None:
    shop.ask("INSERT INTO things (name, price) VALUES ('a', 10)")
    run(shop, "UPDATE things SET price = price + 1", None, "k")
    params = {
        "conn_id": shop.conn_id,
        "params": None,
        "compensate": "UPDATE things SET price = price - 1",
    }
    together = threading.Barrier(4)

    def attempt(number: int) -> None:
        together.wait(10)
        record = record_of("saga.sql", params, "k", undo_key=f"u{number}")
        databases.undo(record, timeout_seconds=3.0)

    for running in [Running(lambda number=number: attempt(number)) for number in range(4)]:
        running.result()
    assert int(shop.things()[0][2]) == 10


def test_an_undo_in_a_database_that_never_heard_of_it_is_rejected(shop: Shop) -> None:
    with pytest.raises(CompensationRejected, match="no receipt of"):
        undo(shop, "k")
    assert shop.receipts() == 0


def test_an_undo_in_doubt_uses_up_the_key_so_that_a_lost_attempt_finds_it_gone(shop: Shop) -> None:
    undo(shop, "k", in_doubt=True)
    with pytest.raises(NotApplied, match="has been undone"):
        run(shop, ADD, PARAMS, "k")
    assert shop.things() == []


def test_what_was_undone_is_not_run_again_under_its_key(shop: Shop) -> None:
    run(shop, ADD, PARAMS, "k")
    undo(shop, "k")
    with pytest.raises(NotApplied, match="has been undone"):
        run(shop, ADD, PARAMS, "k")
    assert shop.things() == []


def test_an_undo_that_fails_is_rolled_back_with_its_receipt(lab: Lab, shop: Shop) -> None:
    lab.step(lambda saga: saga.sql(shop.conn_id, ADD, PARAMS, compensate="DELETE FROM no_such_table"))
    assert lab.undo().saga.state == "PARTIALLY_CANCELLED"
    assert lab.states() == [("saga.sql", "COMPENSATION_FAILED")]
    assert len(shop.things()) == 1
    assert shop.receipts() == 1


# -- a database that is away ------------------------------------------------------------------------------------------


def test_a_database_that_is_away_has_run_nothing(lab: Lab, set_connection: SetConnection) -> None:
    away = set_connection("away", "postgres", host="127.0.0.1", port=free_port(), login="u", password="pw-9x")
    problem = lab.fails(lambda saga: saga.sql(away, ADD, PARAMS, compensate=REMOVE), NotApplied)
    assert "nothing was run" in str(problem)
    assert "pw-9x" not in str(problem)
    assert lab.states() == [("saga.sql", "FAILED")]
    record = record_of("saga.sql", {"conn_id": away, "params": None, "compensate": REMOVE}, "k")
    with pytest.raises(Unavailable, match="away"):
        databases.undo(record, timeout_seconds=3.0)


def test_a_connection_that_is_unknown_or_takes_no_sql_is_named(set_connection: SetConnection) -> None:
    with pytest.raises(NotApplied, match="no connection 'nowhere'"):
        databases.run("nowhere", ADD, None, key="k", timeout_seconds=3.0)
    web = set_connection("web", "http", host="localhost")
    with pytest.raises(NotApplied, match="takes SQL"):
        databases.run(web, ADD, None, key="k", timeout_seconds=3.0)


def test_a_slow_statement_is_abandoned_found_undone_and_not_in_doubt(lab: Lab, shop: Shop) -> None:
    statements.sql.timeout = timedelta(seconds=1)
    statements.sql.retry = Retry(tries=1)

    def body(saga: Saga) -> None:
        slow = "INSERT INTO things (name) SELECT 'slow' FROM pg_sleep(6)"
        saga.sql(shop.conn_id, slow, compensate="DELETE FROM things")

    lab.fails(body, (NotApplied, StepInterrupted))
    assert lab.states() == [("saga.sql", "FAILED")]
    assert shop.things() == []


# -- another driver ---------------------------------------------------------------------------------------------------


def test_a_driver_with_question_marks_does_the_same() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute(databases.Q.make_table.decode())
    connection.execute("CREATE TABLE things (id integer PRIMARY KEY, name text)")
    database = databases.Database(connection, "?", "lite", 3.0)
    add = "INSERT INTO things (name) VALUES (:name) RETURNING id"
    assert database.do_once("k", lambda it: it.execute(add, {"name": "a"})) == [{"id": 1}]
    assert database.do_once("k", lambda it: it.execute(add, {"name": "a"})) == [{"id": 1}]
    assert database.look_up("k") == Applied([{"id": 1}])
    record = record_of("saga.sql", {}, "k")
    for _ in range(2):
        database.undo_once(
            record, lambda it, rows: it.execute("DELETE FROM things WHERE id = :id", rows[0]) and None
        )
    assert isinstance(database.look_up("k"), NotApplied)
    assert connection.execute("SELECT count(*) FROM things").fetchone() == (0,)
