"""An Airflow with the operators of several providers, and the services that they talk to.

It runs the checkout in the environment of whoever runs the tests, since the wheel's has no such providers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import boto3
import psycopg
import pytest

from tests.conftest import TEMPLATE as STORE
from tests.e2e.scene import Scene, Stage
from tests.e2e.together import Together, body_of
from tests.support.airflow import RunningAirflow
from tests.support.airflow_setup import connection_json, migrate_metadata
from tests.support.ports import free_port
from tests.support.postgres import PostgresServer
from tests.support.world import DAGS as SUPPORT
from tests.support.world import World

DAGS = Path(__file__).parent / "dags"
ROOT = SUPPORT.parent
SERVICE_SECONDS = 30.0
ALONE = "alone"
WIDTH = 5
"""So many play at the same time."""
_together = pytest.StashKey[Together]()
_scenes = pytest.StashKey[dict[str, Scene]]()
S3_SECRET = f"planted-{uuid.uuid4().hex}"


@dataclass(frozen=True)
class Services:
    """What the operators change.

    :ivar place: a directory for the files that shell scripts make.
    :ivar shop: URL of a database with a table of orders.
    :ivar s3: URL of an S3 service.
    """

    place: Path
    shop: str
    s3: str

    def files(self, run_id: str) -> list[str]:
        return sorted(path.name for path in self.place.iterdir() if path.name.startswith(run_id))

    def buckets(self) -> list[str]:
        client = boto3.client(
            "s3",
            endpoint_url=self.s3,
            region_name="us-east-1",
            aws_access_key_id="tests",
            aws_secret_access_key=S3_SECRET,
        )
        return [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]

    def orders(self, run_id: str) -> int:
        with psycopg.connect(self.shop) as connection:
            row = connection.execute("SELECT count(*) FROM orders WHERE run = %s", (run_id,)).fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    command = [str(Path(sys.executable).parent / "moto_server"), "-H", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "-p", str(urlsplit(url).port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def services(s3: str, postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Services:
    shop = postgres_server.create_database(f"shop_{uuid.uuid4().hex[:8]}")
    with psycopg.connect(shop) as connection:
        connection.execute("CREATE TABLE orders (id bigserial PRIMARY KEY, run text NOT NULL)")
    return Services(tmp_path_factory.mktemp("place"), shop, s3)


@pytest.fixture(scope="session")
def operator_airflow(
    postgres_server: PostgresServer,
    tmp_path_factory: pytest.TempPathFactory,
    services: Services,
    world: World,
) -> Iterator[RunningAirflow]:
    address = urlsplit(world.url)
    aws = {"endpoint_url": services.s3, "region_name": "us-east-1"}
    env = {
        **world.env(),
        "SAGA_TEST_PLACE": str(services.place),
        # The triggerer finds the trigger there, and all of them the client of the world, and this very checkout.
        "PYTHONPATH": f"{SUPPORT}:{DAGS}:{ROOT}",
        "AIRFLOW_CONN_TRAVEL": json.dumps(
            {"conn_type": "http", "host": address.hostname, "port": address.port}
        ),
        "AIRFLOW_CONN_AWS_DEFAULT": json.dumps(
            {"conn_type": "aws", "login": "tests", "password": S3_SECRET, "extra": aws}
        ),
        "AIRFLOW_CONN_SHOP": connection_json(services.shop),
        "AIRFLOW__SAGA__LEASE_SECONDS": "6",
        "AIRFLOW__CORE__PARALLELISM": "12",
    }
    python, home = Path(sys.executable), tmp_path_factory.mktemp("operators")
    metadata = postgres_server.create_database(f"operators_{uuid.uuid4().hex[:8]}")
    migrate_metadata(python, home / "migrate", metadata)
    store = postgres_server.create_database(f"operators_store_{uuid.uuid4().hex[:8]}", template=STORE)
    with (
        RunningAirflow(
            python, home / "airflow", metadata_url=metadata, store_url=store, dags=[DAGS], env=env
        ) as running,
        urlopen(services.s3, timeout=SERVICE_SECONDS),
    ):
        yield running


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, operator_airflow: RunningAirflow, services: Services, world: World
) -> Scene:
    """This test's part of the stage; all but those with the mark `alone` play in it at the same time."""
    session, stage = request.session, Stage(operator_airflow, world)
    if not _plays_with_others(request.node):
        return Scene(stage, request.node.nodeid)
    if _together not in session.stash:
        items = [item for item in session.items if _plays_with_others(item)]
        scenes = session.stash[_scenes] = {item.nodeid: Scene(stage, item.nodeid) for item in items}
        bodies = [
            (item.nodeid, body_of(item, scene=scenes[item.nodeid], services=services)) for item in items
        ]
        session.stash[_together] = Together(bodies, WIDTH)
    return session.stash[_scenes][request.node.nodeid]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{ALONE}: kills a component, so no other test plays meanwhile")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that play alone come last, when the others have ended."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    ordered = iter(sorted(here, key=lambda item: not _plays_with_others(item)))
    items[:] = [next(ordered) if item in here else item for item in items]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """The body of a test that plays with others is under way already: wait for its end."""
    if not _plays_with_others(pyfuncitem):
        return None
    pyfuncitem.session.stash[_together].wait(pyfuncitem.nodeid)
    return True


def _plays_with_others(item: pytest.Item) -> bool:
    return item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker(ALONE) is None
