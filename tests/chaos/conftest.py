"""A nursery of processes to kill, and sagas to do it with: see ``driver``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.nursery import Child, Nursery
from tests.runtime import deeds
from tests.runtime.lab import Lab
from tests.support.postgres import PostgresServer
from tests.support.world import View, World, fresh_namespace, running_world

assert deeds.book, "the undo finds what the children called only where it is declared too"

LIMITS: dict[str, Any] = {
    "lease_seconds": 2.0,
    "heartbeat_seconds": 0.2,
    "stop_grace_seconds": 1.0,
    "abandon_grace_seconds": 5.0,
    "wait_in_process_seconds": 2.0,
    "store_outage_seconds": 10.0,
    "outcome_flush_seconds": 0.05,  # so that outcomes ride with the next intent, and points have a number
}


class Playground:
    """A lab for one saga whose processes are children: ``step``, ``undo`` and so on start one."""

    def __init__(self, nursery: Nursery, url: str, world: View, dag_id: str | None = None) -> None:
        self.nursery = nursery
        self.world = world
        self.lab = Lab(url, world, dag_id or f"trip-{uuid.uuid4().hex[:8]}")
        self.limits = dict(LIMITS)

    def close(self) -> None:
        self.lab.close()

    def start(self, do: str, run: str = "r", **scenario: Any) -> Child:
        return self.nursery.start(
            do,
            **{
                "database_url": self.lab.url,
                "travel_url": self.world.url,
                "dag_id": self.lab.dag_id,
                "run_id": run,
                "limits": {**self.limits, **scenario.pop("limits", {})},
                **scenario,
            },
        )

    def step(self, body: str, *args: Any, run: str = "r", try_number: int = 1, **scenario: Any) -> Child:
        attempt = {"try_number": try_number, **scenario.pop("attempt", {})}
        return self.start("step", run, body=body, args=list(args), attempt=attempt, **scenario)

    def ask_undo(self, run: str = "r") -> uuid.UUID:
        decision = self.lab.ask_undo(run)
        assert decision.request is not None, decision.message
        return decision.request.request_uuid

    def undo(self, request_uuid: uuid.UUID, task: str = "t", **scenario: Any) -> Child:
        return self.start("undo", request_uuid=str(request_uuid), task_id=task, **scenario)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


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
    name = f"chaos_{uuid.uuid4().hex}"
    yield postgres_server.create_database(name, template="saga_template")
    postgres_server.drop_database(name)


@pytest.fixture
def playground(nursery: Nursery, shared_database_url: str, world: View) -> Iterator[Playground]:
    made = Playground(nursery, shared_database_url, world)
    yield made
    made.close()


@pytest.fixture
def own_playground(nursery: Nursery, database_url: str, world: View) -> Iterator[Playground]:
    """With a database of its own, for passes of the reconciler, which sees every saga."""
    made = Playground(nursery, database_url, world)
    yield made
    made.close()
