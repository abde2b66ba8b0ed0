"""What the database itself refuses, whoever writes to it, and what the SQL may not contain."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import fields
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import ClientCursor

from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import (
    RESIDUAL_ACTION_STATES,
    STATES,
    ActionState,
    Effect,
    Machine,
    legal_moves,
)
from airflow_saga.store.connect import Address
from airflow_saga.store.queries import Queries
from tests.conftest import TEMPLATE
from tests.store.scene import Scene, connect
from tests.support.postgres import PostgresServer

TABLES: dict[Machine, str] = {"saga": "saga", "step": "step", "action": "action", "request": "undo_request"}
MORE = {
    "saga": {"CANCELLING": ", mode = 'undo'", "*": ", mode = NULL"},
    "step": {"*": ", lease_until = clock_timestamp()"},
    "action": {"*": ", lands_by = clock_timestamp()"},
    "request": {"*": ", plan = '{}'"},
}
"""What else has to be set beside a state, so that only the move itself can be refused."""


@pytest.fixture
def plain(each_scene: Scene) -> Iterator[psycopg.Connection]:
    """A saga with one row of each kind, and a connection as `psql` has one."""
    each_scene.stopped("flight", 1)
    each_scene.cancel()
    with connect(each_scene.url) as connection:
        connection.autocommit = False
        yield connection


def set_state(connection: psycopg.Connection, machine: Machine, state: str) -> None:
    more = MORE[machine].get(state, MORE[machine]["*"])
    statement = f"UPDATE airflow_saga.{TABLES[machine]} SET state = %s{more}"
    connection.execute(statement.encode(), (state,))


@pytest.mark.parametrize("machine", list(TABLES))
def test_an_illegal_move_is_refused_also_from_psql(plain: psycopg.Connection, machine: Machine) -> None:
    legal = legal_moves(machine)
    if machine == "saga":
        plain.execute("DELETE FROM airflow_saga.action")  # CANCELLED is refused for another reason, below
        plain.commit()
    for source, target in product(STATES[machine], repeat=2):
        plain.execute(
            "SET LOCAL session_replication_role = replica"
        )  # no trigger for the state we start from
        set_state(plain, machine, source)
        plain.execute("SET LOCAL session_replication_role = origin")
        if source == target or (source, target) in legal:
            set_state(plain, machine, target)
        else:
            with pytest.raises(psycopg.errors.CheckViolation, match="may not move") as refused:
                set_state(plain, machine, target)
            assert refused.value.diag.constraint_name == "moves_only_by_its_table"
        plain.rollback()


INSERTS: dict[Machine, tuple[str, dict[str, Any]]] = {
    "saga": (
        "INSERT INTO airflow_saga.saga (dag_id, run_id, state, mode) VALUES ('d', 'r2', %(state)s, %(mode)s)",
        {},
    ),
    "step": (
        "INSERT INTO airflow_saga.step (saga_id, task_id, map_index, state, lease_until, try_number, max_tries, "
        "retries, clear_number) SELECT saga_id, 'new', -1, %(state)s, clock_timestamp(), 1, 0, 0, 0 "
        "FROM airflow_saga.saga",
        {},
    ),
    "action": (
        "INSERT INTO airflow_saga.action (saga_id, step_id, generation, seq, name, version, effect, fingerprint, "
        "key, state, params, lands_by) SELECT saga_id, step_id, 1, 99, 'n', 1, 'COMPENSABLE', 'f', 'k', %(state)s, "
        "'{}', clock_timestamp() FROM airflow_saga.step",
        {},
    ),
    "request": (
        "INSERT INTO airflow_saga.undo_request (saga_id, number, whole_run, state, cause, actor, clear_number, plan) "
        "SELECT saga_id, 99, true, %(state)s, 'user', 'ann', 0, '{}' FROM airflow_saga.saga",
        {},
    ),
}


@pytest.mark.parametrize("machine", list(TABLES))
def test_a_row_begins_only_in_a_state_that_its_table_lists(
    plain: psycopg.Connection, machine: Machine
) -> None:
    plain.execute("DELETE FROM airflow_saga.undo_request")  # one open request per saga is another rule
    plain.commit()
    statement, _ = INSERTS[machine]
    for state in STATES[machine]:
        params = {"state": state, "mode": "undo" if state == "CANCELLING" else None}
        if (None, state) in legal_moves(machine):
            plain.execute(statement.encode(), params)
        else:
            with pytest.raises(psycopg.errors.CheckViolation, match="may not move"):
                plain.execute(statement.encode(), params)
        plain.rollback()
    with pytest.raises(psycopg.errors.CheckViolation):
        plain.execute(statement.encode(), {"state": "MAGIC", "mode": None})


def sum_up(connection: psycopg.Connection) -> None:
    """Let the trigger look at rows that were written past it: settled and residual follow from every write."""
    connection.execute("UPDATE airflow_saga.action SET note = note")


@pytest.mark.parametrize("state", sorted(RESIDUAL_ACTION_STATES))
def test_p6_cancelled_with_a_residual_is_refused(plain: psycopg.Connection, state: str) -> None:
    plain.execute("SET LOCAL session_replication_role = replica")
    set_state(plain, "action", state)
    plain.execute("SET LOCAL session_replication_role = origin")
    sum_up(plain)
    with pytest.raises(psycopg.errors.CheckViolation, match="effects that stand, or may stand") as refused:
        set_state(plain, "saga", "CANCELLED")
    assert refused.value.diag.constraint_name == "cancelled_means_nothing_stands"


@pytest.mark.parametrize("state", sorted(set(ActionState) - RESIDUAL_ACTION_STATES))
def test_p6_cancelled_is_accepted_where_nothing_stands(plain: psycopg.Connection, state: str) -> None:
    plain.execute("SET LOCAL session_replication_role = replica")
    set_state(plain, "action", state)
    plain.execute("SET LOCAL session_replication_role = origin")
    sum_up(plain)
    set_state(plain, "saga", "CANCELLED")


@pytest.mark.parametrize("state", list(ActionState))
@pytest.mark.parametrize("effect", list(Effect))
def test_settled_and_residual_follow_from_the_row(scene: Scene, effect: str, state: str) -> None:
    scene.stopped("flight", 1)
    columns = ("probed", "reconcile_at", "undo_finished_at")
    for given in product((False, True), repeat=3):
        marks = dict(zip(columns, given, strict=True))
        with connect(scene.url) as connection, connection.transaction():
            connection.execute("SET LOCAL session_replication_role = replica")
            connection.execute(
                "UPDATE airflow_saga.action SET effect = %(effect)s, state = %(state)s, probed = %(probed)s, "
                "reconcile_at = CASE WHEN %(reconcile_at)s THEN clock_timestamp() END, "
                "undo_finished_at = CASE WHEN %(undo_finished_at)s THEN clock_timestamp() END",
                {"effect": effect, "state": state, **marks},
            )
            connection.execute("SET LOCAL session_replication_role = origin")
            sum_up(connection)
        row = scene.action()
        settled = (
            effect == "READ_ONLY"
            or state in ("FAILED", "COMPENSATED", "NON_COMPENSABLE", "ACCEPTED")
            or (state == "COMPENSATION_FAILED" and marks["undo_finished_at"])
            or (state == "IN_DOUBT" and marks["probed"])
            or (state == "COMPENSATING" and marks["reconcile_at"])
        )
        assert (row.settled, row.residual) == (
            settled,
            effect != "READ_ONLY" and state in RESIDUAL_ACTION_STATES,
        )


@pytest.mark.parametrize(
    ("statement", "constraint"),
    [
        ("UPDATE airflow_saga.saga SET mode = NULL", "mode_iff_cancelling"),
        ("UPDATE airflow_saga.saga SET mode = 'maybe'", "mode_known"),
        ("UPDATE airflow_saga.saga SET on_failure = 'hope'", "on_failure_known"),
        ("UPDATE airflow_saga.saga SET on_compensation_failure = 'cry'", "on_compensation_failure_known"),
        ("INSERT INTO airflow_saga.saga SELECT * FROM airflow_saga.saga", None),
        (
            "INSERT INTO airflow_saga.saga (dag_id, run_id, state) SELECT dag_id, run_id, 'PENDING' "
            "FROM airflow_saga.saga",
            "one_saga_per_run",
        ),
        (
            INSERTS["step"][0].replace("'new'", "'flight'").replace("%(state)s", "'RUNNING'"),
            "one_step_per_task_instance",
        ),
        ("UPDATE airflow_saga.step SET fence = 0", "fence_grows_from_one"),
        ("UPDATE airflow_saga.step SET generation = 0", "generation_grows_from_one"),
        ("UPDATE airflow_saga.step SET state = 'RUNNING'", "running_step_has_lease"),
        (INSERTS["action"][0].replace("99", "1").replace("%(state)s", "'PENDING'"), "one_action_per_seq"),
        ("UPDATE airflow_saga.undo_request SET state = 'FROZEN'", "frozen_has_a_plan"),
        (INSERTS["request"][0].replace("99", "1").replace("%(state)s", "'QUEUED'"), "request_numbers_count"),
        (INSERTS["request"][0].replace("%(state)s", "'REQUESTED'"), "one_open_request_per_saga"),
        (INSERTS["request"][0].replace("%(state)s", "'HINTED'"), "one_open_request_per_saga"),
    ],
)
def test_a_row_that_cannot_be_true_is_refused(
    plain: psycopg.Connection, statement: str, constraint: str | None
) -> None:
    with pytest.raises(psycopg.errors.Error) as refused:
        plain.execute(statement.encode())
    assert refused.value.diag.constraint_name == constraint or constraint is None


def test_p10_at_most_one_request_waits_behind_the_open_one(plain: psycopg.Connection) -> None:
    queue = INSERTS["request"][0].replace("%(state)s", "'QUEUED'")
    plain.execute(queue.encode())
    with pytest.raises(psycopg.errors.UniqueViolation) as refused:
        plain.execute(queue.replace("99", "100").encode())
    assert refused.value.diag.constraint_name == "one_queued_request_per_saga"


@pytest.mark.parametrize("state", sorted(set(ActionState) - {"DONE", "FAILED"}))
def test_a_read_only_action_is_done_or_failed_and_nothing_else(plain: psycopg.Connection, state: str) -> None:
    statement = INSERTS["action"][0].replace("'COMPENSABLE'", "'READ_ONLY'")
    with pytest.raises(psycopg.errors.CheckViolation):
        plain.execute(statement.encode(), {"state": state})


def test_an_intent_without_a_time_to_land_is_refused(plain: psycopg.Connection) -> None:
    statement = INSERTS["action"][0].replace("clock_timestamp()", "NULL")
    with pytest.raises(psycopg.errors.CheckViolation) as refused:
        plain.execute(statement.encode(), {"state": "PENDING"})
    assert refused.value.diag.constraint_name == "state_fits_effect"


# -- the records ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "table"),
    [(SagaRow, "saga"), (StepRow, "step"), (ActionRow, "action"), (RequestRow, "undo_request")],
)
def test_a_record_has_exactly_the_columns_of_its_table(scene: Scene, record: type, table: str) -> None:
    rows = scene.sql(
        "SELECT column_name, is_nullable FROM information_schema.columns "
        "WHERE table_schema = 'airflow_saga' AND table_name = %(table)s ORDER BY ordinal_position",
        {"table": table},
    )
    assert [row["column_name"] for row in rows] == [field.name for field in fields(record)]
    nullable = {row["column_name"] for row in rows if row["is_nullable"] == "YES"} - {"settled", "residual"}
    assert nullable == {field.name for field in fields(record) if "None" in str(field.type)}


# -- the SQL --------------------------------------------------------------------------------------------------------

SCRIPTS = [
    path for path in Path(str(files("airflow_saga.store"))).rglob("*") if path.suffix in (".sql", ".py")
]


def test_c77_there_are_no_session_locks() -> None:
    """A pooler would strand them: owners are rows with fence and lease. A migration's lock ends with its own end."""
    found = [
        (path.name, lock)
        for path in SCRIPTS
        for lock in re.findall(r"pg_\w*advisory\w*", path.read_text(encoding="utf-8"))
    ]
    assert {name for name, _ in found} == {"migrate.py"}
    assert {lock for _, lock in found} == {"pg_advisory_xact_lock"}


def test_all_times_are_the_database_s_and_of_the_moment() -> None:
    """now() is the start of the transaction, and a worker's clock is anybody's guess."""
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8")
        assert not re.findall(
            r"\bnow\(\)|current_timestamp|localtime|datetime\.now|time\.time\(", text, re.I
        ), path


def statements() -> list[tuple[str, str]]:
    named = []
    for path in SCRIPTS:
        if path.suffix == ".sql" and path.name != "schema.sql":
            script = path.read_text(encoding="utf-8")
            queries = Queries(script)
            named += [
                (name, getattr(queries, name).decode())
                for name in re.findall(r"^-- name: (\w+)$", script, re.MULTILINE)
            ]
    return named


VALUES = {
    **dict.fromkeys(("uuid", "ti_id"), "00000000-0000-0000-0000-000000000000"),
    "_ids": [1],
    "_id": 1,
    "state": "DONE",
    "states": ["DONE"],
    "causes": ["late"],
    "ancestors": ["a"],
    "plan": "{}",
    **dict.fromkeys(("seconds", "days", "number", "seq", "tries", "index", "batch", "limit", "fence"), 1),
    **dict.fromkeys(("generation", "generations", "version", "failures", "reopened", "retries", "pid"), 1),
}
TEXTS = {"dag_id", "run_id", "task_id", "owner_run_id"}
FLAGS = {
    *(
        "parallel",
        "lost",
        "own",
        "now",
        "run",
        "idempotent",
        "checkpoint",
        "settles",
        "on",
        "doubt",
        "landed",
    ),
    *("probed", "output_lost", "result_lost"),
}


def sample(name: str) -> Any:
    """A value of the right type for a parameter of this name."""
    if name in TEXTS:
        return "x"
    if name in ("checkpoint", "result_lost", "whole_run") or name.rsplit("_", 1)[-1] in FLAGS:
        return name != "checkpoint" or None
    for ending, value in VALUES.items():
        if name.endswith(ending):
            return value
    return None


SMALL_INDEXES = {"action_due"}
"""They hold what is open now, so reading one of them whole is fine."""


def whole_reads(node: dict[str, Any]) -> list[str]:
    """The big tables that a plan reads from one end to the other."""
    found = [table for plan in node.get("Plans", []) for table in whole_reads(plan)]
    if node.get("Relation Name") in ("action", "event") and node["Node Type"].endswith("Scan"):
        narrowed = "Index Cond" in node or "Recheck Cond" in node or node.get("Index Name") in SMALL_INDEXES
        found += [] if narrowed else [f"{node['Node Type']} on {node['Relation Name']}"]
    return found


READS = {
    **{name: text for name, text in statements() if name not in ("listen", "unlisten", "prunable")},
    "cascade of prune_actions": "DELETE FROM airflow_saga.event WHERE action_id = 1",
}
"""All but those that are no query, and the dry run of a person who wants to prune."""


@pytest.fixture(scope="module")
def full_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A store in which thousands of sagas have ended, as the planner sees it after months."""
    name = f"full_{uuid.uuid4().hex}"
    url = postgres_server.create_database(name, template=TEMPLATE)
    with connect(url) as connection, connection.transaction():
        connection.execute("SET LOCAL session_replication_role = replica")
        connection.execute(
            "INSERT INTO airflow_saga.saga (dag_id, run_id, state) "
            "SELECT 'd' || n % 20, 'r' || n, 'COMPLETED' FROM generate_series(1, 4000) n"
        )
        connection.execute(
            "INSERT INTO airflow_saga.step (saga_id, task_id, map_index, state, try_number, max_tries, retries, "
            "clear_number) SELECT saga_id, 't' || n, -1, 'SUCCEEDED', 1, 0, 0, 0 "
            "FROM airflow_saga.saga, generate_series(1, 3) n"
        )
        connection.execute(
            "INSERT INTO airflow_saga.action (saga_id, step_id, generation, seq, name, version, effect, fingerprint, "
            "key, state, params, settled, residual) SELECT saga_id, step_id, 1, n, 'n', 1, 'COMPENSABLE', 'f', 'k', "
            "'DONE', '{}', n > 1, n = 1 FROM airflow_saga.step, generate_series(1, 5) n"
        )
        connection.execute(
            "INSERT INTO airflow_saga.event (saga_id, step_id, what, actor) "
            "SELECT saga_id, step_id, 'step start', 'airflow' FROM airflow_saga.step, generate_series(1, 3)"
        )
        connection.execute(
            "INSERT INTO airflow_saga.undo_request (saga_id, number, whole_run, state, cause, actor, clear_number, "
            "plan) SELECT saga_id, 1, true, 'SETTLED', 'user', 'ann', 0, '{}' FROM airflow_saga.saga "
            "WHERE saga_id % 10 = 0"
        )
        connection.execute(
            "INSERT INTO airflow_saga.undo_scope (request_id, step_id) SELECT request_id, step_id "
            "FROM airflow_saga.undo_request JOIN airflow_saga.step USING (saga_id)"
        )
    with connect(url) as connection:
        connection.execute("ANALYZE")
    yield url
    postgres_server.drop_database(name)


@pytest.mark.parametrize("name", READS)
def test_no_statement_reads_the_whole_log(full_url: str, name: str) -> None:
    """The log grows for months; every statement finds its actions through an index."""
    statement = READS[name]
    params = {placeholder: sample(placeholder) for placeholder in re.findall(r"%\((\w+)\)s", statement)}
    with Address(full_url).open() as connection:
        explain = f"EXPLAIN (FORMAT JSON) {statement}".encode()
        (row,) = ClientCursor(connection).execute(explain, params).fetchall()
    assert whole_reads(row[0][0]["Plan"]) == [], row[0][0]["Plan"]
