"""The harness itself: that the Airflow it starts is a real one, and that it can do to it what the other tests need."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.support import processes
from tests.support.airflow import ComponentDiedError, RunningAirflow
from tests.support.airflow_factory import FreshAirflows


def test_plain_dag_runs_to_success(airflow: RunningAirflow) -> None:
    run_id = airflow.trigger("harness_plain", {"number": 4})

    assert airflow.wait_run("harness_plain", run_id) == "success"

    assert airflow.task_states("harness_plain", run_id) == {
        "one": "success",
        "double[0]": "success",
        "double[1]": "success",
    }
    assert airflow.xcom("harness_plain", run_id, "double", map_index=0) == 8
    assert "Returned value was: 8" in airflow.logs("harness_plain", run_id, "double", map_index=0)
    assert airflow.grep_logs(r"DagRun Finished.*harness_plain", "scheduler")
    assert [run["dag_run_id"] for run in airflow.runs("harness_plain")] == [run_id]


def test_running_task_marked_failed_is_terminated(airflow: RunningAirflow) -> None:
    run_id = airflow.trigger("harness_long")
    attempt = airflow.task_process("harness_long", run_id, "long")

    airflow.patch_task("harness_long", run_id, "long", "failed")

    assert airflow.wait_run("harness_long", run_id, timeout=30) == "failed"
    attempt.wait_gone(timeout=30)


def test_supervisor_killed_leaves_an_orphan_that_can_be_killed(airflow: RunningAirflow) -> None:
    run_id = airflow.trigger("harness_long")
    # A task that has not begun needs its supervisor to get there, and dies of its loss.
    airflow.wait_log("harness_long", run_id, "long", "begun")
    attempt = airflow.task_process("harness_long", run_id, "long")

    attempt.kill_supervisor(signal.SIGKILL)

    processes.wait_gone([attempt.supervisor], timeout=10)
    orphan = airflow.task_process("harness_long", run_id, "long")
    assert (orphan.pid, orphan.supervisor) == (attempt.pid, None)
    assert airflow.wait_run("harness_long", run_id, timeout=60) == "failed"
    assert orphan.alive
    orphan.kill()
    orphan.wait_gone(timeout=10)


def test_task_process_killed_fails_the_task(airflow: RunningAirflow) -> None:
    run_id = airflow.trigger("harness_long")
    attempt = airflow.task_process("harness_long", run_id, "long")

    attempt.kill()

    attempt.wait_gone(timeout=10)
    assert airflow.wait_run("harness_long", run_id, timeout=30) == "failed"


def test_nothing_listens_beyond_loopback(airflow: RunningAirflow) -> None:
    listening = {
        connection.laddr
        for process in processes.owned_by(airflow.home)
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }

    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert airflow.port in {address.port for address in listening}


@pytest.mark.slow
def test_scheduler_killed_and_restarted_goes_on_until_all_is_stopped(fresh_airflow: FreshAirflows) -> None:
    airflow = fresh_airflow()
    run_id = airflow.trigger("harness_long")
    airflow.wait_log("harness_long", run_id, "long", "begun")
    first = airflow.task_process("harness_long", run_id, "long")

    airflow.kill("scheduler", signal.SIGKILL)
    assert first.alive
    airflow.restart("scheduler")

    second = airflow.wait_for(
        lambda: next((each for each in airflow.task_processes() if each.ti_id != first.ti_id), None),
        timeout=60,
        what="the new scheduler starts a second attempt",
    )
    first.wait_gone(timeout=30)
    assert airflow.run_state("harness_long", run_id) == "running"
    second.kill_supervisor()
    before = processes.owned_by(airflow.home)

    airflow.stop()

    assert second.task in before
    assert not any(processes.alive(each) for each in before)
    assert processes.owned_by(airflow.home) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", airflow.port), timeout=5)


def test_component_that_dies_ends_a_wait_at_once(tmp_path: Path) -> None:
    broken = tmp_path / "bin" / "airflow"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho it is broken; exit 3\n")
    broken.chmod(0o755)
    airflow = RunningAirflow(
        broken.parent / "python", tmp_path / "home", metadata_url="postgresql://nowhere/db"
    )

    with pytest.raises(ComponentDiedError, match=r"(?s)ended with 3 by itself.*it is broken"):
        airflow.start()


def test_janitor_kills_what_a_killed_test_run_leaves(tmp_path: Path) -> None:
    forgotten = psutil.Popen(["sleep", "600"], cwd=tmp_path, start_new_session=True)
    janitor = processes.start_janitor(tmp_path)
    assert processes.alive(forgotten)

    janitor.stdin.close()

    assert janitor.wait(timeout=30) == 0
    assert forgotten.wait(timeout=10) == -signal.SIGKILL
