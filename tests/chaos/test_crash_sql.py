"""A process is killed at every point around the transaction of ``saga.sql``: one effect, one undo, nothing in doubt.

The statement takes ten from an account and its undo gives them back: what ran twice, or not at all, shows. Run as a
program this file is the nursery of those processes: ``driver`` with points to die at inside of the transaction.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_saga.capsules import databases
from airflow_saga.core.policies import Retry
from airflow_saga.runtime import statements
from tests.chaos import bodies, driver
from tests.chaos.conftest import Playground
from tests.chaos.nursery import ROOT, Child, Nursery
from tests.runtime.lab import wait_until
from tests.support.postgres import PostgresServer
from tests.support.world import World

TIMEOUT_SECONDS = 1.0
POINTS = [(at, when) for at in ("open", "receipt", "statement", "commit") for when in ("before", "after")]
FORWARD = [*POINTS, ("write_forward", "before")]
UNDO = [*POINTS, ("write_undo", "before")]
STANDS_STILL = [("open", "before"), ("receipt", "before"), ("statement", "after"), ("commit", "before")]
SIDE_BY_SIDE = 6


# -- the processes ----------------------------------------------------------------------------------------------------


def pays(saga: Any, url: str) -> Any:
    """One payment; the database is named by its URL, so that no Airflow has to be asked."""
    return saga.sql(
        url,
        "UPDATE account SET balance = balance - %(amount)s RETURNING owner",
        {"amount": 10},
        compensate="UPDATE account SET balance = balance + %(amount)s WHERE owner = %(owner)s",
    )


def _install(reaper: driver.Reaper) -> None:
    _install_verbs(reaper)
    wrap = reaper.wrap
    database = databases.Database
    take = database._ask
    taken = wrap("receipt", take)

    def ask(self: Any, name: str, *params: Any) -> Any:
        return (taken if name == "take" else take)(self, name, *params)

    databases.connect = wrap("open", databases.connect)
    database._ask = ask  # type: ignore[method-assign]
    database.execute = wrap("statement", database.execute)  # type: ignore[method-assign]
    database._commit = wrap("commit", database._commit)  # type: ignore[method-assign]


def _connect(url: str) -> tuple[Any, str]:
    return psycopg.connect(url), "%s"


def serve() -> None:
    bodies.pays = pays  # type: ignore[attr-defined]
    driver._install = _install
    databases.connect = _connect
    statements.sql.timeout = timedelta(seconds=TIMEOUT_SECONDS)
    statements.sql.retry = statements.sql.undo_retry = Retry(first=timedelta(seconds=0.05), tries=4)
    driver.serve()


_install_verbs = driver._install


class SqlNursery(Nursery):
    """Like its base, with this file as the program."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="saga-nursery-"))
        self._children: dict[str, Child] = {}
        self._lock = threading.Lock()
        with (self.directory / "nursery.log").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.test_crash_sql"],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        threading.Thread(target=self._listen, daemon=True).start()


# -- the books --------------------------------------------------------------------------------------------------------


class Account:
    """A user's database with a hundred in it, and the saga that pays from it."""

    def __init__(self, nursery: Nursery, server: PostgresServer, store_url: str, world: World) -> None:
        self._server = server
        self.name = f"account_{uuid.uuid4().hex}"
        self.url = server.create_database(self.name)
        self.playground = Playground(nursery, store_url, world.namespace())
        self.lab = self.playground.lab
        with psycopg.connect(self.url) as connection:
            connection.execute(databases.Q.make_table)
            connection.execute("CREATE TABLE account (owner text, balance int)")
            connection.execute("INSERT INTO account VALUES ('ann', 100)")

    def close(self) -> None:
        self.playground.close()
        self._server.drop_database(self.name)

    @property
    def balance(self) -> int:
        with psycopg.connect(self.url) as connection:
            row = connection.execute("SELECT balance FROM account").fetchone()
        assert row is not None
        return int(row[0])

    def states(self) -> list[str]:
        return [row.state for row in self.lab.actions()]

    def pay(self, try_number: int = 1, **die: Any) -> Child:
        return self.playground.step("pays", self.url, try_number=try_number, **die)

    def undo(self, request: uuid.UUID, **die: Any) -> Child:
        return self.playground.undo(request, **die)

    def freeze_undo(self) -> uuid.UUID:
        request = self.playground.ask_undo()
        assert self.playground.start("freeze", request_uuid=str(request)).output == "frozen"
        return request

    def settle(self, request: uuid.UUID) -> None:
        assert self.playground.start("settle", request_uuid=str(request)).output is True


@pytest.fixture(scope="module")
def sql_nursery() -> Iterator[Nursery]:
    made = SqlNursery()
    yield made
    made.close()


@pytest.fixture
def open_account(
    sql_nursery: Nursery, postgres_server: PostgresServer, shared_database_url: str, travel_world: World
) -> Iterator[Callable[[], Account]]:
    accounts: list[Account] = []

    def make() -> Account:
        accounts.append(Account(sql_nursery, postgres_server, shared_database_url, travel_world))
        return accounts[-1]

    yield make
    for account in accounts:
        account.close()


def die(at: str, when: str, **how: Any) -> dict[str, Any]:
    return {"die": {"at": at, "when": when, "nth": 2 if at == "write_forward" else 1, **how}}


def side_by_side(one: Callable[[tuple[str, str]], None], points: list[tuple[str, str]]) -> None:
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(one, points))


def test_a_payment_that_dies_anywhere_is_made_once_and_undone_once(
    open_account: Callable[[], Account],
) -> None:
    def one(point: tuple[str, str]) -> None:
        account = open_account()
        assert account.pay(**die(*point)).killed, point
        assert account.balance == (90 if point in (("commit", "after"), FORWARD[-1]) else 100), point
        assert account.pay(try_number=2).output == [{"owner": "ann"}], point
        assert (account.balance, account.states()) == (90, ["DONE"]), point
        request = account.freeze_undo()
        account.undo(request).wait()
        account.settle(request)
        assert (account.balance, account.lab.saga_state()) == (100, "CANCELLED"), point

    side_by_side(one, FORWARD)


def test_a_payment_that_died_anywhere_is_undone_without_a_doubt(open_account: Callable[[], Account]) -> None:
    def one(point: tuple[str, str]) -> None:
        account = open_account()
        assert account.pay(**die(*point)).killed, point
        request = account.freeze_undo()
        account.undo(request).wait()
        account.settle(request)
        assert (account.balance, account.lab.saga_state()) == (100, "CANCELLED"), point
        assert account.states()[0] in ("FAILED", "COMPENSATED"), point

    side_by_side(one, FORWARD)


def test_an_undo_that_dies_anywhere_is_made_once(open_account: Callable[[], Account]) -> None:
    def one(point: tuple[str, str]) -> None:
        account = open_account()
        account.pay().wait()
        assert account.balance == 90
        request = account.freeze_undo()
        how = die(*point)
        how["die"]["nth"] = 2 if point[0] == "write_undo" else 1
        assert account.undo(request, **how).killed, point
        account.undo(request).wait()
        account.settle(request)
        assert (account.balance, account.states()) == (100, ["COMPENSATED"]), point

    side_by_side(one, UNDO)


@pytest.mark.parametrize("point", STANDS_STILL)
def test_a_payment_that_stood_still_while_it_was_made_anew_changes_nothing(
    open_account: Callable[[], Account], point: tuple[str, str]
) -> None:
    account = open_account()
    zombie = account.pay(**die(*point, stand_still=True))
    zombie.wait_until_it_stands_still()
    wait_until(lambda: not account.lab.view().steps or _lease_is_out(account), "the lease runs out")
    assert account.pay(try_number=2).output == [{"owner": "ann"}]
    _wake(zombie)
    assert (account.balance, account.states()) == (90, ["DONE"])


@pytest.mark.parametrize("point", STANDS_STILL)
def test_a_payment_that_stood_still_while_it_was_undone_changes_nothing(
    open_account: Callable[[], Account], point: tuple[str, str]
) -> None:
    account = open_account()
    zombie = account.pay(**die(*point, stand_still=True))
    zombie.wait_until_it_stands_still()
    request = account.freeze_undo()
    account.undo(request).wait()
    account.settle(request)
    assert account.lab.saga_state() == "CANCELLED"
    _wake(zombie)
    assert (account.balance, account.lab.saga_state()) == (100, "CANCELLED")


def _lease_is_out(account: Account) -> bool:
    row = account.lab.connection.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    lease = account.lab.view().steps[0].lease_until
    return lease is None or lease < row[0]


def _wake(zombie: Child) -> None:
    zombie.kill(signal.SIGCONT)
    zombie.wait()
    assert zombie.ended != "well"


if __name__ == "__main__":
    serve()
