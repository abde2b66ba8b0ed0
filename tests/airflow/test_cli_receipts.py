"""`airflow saga db migrate --receipts`: the table of receipts in a database of the user's own."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import psycopg
import pytest

from airflow_saga.store.migrate import revision_of
from tests.airflow.conftest import Command
from tests.support.ports import free_port
from tests.support.postgres import PostgresServer


@pytest.fixture
def shop_url(postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A database without tables, to which the connection `shop` leads."""
    name = f"shop_{uuid.uuid4().hex}"
    url = postgres_server.create_database(name)
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", url.replace("postgresql://", "postgres://"))
    yield url
    postgres_server.drop_database(name)


def receipts_in(url: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT to_regclass('airflow_saga_receipts')").fetchone()
    assert row is not None
    return row[0]


def test_the_table_is_made_and_made_again_without_harm(airflow_saga_cli: Command, shop_url: str) -> None:
    made = airflow_saga_cli("db", "migrate", "--receipts", "--conn-id", "shop", "--output", "json")
    assert made.code == 0, made.err
    assert json.loads(made.out)["made"] is True
    with psycopg.connect(shop_url) as connection:
        connection.execute("INSERT INTO airflow_saga_receipts (receipt_key) VALUES ('kept')")
    again = airflow_saga_cli("db", "migrate", "--receipts", "--conn-id", "shop")
    assert again.code == 0, again.err
    assert "already" in again.out
    with psycopg.connect(shop_url) as connection:
        assert connection.execute("SELECT count(*) FROM airflow_saga_receipts").fetchone() == (1,)


def test_the_saga_store_is_left_alone(airflow_saga_cli: Command, store_url: str, shop_url: str) -> None:
    assert airflow_saga_cli("db", "migrate", "--receipts", "--conn-id", "shop").code == 0
    assert receipts_in(store_url) is None
    with psycopg.connect(shop_url) as connection:
        assert revision_of(connection) is None


@pytest.mark.parametrize("arguments", [["--receipts"], ["--conn-id", "shop"]])
def test_half_of_what_it_takes_is_wrong_usage(
    airflow_saga_cli: Command, shop_url: str, arguments: list[str]
) -> None:
    said = airflow_saga_cli("db", "migrate", *arguments)
    assert said.code == 2
    assert "--receipts and --conn-id CONN go together" in said.err
    assert receipts_in(shop_url) is None


def test_a_connection_that_leads_nowhere_is_named(
    airflow_saga_cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = airflow_saga_cli("db", "migrate", "--receipts", "--conn-id", "nowhere")
    assert (unknown.code, "no connection 'nowhere'" in unknown.err) == (1, True), unknown.err
    monkeypatch.setenv("AIRFLOW_CONN_AWAY", f"postgres://u:pw-9x@127.0.0.1:{free_port()}/shop")
    away = airflow_saga_cli("db", "migrate", "--receipts", "--conn-id", "away")
    assert (away.code, "'away' cannot be opened" in away.err) == (1, True), away.err
    assert "pw-9x" not in away.err


def test_a_user_who_may_not_make_tables_is_told_so(
    airflow_saga_cli: Command, shop_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(shop_url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS reader")
        connection.execute("CREATE ROLE reader LOGIN")
        connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    place = shop_url.partition("@")[2]
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", f"postgres://reader@{place}")
    said = airflow_saga_cli("db", "migrate", "--receipts", "--conn-id", "shop")
    assert said.code == 1
    assert "permission denied" in said.err
