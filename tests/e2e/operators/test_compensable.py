"""Operators of other providers as steps: done and undone as they are, whatever ends them."""

from __future__ import annotations

import signal
from contextlib import suppress

import psutil
import pytest

from tests.e2e.operators.conftest import Services
from tests.e2e.scene import SOON, Scene, Trip
from tests.support import processes


def _start(scene: Scene, dag_id: str, **conf: object) -> Trip:
    trip = scene.trip(dag_id)
    scene.airflow.trigger(dag_id, {"trip": {"id": trip.run_id}, **conf}, trip.run_id)
    return trip


def _stands(trip: Trip, services: Services) -> tuple[int, int, int, int]:
    bucket = f"b-{trip.run_id[-6:]}"
    files = services.files(trip.run_id)
    return (
        len(files),
        trip.net.of("flights"),
        services.buckets().count(bucket),
        services.orders(trip.run_id),
    )


def test_operators_of_four_providers_run_and_are_undone_in_reverse_by_functions_and_operators(
    scene: Scene, services: Services
) -> None:
    good, bad = _start(scene, "providers"), _start(scene, "providers", fail=True)

    good.must_be_completed(calls=1)
    assert _stands(good, services) == (1, 1, 1, 1)
    assert good.action("providers.flight").state == "DONE"
    bad.must_be_undone(calls=1)
    assert _stands(bad, services) == (0, 0, 0, 0)
    undone = sorted(bad.actions(), key=lambda action: action.undo_begun_at or action.begun_at)
    names = [action.name for action in undone]
    assert names == [f"providers.{task}" for task in ("order", "bucket", "flight", "file")]
    # What an operator says that a compensation gave back is in the undo's log, and its templates see the forward run.
    log = scene.airflow.logs(bad.undo_dag_id, bad.undo_run_id, "undo.file")
    assert "the compensation of providers.file is BashOperator: what follows is its log" in log
    assert f'rm "{services.place}/{bad.run_id}"' in log
    assert "removed for file" in log


def test_mapped_operator_is_undone_index_by_index(scene: Scene) -> None:
    trip = _start(scene, "fleet", fail=True)

    trip.must_be_undone(calls=3)

    steps = [trip.step("flight", index) for index in range(3)]
    assert [step.state for step in steps] == ["UNDONE"] * 3
    assert len({step.item_fingerprint for step in steps} - {None}) == 3


def test_cancel_waits_for_the_operator_that_runs_and_undoes_what_it_did(
    scene: Scene, services: Services
) -> None:
    trip = scene.trip("providers")
    trip.tell("hold", "flights")
    scene.airflow.trigger("providers", {"trip": {"id": trip.run_id}}, trip.run_id)
    trip.await_calls("flights")

    scene.airflow.cli("saga", "cancel", trip.dag_id, trip.run_id)

    assert trip.action("providers.flight").state == "PENDING"
    trip.release("flights")
    trip.must_be_undone(calls=1)
    assert not trip.action("providers.flight").in_doubt
    assert _stands(trip, services) == (0, 0, 0, 0)


@pytest.mark.parametrize("how", ["marked failed", "stopped now", "lost"])
def test_operator_ended_in_the_middle_is_in_doubt_asked_about_and_undone(
    scene: Scene, services: Services, how: str
) -> None:
    trip = _start(scene, "slow")
    trip.wait(lambda: services.files(trip.run_id) or None, SOON, "the script has begun")
    attempt = trip.process("script")

    if how == "marked failed":
        trip.mark_failed()
    elif how == "stopped now":
        scene.airflow.cli("saga", "cancel", trip.dag_id, trip.run_id, "--now")
    else:
        attempt.kill(signal.SIGKILL)

    trip.must_be_undone()
    assert trip.action("slow.script").note == "was in doubt, found done"
    if how != "lost":  # else nobody is left to end the script
        assert services.files(trip.run_id) == []
        assert not [command for command in _scripts(scene) if trip.run_id in command]


def _scripts(scene: Scene) -> list[str]:
    """The shell scripts that run somewhere below this Airflow."""
    found = []
    for process in processes.owned_by(scene.airflow.home, scene.airflow._sessions):
        with suppress(psutil.NoSuchProcess):
            found.append(" ".join(process.cmdline()))
    return [command for command in found if "sleep 15" in command]
