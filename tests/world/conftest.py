"""One travel service for the tests of this directory; each test has a world of its own in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.world import View, World, fresh_namespace, running_world


@pytest.fixture(scope="session")
def travel_world() -> Iterator[World]:
    with running_world() as world:
        yield world


@pytest.fixture
def world(travel_world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[View]:
    with fresh_namespace(travel_world, monkeypatch) as view:
        yield view
