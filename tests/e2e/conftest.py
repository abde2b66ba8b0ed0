"""A real Airflow with the built wheel in it, for the end-to-end tests.

Most tests share one (`airflow`); whoever kills a component, or needs other settings, asks `fresh_airflow` for one of
its own. The DAGs are the files in `dags/` here. A test that fails reports what Airflow said meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.airflow import RunningAirflow
from tests.support.airflow_api import PATIENCE
from tests.support.airflow_factory import AirflowFactory, FreshAirflows
from tests.support.postgres import PostgresServer
from tests.support.wheel import wheel_environment

DAGS = Path(__file__).parent / "dags"
TEST_TIMEOUT_SECONDS = 300 * PATIENCE
_began = pytest.StashKey[float]()


@pytest.fixture(scope="session")
def airflow_factory(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> AirflowFactory:
    """Makes Airflows with the built wheel in them; not started yet."""
    homes = tmp_path_factory.mktemp("airflow")
    return AirflowFactory(wheel_environment().python, postgres_server, homes, dags=[DAGS])


@pytest.fixture(scope="session")
def airflow_env() -> dict[str, str]:
    """More environment for the shared Airflow."""
    return {}


@pytest.fixture(scope="session")
def airflow(airflow_factory: AirflowFactory, airflow_env: dict[str, str]) -> Iterator[RunningAirflow]:
    """The shared Airflow. Kill tasks in it, but none of its components, and leave no task running."""
    with airflow_factory.create(env=airflow_env) as running:
        yield running


@pytest.fixture
def fresh_airflow(airflow_factory: AirflowFactory) -> Iterator[FreshAirflows]:
    """Call it to start an Airflow that is this test's alone: about ten seconds on an idle machine."""
    fresh = FreshAirflows(airflow_factory)
    yield fresh
    fresh.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_SECONDS))


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_began] = time.time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Attach what each Airflow of a failed test said while it ran."""
    report = yield
    if report.failed and report.when != "teardown":
        for running in _airflows_of(item):
            report.sections += list(running.report(item.stash[_began]))
    return report


def _airflows_of(item: pytest.Item) -> Iterator[RunningAirflow]:
    for value in getattr(item, "funcargs", {}).values():
        if isinstance(value, RunningAirflow):
            yield value
        elif isinstance(value, FreshAirflows):
            yield from value.started
