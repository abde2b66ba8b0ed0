"""A real Airflow with the built wheel in it, for the end-to-end tests.

Most tests share one (`airflow`), and most of those run at the same time in it (see `together`); whoever kills a
component, or needs other settings, asks `fresh_airflow` for one of its own. The DAGs are the files in `dags/` here and
the demo's, whose reconciler works here too. A test that fails reports what Airflow said meanwhile.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.scene import AIRLINE_PASSWORD, Scene, Stage
from tests.e2e.together import MARK, Together, body_of, is_together
from tests.support.airflow import RunningAirflow
from tests.support.airflow_api import PATIENCE
from tests.support.airflow_factory import AirflowFactory, FreshAirflows
from tests.support.airflow_setup import connection_json
from tests.support.model import running_model
from tests.support.ports import free_port
from tests.support.postgres import PostgresServer
from tests.support.small_model import SmallModel, running_small_model
from tests.support.wheel import wheel_environment
from tests.support.world import World, running_world

DAGS = Path(__file__).parent / "dags"
AGENTS = ["apache-airflow-providers-common-ai[sql]", "pydantic-ai-slim[openai]"]
"""What the DAGs with agents need beside the extra `ai`."""
DEMO_DAGS = Path(__file__).parents[2] / "dags"
TEST_TIMEOUT_SECONDS = 300 * PATIENCE
RECONCILE_EVERY_SECONDS = 10
_began = pytest.StashKey[float]()
_together = pytest.StashKey[Together]()
_scenes = pytest.StashKey[dict[str, Scene]]()


@pytest.fixture(scope="session")
def airflow_factory(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> AirflowFactory:
    """Makes Airflows with the built wheel in them; not started yet."""
    homes = tmp_path_factory.mktemp("airflow")
    python = wheel_environment(extras=["ai", "embedded"], packages=AGENTS).python
    return AirflowFactory(python, postgres_server, homes, dags=[DEMO_DAGS, DAGS])


@pytest.fixture(scope="session")
def model_url() -> Iterator[str]:
    """The scripted model that the agents of the DAGs ask."""
    with running_model() as url:
        yield url


@pytest.fixture(scope="session")
def small_model() -> Iterator[SmallModel]:
    """The real small model that the demo's agent asks."""
    with running_small_model() as small:
        yield small


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """The travel service that the DAGs call; each trip has its own part of its ledger."""
    with running_world() as world:
        yield world


@pytest.fixture(scope="session")
def airflow_env(
    world: World, model_url: str, small_model: SmallModel, postgres_server: PostgresServer
) -> dict[str, str]:
    """More environment for an Airflow whose DAGs travel."""
    unmigrated = postgres_server.create_database(f"unmigrated_{uuid.uuid4().hex[:8]}")
    airline = {"conn_type": "http", "host": "127.0.0.1", "password": AIRLINE_PASSWORD}
    llm = {"conn_type": "pydanticai", "host": f"{model_url}/v1", "password": f"planted-{uuid.uuid4().hex}"}
    return {
        **world.env(),
        "MODEL_URL": model_url,
        "AIRFLOW_CONN_AGENTS_LLM": json.dumps(llm),
        "AIRFLOW_CONN_CONCIERGE_LLM": json.dumps({**llm, "host": f"{small_model.url}/v1"}),
        "AIRFLOW_CONN_AIRLINE": json.dumps(airline),
        "AIRFLOW_CONN_SAGA_UNMIGRATED": connection_json(unmigrated),
        "AIRFLOW_CONN_SAGA_AWAY": f"postgres://saga@127.0.0.1:{free_port()}/saga",
        "SAGA_RECONCILE_EVERY_SECONDS": str(RECONCILE_EVERY_SECONDS),
        # What a lost process costs: the lease has to run out.
        "AIRFLOW__SAGA__LEASE_SECONDS": "8",
        # What a hung body costs when its saga is stopped.
        "AIRFLOW__SAGA__STOP_GRACE_SECONDS": "5",
        # Many wait for their clock at the same time.
        "AIRFLOW__CORE__PARALLELISM": "16",
    }


@pytest.fixture(scope="session")
def airflow(airflow_factory: AirflowFactory, airflow_env: dict[str, str]) -> Iterator[RunningAirflow]:
    """The shared Airflow. Kill tasks in it, but none of its components, and leave no task running."""
    with airflow_factory.create(env=airflow_env) as running:
        yield running


@pytest.fixture(scope="session")
def stage(airflow: RunningAirflow, world: World) -> Stage:
    return Stage(airflow, world)


@pytest.fixture
def scene(request: pytest.FixtureRequest, stage: Stage) -> Scene:
    """This test's part of the shared stage. With the mark `together` it is the one its body already plays in."""
    session = request.session
    if not is_together(request.node):
        return Scene(stage, request.node.nodeid)
    if _together not in session.stash:
        items = [item for item in session.items if is_together(item)]
        scenes = session.stash[_scenes] = {item.nodeid: Scene(stage, item.nodeid) for item in items}
        bodies = [(item.nodeid, body_of(item, scene=scenes[item.nodeid])) for item in items]
        session.stash[_together] = session.config.stash[_together] = Together(bodies)
    return session.stash[_scenes][request.node.nodeid]


@pytest.fixture
def fresh_airflow(airflow_factory: AirflowFactory) -> Iterator[FreshAirflows]:
    """Call it to start an Airflow that is this test's alone: about ten seconds on an idle machine."""
    fresh = FreshAirflows(airflow_factory)
    yield fresh
    fresh.close()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: runs at the same time as the others of this mark")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that run together come first: what needs an Airflow of its own would only slow them down."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in here:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_SECONDS))
    ordered = iter(sorted(here, key=lambda item: not is_together(item)))
    items[:] = [next(ordered) if item in here else item for item in items]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """The body of a test that runs together with others is under way already: wait for its end."""
    if not is_together(pyfuncitem):
        return None
    pyfuncitem.session.stash[_together].wait(pyfuncitem.nodeid)
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_began] = time.time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Attach what each Airflow of a failed test said while it ran, or all about the trips of its scene."""
    report = yield
    if report.failed and report.when != "teardown":
        scene = getattr(item, "funcargs", {}).get("scene")
        if scene is not None:
            report.sections += list(scene.report())
        for running in _airflows_of(item) if not is_together(item) else ():
            report.sections += list(running.report(item.stash[_began]))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How long each body took: what pytest measures is only how long it was still waited for."""
    together = terminalreporter.config.stash.get(_together, None)
    if together is not None:
        terminalreporter.section("seconds of the bodies that ran together")
        for name, seconds in sorted(together.seconds.items(), key=lambda each: -each[1]):
            terminalreporter.write_line(f"{seconds:7.1f} {name}")


def _airflows_of(item: pytest.Item) -> Iterator[RunningAirflow]:
    for value in getattr(item, "funcargs", {}).values():
        if isinstance(value, RunningAirflow):
            yield value
        elif isinstance(value, FreshAirflows):
            yield from value.started
