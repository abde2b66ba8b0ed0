"""A real Airflow with the built wheel in it, for the end-to-end tests.

Most tests share one (`airflow`); whoever kills a component, or needs other settings, asks `fresh_airflow` for one of
its own. The DAGs are the files in `dags/` here. A test that fails reports what Airflow said meanwhile.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.airflow import RunningAirflow, migrate_metadata
from tests.support.postgres import PostgresServer
from tests.support.wheel import wheel_environment

DAGS = Path(__file__).parent / "dags"
TEST_TIMEOUT_SECONDS = 300
_METADATA_TEMPLATE = "airflow_template"
_STORE_TEMPLATE = "airflow_saga_store_template"
_MIGRATE_STORE = "import sys; from airflow_saga.store.migrate import upgrade; upgrade(sys.argv[1])"
_began = pytest.StashKey[float]()


class AirflowFactory:
    """Starts Airflows; what is the same for all of them (both migrated databases) is made once.

    :param server: where each Airflow's metadata lives, and its store unless another server is given.
    """

    def __init__(self, python: Path, server: PostgresServer, homes: Path) -> None:
        self._python = python
        self._server = server
        self._homes = homes
        self._migrated_stores: set[str] = set()
        server.create_database(_METADATA_TEMPLATE)
        migrate_metadata(python, homes / "migrate", server.url_of(_METADATA_TEMPLATE))

    def create(
        self,
        *,
        dags: Iterable[Path] = (DAGS,),
        env: Mapping[str, str] | None = None,
        store_server: PostgresServer | None = None,
        store_in_metadata: bool = False,
    ) -> RunningAirflow:
        """An Airflow with new, migrated databases, not started yet.

        :param store_server: a server for the store alone, to be killed or stopped without Airflow's own.
        :param store_in_metadata: Airflow knows the store by a connection in its metadata, not from the environment.
        """
        name = f"airflow_{uuid.uuid4().hex[:8]}"
        return RunningAirflow(
            self._python,
            self._homes / name,
            metadata_url=self._server.create_database(name, template=_METADATA_TEMPLATE),
            store_url=self._new_store(store_server or self._server, f"{name}_store"),
            store_in_metadata=store_in_metadata,
            dags=dags,
            env=env,
        )

    def _new_store(self, server: PostgresServer, name: str) -> str:
        template = server.url_of(_STORE_TEMPLATE)
        if template not in self._migrated_stores:
            server.create_database(_STORE_TEMPLATE)
            # By the installed wheel, so that what its migrations need is proven to be in it.
            subprocess.run(
                [str(self._python), "-c", _MIGRATE_STORE, template], check=True, cwd=self._homes, timeout=120
            )
            self._migrated_stores.add(template)
        return server.create_database(name, template=_STORE_TEMPLATE)


class FreshAirflows:
    """Starts Airflows for one test, with the arguments of :meth:`AirflowFactory.create`; they end with the test."""

    def __init__(self, factory: AirflowFactory) -> None:
        self._factory = factory
        self._stack = ExitStack()
        self.started: list[RunningAirflow] = []

    def __call__(self, **arguments: Any) -> RunningAirflow:
        airflow = self._factory.create(**arguments)
        self.started.append(airflow)
        return self._stack.enter_context(airflow)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def airflow_factory(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> AirflowFactory:
    return AirflowFactory(wheel_environment().python, postgres_server, tmp_path_factory.mktemp("airflow"))


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
            report.sections += [(f"{title}", text) for title, text in running.report(item.stash[_began])]
    return report


def _airflows_of(item: pytest.Item) -> Iterator[RunningAirflow]:
    for value in getattr(item, "funcargs", {}).values():
        if isinstance(value, RunningAirflow):
            yield value
        elif isinstance(value, FreshAirflows):
            yield from value.started
