"""Everything the three runs need, started together: Postgres, the travel service, and a real `airflow standalone`.

It owns one temporary directory that holds all of it. The invariant: no process and no file outlives the demo unless it
was told to leave them, and each wait ends: at its deadline, when a process that it waits for has died, or when stopped.
"""

from __future__ import annotations

import base64
import json
import os
import random
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import psycopg

from .demo_clients import AirflowApi, ModelService, TravelService
from .demo_postgres import Postgres, server_account, socket_fits
from .demo_processes import LOGS, DemoProblem, Keeper, noted

T = TypeVar("T")

DAGS = Path(__file__).resolve().parent.parent
DAG_IDS = frozenset(
    {
        "book_trip",
        "book_trip__compensation",
        "refund_later",
        "refund_later__compensation",
        "saga_reconciler",
    }
)
AGENT_DAG_IDS = frozenset({"concierge_agent", "concierge_agent__compensation"})
METADATA, STORE = "airflow", "saga"
"""The two databases: Airflow's own, and the saga store."""
# Below the range that Linux hands out to outgoing connections.
PORTS = range(20_000, 32_000)
START_SECONDS = 240.0
COMMAND_SECONDS = 120.0
POLL_SECONDS = 0.1
TAIL_LINES = 25
TAIL_CHARACTERS = 250

# What is quick here and slow in production is how soon Airflow looks again, never what it then does.
SETTINGS = {
    "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
    "AIRFLOW__CORE__PARALLELISM": "4",
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
    "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    "AIRFLOW__CORE__AUTH_MANAGER": "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager",
    "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
    "AIRFLOW__API__HOST": "127.0.0.1",
    "AIRFLOW__API__WORKERS": "1",
    "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
    "AIRFLOW__LOGGING__COLORED_CONSOLE_LOG": "False",
    "AIRFLOW__SCHEDULER__ENABLE_HEALTH_CHECK": "False",
    # How soon a task learns that it was marked failed, and the end of a task's process is seen.
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
    # How soon the next task of a run is seen: a second of each hop in a default installation.
    "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.25",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "120",
    "SAGA_RECONCILE_EVERY_SECONDS": "10",
    "NO_COLOR": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    "PYTHONIOENCODING": "utf-8",
}


_COMMAND = """\
#!/bin/sh
unset {unset}
{exports}
case "$1" in
scheduler)
    tries={tries}
    until [ -e {api_is_up} ] || [ $tries = 0 ]; do sleep 0.2; tries=$((tries - 1)); done
    exec {airflow} "$@" --skip-serve-logs ;;
triggerer) exec {airflow} "$@" --skip-serve-logs ;;
esac
exec {airflow} "$@"
"""


class InVain(DemoProblem):
    """What was waited for did not happen in time."""


class Stopped(Exception):
    """Somebody wants the demo to end."""


class Stack:
    """All of it. `start` first; then `api`, `travel`, `connect` and `command`; `close` or `leave` at the end.

    :param say: told in one line what was reached.
    :param agent: with a scripted model, for the DAG with an agent.
    """

    def __init__(self, say: Callable[[str], None], *, agent: bool = False) -> None:
        self._say = say
        self._dag_ids = DAG_IDS | AGENT_DAG_IDS if agent else DAG_IDS
        self._agent = agent
        self._model: ModelService | None = None
        self.stopped = threading.Event()
        self.directory = _directory()
        self._keeper = Keeper(self.directory)
        self.logs = self.directory / LOGS
        self.home = self.directory / "airflow"
        for made in (self.logs, self.home):
            made.mkdir(mode=0o700)
        self._airflow = self.directory / "bin" / "airflow"
        self._api_is_up = self.directory / "api-is-up"
        self.airflow_log = self.logs / "airflow.log"
        self.url = f"http://127.0.0.1:{_free_port()}"
        self.api = AirflowApi(self.url)
        self._postgres = Postgres(self.directory, self.logs / "postgres.log")
        self._standalone: subprocess.Popen[bytes] | None = None
        self._servers: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
        """What may not end before the demo does, by name, with its log."""
        self._travel: TravelService | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything and wait until runs can be started.

        :raises DemoProblem: something did not come up in time, or died.
        """
        postgres_log = self.logs / "postgres.log"
        try:
            travel = self._start_service("travel_service", "--ledger", str(self.directory / "ledger.jsonl"))
            self._travel = TravelService(travel)
            if self._agent:
                self._model = ModelService(self._start_service("model_service"))
            self._servers["Postgres"] = self._postgres.start(METADATA, STORE), postgres_log
        except PermissionError as problem:
            raise DemoProblem(
                f"{problem}: programs may not be run in {self.directory}; set TMPDIR to where they may"
            ) from problem
        self._say("Postgres is up, with a database for Airflow and one for the sagas")
        self._write_command(self._environment(travel))
        self._standalone = self._popen([str(self._airflow), "standalone"], self.airflow_log)
        self._servers["`airflow standalone`"] = self._standalone, self.airflow_log
        migrate = self._popen([str(self._airflow), "saga", "db", "migrate"], self.logs / "migrate.log")
        self._wait_migrated(migrate)
        self._say("airflow saga db migrate: the saga store has its tables")
        log = self.airflow_log
        self.wait_for(self._answers, START_SECONDS, "Airflow's API server answers", log)
        self._api_is_up.touch()
        self.wait_for(self._schedules, START_SECONDS, "Airflow's scheduler is at work", log)
        self.wait_for(
            self._knows_dags, START_SECONDS, f"Airflow knows the DAGs {', '.join(sorted(self._dag_ids))}", log
        )
        self._say("airflow standalone is up and has read the DAGs")

    def close(self, *, keep_logs: bool = False) -> bool:
        """End and remove everything, but for the logs if they are to be kept; False if that failed."""
        self.stopped.set()
        self.api.close()
        for client in (self._travel, self._model):
            if client is not None:
                client.close()
        return self._keeper.end_all(keep_logs=keep_logs)

    def leave(self) -> None:
        """Let everything run on after the demo has ended."""
        self._keeper.leave_all()

    # -- for the runs -----------------------------------------------------------------------------------------------

    @property
    def travel(self) -> TravelService:
        assert self._travel is not None, "not started"
        return self._travel

    @property
    def model(self) -> ModelService:
        assert self._model is not None, "not started"
        return self._model

    @property
    def airflow_command(self) -> Path:
        """Airflow's command with the settings of this demo: for people, and for `airflow standalone` itself."""
        return self._airflow

    def connect(self) -> psycopg.Connection[Any]:
        """A connection to the saga store, to look at it."""
        return self._postgres.connect(STORE)

    def command(self, *arguments: str) -> str:
        """Run `airflow …` and return what it printed.

        :raises DemoProblem: it did not end well; holds what it said.
        """
        log = self.logs / "commands.log"
        with log.open("ab") as errors:
            process = subprocess.Popen(
                noted(self.directory, [str(self._airflow), *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self.home,
                start_new_session=True,
            )
        try:
            printed, _ = process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
        if process.returncode != 0:
            raise DemoProblem(
                f"`airflow {shlex.join(arguments)}` ended with {process.returncode}", log, self.airflow_log
            )
        return printed.decode()

    def wait_for(self, look: Callable[[], T], seconds: float, what: str, *logs: Path) -> T:
        """Look again and again until something true comes back, and return that.

        :raises InVain: the time is over; says what was last seen.
        :raises DemoProblem: a process has died meanwhile.
        :raises Stopped: the demo is to end.
        """
        deadline = time.monotonic() + seconds
        seen: object = None
        while True:
            if self.stopped.is_set():
                raise Stopped
            try:
                seen = look()
            except (httpx.HTTPError, psycopg.OperationalError) as problem:
                seen = f"{type(problem).__name__}: {problem}"
            else:
                if seen:
                    return seen
            self._check_alive()
            if time.monotonic() > deadline:
                raise InVain(f"waited {seconds:g} s in vain until {what}; last seen: {seen!r}", *logs)
            self.stopped.wait(POLL_SECONDS)

    def task_logs(self, *run_ids: str) -> list[Path]:
        """The logs of the tasks of these runs, the one written last at the end."""
        found = [
            path for run_id in run_ids for path in (self.logs / "tasks").glob(f"*/run_id={run_id}/**/*.log")
        ]
        return sorted(found, key=lambda path: path.stat().st_mtime)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _start_service(self, name: str, *arguments: str) -> str:
        """One of the services of the outside world, as a process of its own; its address."""
        ready, log = self.directory / f"{name}.json", self.logs / f"{name}.log"
        program = [sys.executable, str(DAGS / "support" / f"{name}.py"), "--ready-file", str(ready)]
        process = self._popen([*program, *arguments], log)
        what = f"the {name.replace('_', ' ')} is up"
        self.wait_for(lambda: ready.exists() or process.poll() is not None, 30, what, log)
        if not ready.exists():
            raise DemoProblem(f"the {name.replace('_', ' ')} ended with {process.returncode}", log)
        return str(json.loads(ready.read_text())["url"])

    def _wait_migrated(self, process: subprocess.Popen[bytes]) -> None:
        log = self.logs / "migrate.log"
        self.wait_for(lambda: process.poll() is not None, COMMAND_SECONDS, "the saga store is migrated", log)
        if process.returncode != 0:
            raise DemoProblem(f"`airflow saga db migrate` ended with {process.returncode}", log)

    def _answers(self) -> bool:
        return self.api.answers_tasks()

    def _schedules(self) -> bool:
        return "scheduler" in self.api.healthy()

    def _knows_dags(self) -> bool:
        if errors := self.api.import_errors():
            raise DemoProblem("Airflow cannot load the DAGs:\n" + "\n".join(errors))
        return self.api.dag_ids() >= self._dag_ids

    def _check_alive(self) -> None:
        """`airflow standalone` itself does not notice that one of its components has died."""
        for name, (process, log) in self._servers.items():
            if process.poll() is not None:
                raise DemoProblem(f"{name} ended by itself, with {process.returncode}", log)
        if self._standalone is None:
            return
        with suppress(psutil.Error):
            for component in psutil.Process(self._standalone.pid).children():
                if component.status() == psutil.STATUS_ZOMBIE:
                    raise DemoProblem("a component of `airflow standalone` died", self.airflow_log)

    def _popen(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                noted(self.directory, command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self.home,
                start_new_session=True,
            )

    def _environment(self, travel_url: str) -> dict[str, str]:
        sockets = self._postgres.socket_directory
        store = {"conn_type": "postgres", "host": str(sockets), "login": "postgres", "schema": STORE}
        return SETTINGS | {
            "PATH": os.pathsep.join(
                [str(self._airflow.parent), str(_airflow().parent), os.environ.get("PATH", "")]
            ),
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2://postgres@/{METADATA}?host={sockets}",
            "AIRFLOW_CONN_SAGA_DEFAULT": json.dumps(store),
            "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(self.logs / "tasks"),
            "AIRFLOW__CORE__FERNET_KEY": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__API__PORT": self.url.rpartition(":")[2],
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(32),
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(64),
            "TRAVEL_URL": travel_url,
            **self._llm(),
        }

    def _llm(self) -> dict[str, str]:
        """Where the agent's model is. A real one is a connection away: any server that speaks the OpenAI protocol."""
        if self._model is None:
            return {}
        connection = {"conn_type": "pydanticai", "host": f"{self._model.url}/v1", "password": "none"}
        return {"AIRFLOW_CONN_CONCIERGE_LLM": json.dumps(connection)}

    def _write_command(self, environment: dict[str, str]) -> None:
        """An `airflow` with the settings in it, that `airflow standalone` finds as well when it starts its components.

        Two of them would offer their logs on every interface of the machine; the files are here, so they need not. And
        a scheduler that is up before the API server starts tasks that have nobody to talk to, which takes time.
        """
        # Without compiled files every process of Airflow compiles half a million lines anew.
        foreign = {name for name in os.environ if name.startswith(("AIRFLOW", "PYTHON", "VIRTUAL_ENV"))}
        text = _COMMAND.format(
            unset=" ".join(sorted(foreign | {"PYTHONDONTWRITEBYTECODE"})),
            exports="\n".join(
                f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())
            ),
            airflow=shlex.quote(str(_airflow())),
            api_is_up=shlex.quote(str(self._api_is_up)),
            tries=int(START_SECONDS / 0.2),
        )
        self._airflow.parent.mkdir(mode=0o700)
        self._airflow.write_text(text)
        self._airflow.chmod(0o700)


def tail(log: Path, lines: int = TAIL_LINES) -> Iterator[str]:
    """The end of a log; what tasks log as JSON is made readable."""
    if not log.exists():
        return
    for line in log.read_text(errors="replace").splitlines()[-lines:]:
        try:
            said = json.loads(line)
            problems = [f"{each['exc_type']}: {each['exc_value']}" for each in said.get("error_detail", [])]
            line = f"{said['timestamp']} {said['level']} {'; '.join([said['event'], *problems])}"
        except (ValueError, KeyError, TypeError):
            pass
        yield line if len(line) <= TAIL_CHARACTERS else f"{line[: TAIL_CHARACTERS - 1]}…"


def _airflow() -> Path:
    found = Path(sys.executable).parent / "airflow"
    if not found.exists():
        raise DemoProblem(f"there is no Airflow beside {sys.executable}; run: make install")
    return found


def _directory() -> Path:
    """A fresh temporary directory that the server's user can reach, with a path that is short enough for a socket."""
    account = server_account()
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):
        if account is not None and not _others_may_enter(Path(parent)):
            continue
        directory = Path(tempfile.mkdtemp(prefix="saga-demo-", dir=parent)).resolve()
        if not socket_fits(directory):
            directory.rmdir()
            continue
        if account is not None:
            directory.chmod(0o711)
        return directory
    raise DemoProblem(
        "no temporary directory fits: set TMPDIR to one with a short path that others may enter"
    )


def _others_may_enter(directory: Path) -> bool:
    directory = directory.resolve()
    return all(each.stat().st_mode & 0o001 for each in (directory, *directory.parents))


def _free_port() -> int:
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise DemoProblem(f"no free port among 100 tried in {PORTS}")
