"""Airflow's API server with FAB's auth manager, as a process of its own: ``python -m tests.airflow.fab READY_FILE``.

Everything that FAB needs is made in that process before it answers: its tables, its roles, users of each of them, and
three DAGs. The process ends when its standard input does, so also with the tests that started it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from httpx import Client, Response

from tests.airflow.conftest import DAGS

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
PASSWORD = "correct horse"
READS = ("can_read", "can_edit")
ROLES = {
    # As FAB's own documentation has it: the DAG by its name, the runs of whatever DAG one may see.
    "one_dag": [*((act, "DAG:book_trip") for act in READS), *((act, "DAG Runs") for act in READS)],
    # By the older way, in which the runs are named too.
    "its_runs": [*((act, "DAG:book_trip") for act in READS), *((act, "DAG Run:book_trip") for act in READS)],
    # Who sees both DAGs, but the runs of one only.
    "half": [("can_read", "DAG:book_trip"), ("can_read", "DAG Run:book_trip"), ("can_read", "DAG:no_saga")],
    # Who sees a DAG and no runs.
    "no_runs": [("can_read", "DAG:book_trip")],
}
USERS = {"viewer": "Viewer", "user": "User", "op": "Op", "admin": "Admin", **{name: name for name in ROLES}}
"""The name of each user, and the role."""


@dataclass
class FabAirflow:
    """The process, and what its users ask of it."""

    home: Path
    store_url: str
    _tokens: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        self.home.mkdir(parents=True)
        ready = self.home / "ready"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AIRFLOW")}
        self._log = (self.home / "server.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.airflow.fab", str(ready)],
            cwd=ROOT,
            env=environment | self._settings(),
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)
        self.client = Client(base_url=f"http://127.0.0.1:{ready.read_text()}", timeout=60)

    def _settings(self) -> dict[str, str]:
        manager = "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager"
        return {
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__AUTH_MANAGER": manager,
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__API_AUTH__JWT_SECRET": "a secret of the tests, which is long enough for HS512: 0123456789abcdef",
            "AIRFLOW_CONN_SAGA_DEFAULT": self.store_url,
            "_AIRFLOW_PROCESS_CONTEXT": "server",
        }

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)
        self._log.close()

    def log(self) -> str:
        return (self.home / "server.log").read_text(errors="replace")[-6000:]

    def token(self, user: str) -> str:
        """As FAB gives it to whoever brings name and password."""
        if user not in self._tokens:
            answer = self.client.post("/auth/token", json={"username": user, "password": PASSWORD})
            assert answer.status_code == 201, answer.text
            self._tokens[user] = answer.json()["access_token"]
        return self._tokens[user]

    def get(self, path: str, user: str) -> Response:
        return self.client.get(f"/saga{path}", headers={"authorization": f"Bearer {self.token(user)}"})

    def post(self, path: str, body: object, user: str) -> Response:
        headers = {"authorization": f"Bearer {self.token(user)}"}
        return self.client.post(f"/saga{path}", json=body, headers=headers)


# -- in the process ---------------------------------------------------------------------------------------------------


def main(ready: Path) -> None:
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    home = Path(os.environ["AIRFLOW_HOME"])
    (home / "dags").mkdir()
    (home / "dags" / "trips.py").write_text(DAGS)
    from airflow.cli.cli_parser import get_parser

    for arguments in (["db", "migrate"], ["dags", "reserialize"]):
        args = get_parser().parse_args(arguments)
        args.func(args)
    from airflow.api_fastapi.app import create_app

    app = create_app(apps="core")
    _make_users()
    _serve(app, ready)


def _end_with_standard_input() -> None:
    # Past Python's buffer, whose lock an interpreter that ends would wait for.
    os.read(0, 1)
    os._exit(0)


def _make_users() -> None:
    from airflow.api_fastapi.app import get_auth_manager

    manager = get_auth_manager()
    with manager.flask_app.app_context():
        security = manager.security_manager
        for name, permissions in ROLES.items():
            role = security.add_role(name)
            for action, resource in permissions:
                security.add_permission_to_role(role, security.create_permission(action, resource))
        for name, role in USERS.items():
            made = security.add_user(
                name, name, "Test", f"{name}@example.com", security.find_role(role), PASSWORD
            )
            assert made, name


def _serve(app: object, ready: Path) -> None:
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    written = ready.with_suffix(".new")
    written.write_text(json.dumps(listening.getsockname()[1]))
    written.rename(ready)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))  # type: ignore[arg-type]
    server.run(sockets=[listening])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
