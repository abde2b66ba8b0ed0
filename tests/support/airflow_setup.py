"""What an Airflow for a test is made of: its settings, its environment, its commands, its databases.

The invariant: nothing of the Airflow, the Python or the proxies of whoever runs the tests gets into it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from tests.support.airflow_api import PATIENCE

COMMAND_SECONDS = 120.0

# What is quick here and slow in production is how soon Airflow looks again, never what it then does.
SETTINGS: dict[str, str] = {
    "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
    "AIRFLOW__CORE__PARALLELISM": "6",
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    "AIRFLOW__CORE__AUTH_MANAGER": "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager",
    "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
    "AIRFLOW__API__HOST": "127.0.0.1",
    "AIRFLOW__API__WORKERS": "1",
    "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
    "AIRFLOW__LOGGING__COLORED_CONSOLE_LOG": "False",
    # How soon a task learns that it was marked failed.
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
    # How soon the next task of a run is seen: a second of each hop in a default installation.
    "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.25",
    # Its threads each hold a connection, and while there is none left, it answers nobody at all.
    "AIRFLOW__DATABASE__SQL_ALCHEMY_MAX_OVERFLOW": "40",
    # How soon a dead supervisor and a dead scheduler are noticed; on a busy machine they only seem to be dead.
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": str(round(15 * PATIENCE)),
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "2",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": str(round(12 * PATIENCE)),
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "5",
    # How soon a new or changed DAG file is seen; one that stays as it is need not be parsed again and again.
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "2",
    "AIRFLOW__DAG_PROCESSOR__BUNDLE_REFRESH_CHECK_INTERVAL": "1",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "60",
    # A file with an agent in it takes seconds of a core to load, and here many processes do that at the same time.
    "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "120",
    "AIRFLOW__DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "150",
    "NO_COLOR": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


def base_environment(bin_dir: Path, home: Path, metadata_url: str) -> dict[str, str]:
    """The environment of whoever runs the tests, without what would lead Airflow elsewhere."""
    foreign = ("AIRFLOW", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "COVERAGE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    # Without compiled files every process of Airflow compiles half a million lines anew, which doubles its start.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env["PATH"] = os.pathsep.join([str(bin_dir), env.get("PATH", "")])
    env["AIRFLOW_HOME"] = str(home)
    env["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"] = f"postgresql+psycopg2://{metadata_url.partition('://')[2]}"
    return env


def migrate_metadata(python: Path | str, home: Path, metadata_url: str) -> None:
    """Make Airflow's own tables in an empty database: slow, so make copies of that database and not more of it."""
    home.mkdir(parents=True, exist_ok=True)
    bin_dir = Path(python).parent
    env = base_environment(bin_dir, home, metadata_url) | SETTINGS
    run_airflow(bin_dir, env, home, "db", "migrate")


def run_airflow(
    bin_dir: Path, env: Mapping[str, str], home: Path, *arguments: str, check: bool = True
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(bin_dir / "airflow"), *arguments],
        env=dict(env),
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS * PATIENCE,
    )
    if check and done.returncode != 0:
        raise AssertionError(
            f"airflow {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
    return done


def connection_json(url: str) -> str:
    """A Postgres URL as the JSON of an Airflow connection."""
    parts = conninfo_to_dict(url)
    fields = {
        "conn_type": "postgres",
        "host": parts.get("host"),
        "port": int(parts["port"]) if parts.get("port") else None,
        "login": parts.get("user"),
        "password": parts.get("password"),
        "schema": parts.get("dbname"),
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None})
