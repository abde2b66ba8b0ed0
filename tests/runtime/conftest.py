"""A laboratory for each test: a world of its own, and sagas of its own in a database."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.runtime.lab import Lab
from tests.support.postgres import PostgresServer
from tests.support.world import View, World, fresh_namespace, running_world


@pytest.fixture(scope="session")
def travel_world() -> Iterator[World]:
    with running_world() as world:
        yield world


@pytest.fixture
def world(travel_world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[View]:
    with fresh_namespace(travel_world, monkeypatch) as view:
        yield view


@pytest.fixture(scope="session")
def shared_database_url(postgres_server: PostgresServer) -> Iterator[str]:
    """One database for the tests that look at nothing but their own saga: a fresh one costs more than most of them."""
    name = f"runtime_{uuid.uuid4().hex}"
    yield postgres_server.create_database(name, template="saga_template")
    postgres_server.drop_database(name)


@pytest.fixture
def lab(shared_database_url: str, world: View) -> Iterator[Lab]:
    made = Lab(shared_database_url, world, f"trip-{uuid.uuid4().hex[:8]}")
    yield made
    made.close()


@pytest.fixture
def own_lab(database_url: str, world: View) -> Iterator[Lab]:
    """With a database of its own: for the reconciler, which looks at every saga, and for what is done to the server."""
    made = Lab(database_url, world)
    yield made
    made.close()
