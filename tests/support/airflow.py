"""A real Airflow for a test: API server, scheduler, dag processor and triggerer, as four processes of their own.

It owns one home directory (DAG files, logs) and every process that comes out of the four. The invariants: nothing of it
listens anywhere but on loopback; no process outlives it, whatever ends the tests; and a component that dies without
having been killed through here ends every wait at once.

Stopping does not ask: a scheduler that is asked waits for its tasks, and what Airflow would still write is thrown away.
"""

from __future__ import annotations

import base64
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx

from tests.support import processes
from tests.support.airflow_api import AirflowApi, AirflowApiError, NotInTimeError
from tests.support.airflow_logs import TAIL_LINES, readable, tail
from tests.support.airflow_setup import SETTINGS, base_environment, connection_json, run_airflow
from tests.support.ports import free_port
from tests.support.processes import TaskProcess

# Neither serves logs: their servers listen on every interface, and the files are here.
COMPONENTS: dict[str, tuple[str, ...]] = {
    "api-server": ("api-server",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}
_JOBS = {"scheduler": "SchedulerJob", "dag-processor": "DagProcessorJob", "triggerer": "TriggererJob"}
_ENDING = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}

START_SECONDS = 120.0


@dataclass
class Component:
    """One of the four: its process now, and whether it is meant to be down."""

    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    expected_down: bool = False

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def __str__(self) -> str:
        if self.process is None:
            return f"{self.name} was never started"
        code = self.process.poll()
        return f"{self.name} (pid {self.process.pid}) {'runs' if code is None else f'ended with {code}'}"


class RunningAirflow(AirflowApi):
    """One Airflow: `with RunningAirflow(python, home, metadata_url=…) as airflow: airflow.trigger("my_dag")`.

    :param python: the interpreter of an environment with Airflow in it.
    :param home: a directory of its own, made if it is not there.
    :param metadata_url: a database that :func:`migrate_metadata` made, or a copy of it.
    :param store_url: the database of the sagas, migrated; Airflow reaches it as the connection `saga_default`.
    :param store_in_metadata: keep that connection in Airflow's metadata instead of in the environment.
    :param dags: DAG files, and directories whose whole content is taken; copied.
    :param env: more environment, for all components; wins over what is set here.
    """

    def __init__(
        self,
        python: Path | str,
        home: Path,
        *,
        metadata_url: str,
        store_url: str | None = None,
        store_in_metadata: bool = False,
        dags: Iterable[Path] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        super().__init__(f"http://127.0.0.1:{self.port}")
        self.home = home.resolve()
        self.dags_folder = self.home / "dags"
        self.task_logs = self.home / "logs"
        self.component_logs = self.home / "components"
        for directory in (self.dags_folder, self.task_logs, self.component_logs):
            directory.mkdir(parents=True, exist_ok=True)
        self.store_url = store_url
        self._store_in_metadata = store_in_metadata
        self._bin = Path(python).parent
        self.env = self._environment(metadata_url, dict(env or {}))
        self.components = {name: Component(name, self.component_logs / f"{name}.log") for name in COMPONENTS}
        self._sessions: set[int] = set()
        self._janitor: subprocess.Popen[bytes] | None = None
        self.add_dags(*dags)

    def _environment(self, metadata_url: str, more: dict[str, str]) -> dict[str, str]:
        env = base_environment(self._bin, self.home, metadata_url)
        env |= SETTINGS
        env |= {
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.dags_folder),
            "AIRFLOW__CORE__FERNET_KEY": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.api_url}/execution/",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__BASE_URL": self.api_url,
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(32),
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(64),
        }
        if self.store_url is not None and not self._store_in_metadata:
            env["AIRFLOW_CONN_SAGA_DEFAULT"] = connection_json(self.store_url)
        return env | more

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all components and wait until Airflow calls each of them healthy."""
        self._janitor = processes.start_janitor(self.home)
        try:
            if self.store_url is not None and self._store_in_metadata:
                connection = connection_json(self.store_url)
                self.cli("connections", "add", "saga_default", "--conn-json", connection)
            for component in self.components.values():
                self._start(component)
            self.wait_healthy()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill every process of this Airflow and collect it; raises AssertionError if one is left."""
        try:
            processes.reap(self.home, self._sessions)
            for component in self.components.values():
                if component.process is not None:
                    component.process.wait(timeout=processes.REAP_SECONDS)
                component.expected_down = True
        finally:
            self.close_connections()
            if self._janitor is not None and self._janitor.stdin is not None:
                self._janitor.stdin.close()
                self._janitor.wait(timeout=processes.REAP_SECONDS)
                self._janitor = None

    def __enter__(self) -> RunningAirflow:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def wait_healthy(self, timeout: float = START_SECONDS) -> None:
        """Wait until all four are there and Airflow itself says so."""

        def healthy() -> bool:
            return all(self._is_up(component) for component in self.components.values())

        try:
            self.wait_for(healthy, timeout, "all components are healthy")
        except NotInTimeError as late:
            states = ", ".join(str(component) for component in self.components.values())
            tails = "\n".join(f"--- {name}\n{text}" for name, text in self._component_tails())
            raise NotInTimeError(f"{late}\n{states}\n{tails}") from None

    def _start(self, component: Component) -> None:
        with component.log.open("ab") as log:
            component.started = datetime.now(UTC)
            component.process = subprocess.Popen(
                [str(self._bin / "airflow"), *COMPONENTS[component.name]],
                env=self.env,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        component.expected_down = False
        self._sessions.add(component.process.pid)

    def _is_up(self, component: Component) -> bool:
        """Whether this start of it is at work: what Airflow calls healthy may still be the one before."""
        if component.name not in _JOBS:
            return self.answers_tasks()
        jobs = self.request("GET", "/jobs", job_type=_JOBS[component.name], is_alive=True)["jobs"]
        return any(datetime.fromisoformat(job["start_date"]) > component.started for job in jobs)

    def check(self) -> None:
        """Fail a wait at once when a component has died that nobody here has killed."""
        for component in self.components.values():
            if not component.running and not component.expected_down:
                component.expected_down = True
                raise ComponentDiedError(f"{component} by itself. The end of its log:\n{tail(component.log)}")

    def kill(self, component: str, signum: int = signal.SIGKILL) -> None:
        """Signal a component's own process, not its children; after SIGKILL it is gone when this returns."""
        target = self.components[component]
        if target.process is None:
            raise ProcessLookupError(f"{target}")
        if signum in _ENDING:
            target.expected_down = True
        target.process.send_signal(signum)
        if signum == signal.SIGKILL:
            target.process.wait(timeout=processes.REAP_SECONDS)

    def restart(self, component: str, timeout: float = START_SECONDS) -> None:
        """Start a component again, after killing it if it still runs, and wait until it is at work."""
        target = self.components[component]
        if target.running:
            self.kill(component)
        self._start(target)
        self.wait_for(lambda: self._is_up(target), timeout, f"{component} is back")

    # -- DAG files and commands --------------------------------------------------------------------------------------

    def add_dags(self, *paths: Path) -> None:
        """Copy DAG files, or all that is in a directory, to where Airflow looks; it sees them within seconds."""
        for path in paths:
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, self.dags_folder, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy2(path, self.dags_folder)

    def cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `airflow …` in the same environment and return what it printed.

        :raises AssertionError: when it ends with another code than 0, unless `check` is off.
        """
        return run_airflow(self._bin, self.env, self.home, *arguments, check=check)

    # -- processes of tasks ------------------------------------------------------------------------------------------

    def task_processes(self) -> list[TaskProcess]:
        """Every attempt of any task that is at work now, orphans too."""
        return list(processes.task_processes(processes.owned_by(self.home, self._sessions)))

    def task_process(
        self, dag_id: str, run_id: str, task_id: str, map_index: int = -1, timeout: float = 60
    ) -> TaskProcess:
        """Wait until the newest attempt of a task has a process and return it. The operator may not have begun yet."""

        def find() -> TaskProcess | None:
            instance = self.task_instance(dag_id, run_id, task_id, map_index)
            return next((each for each in self.task_processes() if each.ti_id == instance["id"]), None)

        return self.wait_for(find, timeout, f"a process of {task_id}[{map_index}] in {run_id} of {dag_id}")

    def task_pid(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> int:
        return self.task_process(dag_id, run_id, task_id, map_index).pid

    # -- logs --------------------------------------------------------------------------------------------------------

    def logs(
        self, dag_id: str, run_id: str, task_id: str, try_number: int | None = None, map_index: int = -1
    ) -> str:
        """The log of one try of a task, or of all of them, as text for people; empty if there is none yet."""
        folder = self.task_logs / f"dag_id={dag_id}" / f"run_id={run_id}" / f"task_id={task_id}"
        if map_index != -1:
            folder /= f"map_index={map_index}"
        pattern = f"attempt={'*' if try_number is None else try_number}.log"
        return "\n".join("\n".join(readable(path)) for path in sorted(folder.glob(pattern)))

    def wait_log(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        pattern: str,
        timeout: float = 60,
        map_index: int = -1,
    ) -> str:
        """Wait until a regular expression is found in the log of a task, of any try, and return the log."""

        def found() -> str | None:
            text = self.logs(dag_id, run_id, task_id, map_index=map_index)
            return text if re.search(pattern, text) else None

        return self.wait_for(found, timeout, f"{pattern!r} in the log of {task_id} in {run_id} of {dag_id}")

    def grep_logs(self, pattern: str, component: str | None = None) -> list[str]:
        """The lines of the components' logs (or of one) that a regular expression is found in.

        What LocalExecutor's tasks log is in the scheduler's too.
        """
        names = list(self.components) if component is None else [component]
        return [
            f"{name}: {line}"
            for name in names
            if self.components[name].log.exists()
            for line in self.components[name].log.read_text(errors="replace").splitlines()
            if re.search(pattern, line)
        ]

    def report(self, since: float) -> Iterator[tuple[str, str]]:
        """What there is to know about a failure, as (title, text): runs, the components' logs, the tasks' logs.

        :param since: seconds since the epoch; what was finished or last written before is left out.
        """
        yield "airflow", f"{self.home}\n" + "\n".join(str(each) for each in self.components.values())
        try:
            yield "dag runs", "\n".join(self._runs_since(datetime.fromtimestamp(since, UTC))) or "none"
            yield from ((f"import error {name}", trace) for name, trace in self.import_errors().items())
        except (AirflowApiError, httpx.HTTPError, RuntimeError) as error:
            yield "dag runs", f"the API server does not tell: {error!r}"
        yield from self._component_tails()
        written = [path for path in self.task_logs.glob("dag_id=*/**/*.log") if path.stat().st_mtime >= since]
        for path in sorted(written, key=lambda each: each.stat().st_mtime)[-20:]:
            yield str(path.relative_to(self.task_logs)), "\n".join(readable(path)[-TAIL_LINES:])

    def _runs_since(self, since: datetime) -> Iterator[str]:
        for run in self.runs():
            ended = run["end_date"]
            if ended is None or datetime.fromisoformat(ended) >= since:
                dag_id, run_id = run["dag_id"], run["dag_run_id"]
                yield f"{dag_id} {run_id}: {run['state']} {self.task_states(dag_id, run_id)}"

    def _component_tails(self) -> Iterator[tuple[str, str]]:
        for component in self.components.values():
            yield f"{component.name} log", tail(component.log)


class ComponentDiedError(RuntimeError):
    """A component of Airflow ended though nobody asked it to; the text holds the end of its log."""
