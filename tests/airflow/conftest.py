"""An Airflow without its components: a migrated metadata database, two parsed DAGs, and the `airflow saga …` commands.

The metadata is one SQLite file for all tests of a process, so each test takes a run id of its own; the saga store is
a real Postgres, fresh for each test. A command runs as users run it, as a process (`airflow_process`), or, since that
takes seconds to load Airflow, by the same parser in this process (`airflow_saga_cli`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.store.scene import Scene

DAGS = """
from __future__ import annotations

from airflow.sdk import DAG, BaseOperator

for dag_id in ("book_trip", "book_trip__compensation", "no_saga", "tagged"):
    tags = ["saga"] if dag_id == "tagged" else []
    with DAG(dag_id, schedule=None, is_paused_upon_creation=False, tags=tags) as dag:
        BaseOperator(task_id="flight")
    globals()[dag_id] = dag
"""
PROCESS_SECONDS = 120


@dataclass(frozen=True)
class Said:
    """What a command printed, and the code it ended with."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture(scope="session")
def airflow_home() -> Path:
    """The home of the Airflow of this process, with its metadata migrated and the DAGs parsed into it."""
    home = Path(os.environ["AIRFLOW_HOME"])
    (home / "dags").mkdir(exist_ok=True)
    (home / "dags" / "trips.py").write_text(DAGS)
    # In this process, which needs Airflow anyway: another one would only load it once more.
    from airflow.cli.cli_parser import get_parser

    for arguments in (["db", "migrate"], ["dags", "reserialize"]):
        args = get_parser().parse_args(arguments)
        args.func(args)
    return home


@pytest.fixture
def store_url(database_url: str, monkeypatch: pytest.MonkeyPatch, airflow_home: Path) -> Iterator[str]:
    """An empty store, to which the connection `saga_default` of this process and of those it starts leads."""
    monkeypatch.setenv("AIRFLOW_CONN_SAGA_DEFAULT", database_url)
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")
    _forget_addresses()
    yield database_url
    _forget_addresses()


def _forget_addresses() -> None:
    # Loaded here: the module reads Airflow's configuration, which the root conftest has to prepare first.
    from airflow_saga.settings import forget_addresses

    forget_addresses()


@pytest.fixture
def scene(store_url: str) -> Iterator[Scene]:
    """A run of `book_trip` in the store, of which Airflow knows nothing unless `airflow_run` makes it known."""
    played = Scene(store_url, run_id=f"manual__{uuid.uuid4().hex[:8]}")
    yield played
    played.close()


@pytest.fixture
def partly(scene: Scene) -> Scene:
    """A trip: the flight is undone, the hotel's refund is awaited, a mail stands, a charge could not be undone."""
    flight = scene.attach("flight")
    scene.read(flight, 1)
    params = json.dumps({"to": "LIS", "card": {"token": "tok_4242"}})
    scene.finish(scene.act(flight, 2, name="book_flight", params=params))
    hotel = scene.attach("hotel", after=["flight"])
    scene.act(hotel, 1, name="book_hotel")
    scene.finish(scene.act(hotel, 2, name="send_mail", effect="NON_COMPENSABLE"))
    pay = scene.act(scene.attach("pay", after=["flight", "hotel"]), 1, name="charge_card")
    scene.cancel(actor="alice", reason="wrong dates")
    assert scene.steps.stop_if_held(pay)
    scene.freeze()
    undo = scene.undo_of("pay")
    scene.compensate(undo, undo.open_actions[0], "COMPENSATION_FAILED", failed=True, error="HTTP 502")
    undo = scene.undo_of("hotel")
    by_name = {action.name: action for action in undo.open_actions}
    assert scene.undos.settle_action_if_held(undo, by_name["send_mail"], "NON_COMPENSABLE")
    scene.compensate(
        undo, by_name["book_hotel"], "COMPENSATING", reconcile_seconds=3600, waiting_for="the hotel"
    )
    scene.undo_step("flight")
    settled = scene.settle()
    assert settled is not None
    assert settled.saga.state == "PARTIALLY_CANCELLED"
    return scene


@pytest.fixture
def airflow_run(airflow_home: Path) -> Callable[..., None]:
    """Make a run known to Airflow."""

    def make(dag_id: str, run_id: str, *, state: str = "running", clear_number: int = 0) -> None:
        from airflow.api.common.trigger_dag import trigger_dag
        from airflow.utils.session import create_session
        from airflow.utils.types import DagRunTriggeredByType

        with create_session(scoped=False) as session:
            run = trigger_dag(dag_id, run_id=run_id, triggered_by=DagRunTriggeredByType.TEST, session=session)
            assert run is not None
            run.state, run.clear_number = state, clear_number

    return make


@pytest.fixture
def add_connection(airflow_home: Path) -> Iterator[Callable[..., str]]:
    """Put a connection into Airflow's metadata; its id is returned."""
    from airflow.models.connection import Connection
    from airflow.utils.session import create_session
    from sqlalchemy import delete

    added: list[str] = []

    def add(**columns: object) -> str:
        conn_id = f"conn_{uuid.uuid4().hex[:8]}"
        with create_session(scoped=False) as session:
            session.add(Connection(conn_id=conn_id, **columns))
        added.append(conn_id)
        return conn_id

    yield add
    with create_session(scoped=False) as session:
        session.execute(delete(Connection).where(Connection.conn_id.in_(added)))


@pytest.fixture
def airflow_saga_cli(store_url: str, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `airflow saga …` by Airflow's own parser, in this process."""
    from airflow.cli.cli_parser import get_parser

    def run(*arguments: object) -> Said:
        capsys.readouterr()
        code: Any = 0
        try:
            args = get_parser().parse_args(["saga", *map(str, arguments)])
            args.func(args)
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        return Said(code or 0, said.out, said.err)

    return run


@pytest.fixture
def airflow_process(airflow_home: Path) -> Command:
    """Run `airflow …` as a process; `env=` adds to its environment."""

    def run(*arguments: object, env: dict[str, str] | None = None) -> Said:
        return _run_process({**os.environ, **(env or {})}, *map(str, arguments))

    return run


def _run_process(env: Any, *arguments: str) -> Said:
    airflow = Path(sys.executable).parent / "airflow"
    done = subprocess.run(
        [str(airflow), *arguments],
        env={**env, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
    )
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def airflow_app(airflow_home: Path) -> Any:
    """Airflow's API server as it is in production, without its process."""
    from airflow.api_fastapi.app import create_app

    return create_app(apps="core")


@pytest.fixture
def web(store_url: str, airflow_app: Any) -> Any:
    """See :class:`tests.airflow.web.Web`."""
    from tests.airflow.web import Web

    return Web(airflow_app)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Loaded where it is needed: most tests here need none.
    from tests.airflow.browser import chromium

    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def served(airflow_app: Any) -> Iterator[Any]:
    """See :class:`tests.airflow.browser.Served`."""
    from tests.airflow.browser import Served

    server = Served(airflow_app)
    yield server
    server.stop()


@pytest.fixture
def visit(browser: Any, served: Any, web: Any) -> Iterator[Callable[..., Any]]:
    """Let somebody of a role come by; no script of theirs may have failed when they leave."""
    from tests.airflow.browser import Visitor

    came: list[Visitor] = []

    def come(role: str = "user", **more: Any) -> Visitor:
        came.append(Visitor(browser, served, web, role, **more))
        came[-1].context.set_default_timeout(20_000)
        return came[-1]

    yield come
    for visitor in came:
        visitor.context.close()
        assert visitor.errors == []


@pytest.fixture
def running(scene: Scene, airflow_run: Callable[..., None]) -> Scene:
    airflow_run(*scene.run)
    scene.act(scene.attach(), 1, name="book_flight")
    return scene
