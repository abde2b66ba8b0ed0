"""What is asked of Airflow: options, where the store is, which values are secret; in this process and in a task."""

from __future__ import annotations

import json
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import psycopg
import pytest
from airflow.exceptions import AirflowConfigException

from airflow_saga.core.errors import SecretNotResolvedError, StoreNotConfiguredError, StoreUnavailableError
from airflow_saga.core.secret import Secret, set_secret_resolver
from airflow_saga.get_provider_info import get_provider_info
from airflow_saga.settings import (
    Settings,
    connection_of,
    forget_addresses,
    known_secrets,
    resolve_secret,
    secrets_of_this_process,
    sensitive_names,
    store_address,
)
from tests.airflow.conftest import Command

AddConnection = Callable[..., str]


@pytest.fixture(autouse=True)
def _no_address_of_another_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")
    forget_addresses()
    yield
    forget_addresses()


# -- options ----------------------------------------------------------------------------------------------------------


def test_there_is_a_setting_for_each_option_and_each_has_its_default() -> None:
    options = get_provider_info()["config"]["saga"]["options"]
    settings = Settings.load()
    assert [field.name for field in fields(Settings)] == list(options)
    for name, option in options.items():
        assert str(getattr(settings, name)) in (option["default"], f"{option['default']}.0")


def test_an_option_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__SAGA__LEASE_SECONDS", "20")
    monkeypatch.setenv("AIRFLOW__SAGA__FLUSH_MS", "250")
    settings = Settings.load()
    assert (settings.lease_seconds, settings.flush_ms) == (20.0, 250)
    assert settings.limits().flush_seconds == 0.25
    assert settings.limits().lease_seconds == 20.0


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("lease_seconds", "0", "[saga] lease_seconds is 0.0; it has to be more than 0"),
        ("heartbeat_seconds", "10", "twice as long"),
        ("retention_days", "-1", "[saga] retention_days is -1"),
        ("max_value_bytes", "much", "max_value_bytes"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, option: str, value: str, complaint: str
) -> None:
    monkeypatch.setenv(f"AIRFLOW__SAGA__{option.upper()}", value)
    with pytest.raises(AirflowConfigException, match=re.escape(complaint)):
        Settings.load()


# -- the store --------------------------------------------------------------------------------------------------------


def test_the_address_opens_the_store(store_url: str) -> None:
    with store_address().open() as connection:
        assert connection.info.dbname == store_url.rpartition("/")[2]
        assert connection.autocommit


def test_the_address_is_asked_for_once(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store_address()
    monkeypatch.setenv("AIRFLOW_CONN_SAGA_DEFAULT", "postgres://elsewhere.invalid/x")
    assert store_address() is first


def test_a_connection_in_the_metadata_leads_to_the_store(
    database_url: str, add_connection: AddConnection
) -> None:
    parts = psycopg.conninfo.conninfo_to_dict(database_url)
    conn_id = add_connection(
        conn_type="postgres",
        host=parts["host"],
        port=int(str(parts["port"])),
        login=parts["user"],
        password="not-checked-by-this-server",
        schema=parts["dbname"],
        extra=json.dumps({"application_name": "somebody", "cursor": "realdictcursor"}),
    )
    with store_address(conn_id).open() as connection:
        assert connection.info.dbname == parts["dbname"]


def test_a_forked_process_asks_anew(store_url: str) -> None:
    store_address()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        from airflow_saga import settings

        asked = settings._addresses.get((os.getpid(), "saga_default")) is None
        os.write(write, b"asks" if asked else b"kept")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"asks"


def test_a_missing_connection_is_refused_with_what_to_run(airflow_home: Path) -> None:
    with pytest.raises(StoreNotConfiguredError) as refused:
        store_address("no_such_conn")
    assert "export AIRFLOW_CONN_NO_SUCH_CONN='postgres://" in str(refused.value)
    assert "airflow connections add no_such_conn" in str(refused.value)


def test_a_connection_to_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_WRONG", "mysql://ann:hush-hush@db/sagas")
    with pytest.raises(StoreNotConfiguredError, match="is of type 'mysql'") as refused:
        store_address("wrong")
    assert "hush-hush" not in str(refused.value)


def test_an_extra_that_postgres_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = {"conn_type": "postgres", "host": "127.0.0.1", "extra": {"no_such_parameter": "x"}}
    monkeypatch.setenv("AIRFLOW_CONN_ODD", json.dumps(connection))
    with pytest.raises(StoreNotConfiguredError, match="no_such_parameter"):
        store_address("odd")


def test_a_store_that_does_not_answer_is_unavailable_and_its_password_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_DOWN", "postgres://ann:hush-hush@127.0.0.1:1/sagas")
    with pytest.raises(StoreUnavailableError, match="connection 'down'") as refused:
        store_address("down")
    assert "hush-hush" not in repr(refused.value)
    assert refused.value.__cause__ is None


def test_a_look_up_leaves_the_session_of_its_thread_alone(add_connection: AddConnection) -> None:
    """As a listener on the scheduler's thread: a look-up there would end the session the scheduler works with."""
    from airflow.models.variable import Variable
    from airflow.utils.session import create_session
    from sqlalchemy import inspect

    conn_id = add_connection(conn_type="http", host="h")
    with create_session() as session:
        unsaved = Variable(key=f"v_{uuid.uuid4().hex}", val="x")
        session.add(unsaved)
        found = connection_of(conn_id)
        assert found is not None
        assert found.host == "h"
        assert inspect(unsaved).pending
        session.expunge(unsaved)


def test_the_address_may_be_asked_for_on_any_thread(store_url: str) -> None:
    opened: list[str] = []

    def ask() -> None:
        with store_address().open() as connection:
            opened.append(connection.info.dbname)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert opened == [store_url.rpartition("/")[2]] * 4


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_the_values_of_both_maskers_are_known_in_plain_text() -> None:
    from airflow._shared.secrets_masker import mask_secret as mask_in_core
    from airflow.sdk.log import mask_secret as mask_in_sdk

    odd = "p.w+d (x)\n\\n"
    mask_in_core("known-to-the-core")
    mask_in_sdk(odd)
    assert {"known-to-the-core", odd} <= set(known_secrets())
    assert secrets_of_this_process().scrub(f"a known-to-the-core {odd} b") == "a *** *** b"


def test_a_secret_learned_later_is_known_too() -> None:
    from airflow.sdk.log import mask_secret

    secrets = secrets_of_this_process()
    assert secrets.scrub("learned-later") == "learned-later"
    mask_secret("learned-later")
    assert secrets.scrub("learned-later") == "***"


def test_the_sensitive_names_are_airflows() -> None:
    from airflow.sdk._shared.secrets_masker import should_hide_value_for_key

    names = sensitive_names()
    assert {"password", "token"} <= names
    assert all(should_hide_value_for_key(name) for name in names)


def test_a_secret_is_read_from_its_connection_and_made_known(add_connection: AddConnection) -> None:
    password, token = f"pw-{uuid.uuid4()}", f"tk-{uuid.uuid4()}"
    conn_id = add_connection(
        conn_type="http", host="h", port=8080, password=password, extra=json.dumps({"token": token})
    )
    set_secret_resolver(resolve_secret)
    try:
        assert Secret(conn_id).reveal() == password
        assert Secret(conn_id, "extra.token").reveal() == token
        assert Secret(conn_id, "port").reveal() == "8080"
        assert {password, token} <= set(known_secrets())
        with pytest.raises(SecretNotResolvedError, match="has no login"):
            Secret(conn_id, "login").reveal()
        with pytest.raises(SecretNotResolvedError, match="Airflow knows no connection 'not_there'"):
            Secret("not_there").reveal()
    finally:
        set_secret_resolver(None)


# -- in a task --------------------------------------------------------------------------------------------------------

TASK = """
from __future__ import annotations

import json

from airflow.sdk import DAG, task


@task
def ask(path, conn_id):
    from airflow_saga.settings import Settings, in_task_process, known_secrets, resolve_secret, store_address

    with store_address().open() as connection:
        database = connection.info.dbname
    revealed = resolve_secret(conn_id, "password")
    told = {
        "in_task": in_task_process(),
        "database": database,
        "lease": Settings.load().lease_seconds,
        "revealed": revealed,
        "known": revealed in set(known_secrets()),
        "missing": resolve_secret(conn_id, "extra.token"),
    }
    with open(path, "w") as file:
        json.dump(told, file)


with DAG("ask_settings", schedule=None, params={"path": "", "conn_id": ""}):
    ask("{{ params.path }}", "{{ params.conn_id }}")
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_task_asks_its_supervisor(
    store_url: str,
    airflow_home: Path,
    airflow_process: Command,
    add_connection: AddConnection,
    tmp_path: Path,
) -> None:
    (airflow_home / "dags" / "ask_settings.py").write_text(TASK)
    told = tmp_path / "told.json"
    conn_id = add_connection(conn_type="http", host="h", password="hush-in-metadata")
    try:
        conf = {"path": str(told), "conn_id": conn_id}
        said = airflow_process("dags", "test", "ask_settings", "--conf", json.dumps(conf))
        assert said.code == 0, said.out[-3000:] + said.err[-3000:]
        assert json.loads(told.read_text()) == {
            "in_task": True,
            "database": store_url.rpartition("/")[2],
            "lease": 15.0,
            "revealed": "hush-in-metadata",
            "known": True,
            "missing": None,
        }
    finally:
        (airflow_home / "dags" / "ask_settings.py").unlink()
