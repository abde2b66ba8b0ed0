"""The steps and undos of a demo DAG, run in processes that are killed: the DAG file itself, without an Airflow.

Run as a program it loads one DAG file (which takes a second or more, most of it Airflow's), then forks a process for
each scenario it reads from its standard input. It says which process that is, and how it ended.

What a scenario tells of is wrapped in that process alone: functions to count (each call is written down before it
begins), and one function before or after whose n-th call the process kills itself, or in front of which it waits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
import uuid
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from airflow_saga.core.records import Attempt
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.secrecy import KnownSecrets
from airflow_saga.runtime.step import StepRun
from airflow_saga.runtime.undo import StepUndo
from airflow_saga.store.connect import Address
from tests.runtime.lab import LIMITS, TaskPlace

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 60
"""How long a process waits to be killed."""
NO_SECRETS = KnownSecrets(lambda: [])

Scenario = dict[str, Any]


# -- for tests -------------------------------------------------------------------------------------------------------


class Child:
    """One process; whatever is asked of it waits for its end."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self._said: dict[str, Any] | None = None
        self.pid = pid

    def wait(self) -> dict[str, Any]:
        """``exit``, and of one that lived to tell ``output``, or ``problem``."""
        if self._said is None:
            self._said = self._nursery.listen()
        return self._said

    @property
    def killed(self) -> bool:
        return bool(self.wait()["exit"] == -signal.SIGKILL)

    @property
    def output(self) -> Any:
        said = self.wait()
        assert "output" in said, said.get("traceback", said)
        return said["output"]

    def kill(self) -> None:
        if self._said is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """A DAG file's processes, one at a time.

    :param dag_file: its name in ``dags``, without ``.py``.
    :param environment: of all of them.
    """

    def __init__(self, dag_file: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.demo.nursery", dag_file],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._newest: Child | None = None

    def start(self, do: str, **scenario: Any) -> Child:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "limits": vars(LIMITS), **scenario}) + "\n")
        self._process.stdin.flush()
        self._newest = Child(self, self.listen()["pid"])
        return self._newest

    def listen(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the nursery ended with {self._process.wait()}"
        return dict(json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._newest is not None:
            self._newest.kill()  # one that waits for a test that has failed meanwhile
        self._process.wait(20)


# -- in the processes ------------------------------------------------------------------------------------------------


def _step(dag: Any, scenario: Scenario, address: Address) -> Any:
    ids = (dag.dag_id, scenario["run_id"], scenario["task_id"])
    number = scenario["try_number"]
    # As Airflow has it of a task with two retries that was cleared after each of its tries.
    attempt = Attempt(*ids, -1, uuid.uuid4(), number, number + 1, retries=2, clear_number=number - 1)
    run = StepRun(attempt, address, TaskPlace(), Limits(**scenario["limits"]), NO_SECRETS)
    body = dag.get_task(scenario["task_id"]).python_callable
    return run.run(lambda saga: body(saga=saga, **scenario["arguments"])).output


def _undo(dag: Any, scenario: Scenario, address: Address) -> Any:
    request, owner = uuid.UUID(scenario["request_uuid"]), "undo1"
    limits = Limits(**scenario["limits"])
    return vars(StepUndo(address, request, owner, scenario["task_id"], -1, limits, NO_SECRETS).run())


def _wrap(place: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """:param place: ``module.function``, of the support of the demos."""
    module_name, _, name = place.rpartition(".")
    module = import_module(f"support.{module_name}")
    setattr(module, name, wrapper(getattr(module, name)))


def _counted(place: str, path: str) -> Callable[..., Any]:
    def wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with Path(path).open("a") as file:
                file.write(json.dumps({"place": place, "key": kwargs.get("key")}) + "\n")
            return function(*args, **kwargs)

        return wrapped

    return wrapper


def _deadly(when: str, nth: int) -> Callable[..., Any]:
    """``when``: ``before`` or ``after`` its n-th call, or ``wait`` in front of it for whoever comes to kill."""

    def wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if calls == nth and when == "wait":
                threading.Event().wait(MOST_SECONDS)
            result = function(*args, **kwargs)
            if calls == nth and when == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    return wrapper


def _carry_out(dag: Any, scenario: Scenario) -> dict[str, Any]:
    if (die := scenario.get("die")) is not None:
        _wrap(die["at"], _deadly(die["when"], die["nth"]))
    for place in scenario.get("count", []):
        _wrap(place, _counted(place, scenario["calls"]))
    try:
        deed = {"step": _step, "undo": _undo}[scenario["do"]]
        return {"output": deed(dag, scenario, Address(scenario["database_url"]))}
    except BaseException as problem:  # noqa: BLE001 - told to the test, which decides
        return {"problem": f"{type(problem).__name__}: {problem}", "traceback": traceback.format_exc()}


def _fork(dag: Any, scenario: Scenario) -> None:
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(2, 1)  # standard output is for the nursery's own words
        os.write(told, json.dumps(_carry_out(dag, scenario), default=str).encode())
        os._exit(0)
    os.close(told)
    _say(pid=pid)
    with os.fdopen(heard, "rb") as report:
        said = report.read()
    _say(exit=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), **(json.loads(said) if said else {}))


def _say(**message: Any) -> None:
    sys.__stdout__.write(json.dumps(message) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "dags"))
    dag = import_module(sys.argv[1]).dag
    for line in sys.stdin:
        _fork(dag, json.loads(line))
