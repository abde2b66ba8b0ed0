"""A run that is marked failed where no hook is called, and no process of the run lives to notice it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.scene import SOON, Scene, Stage
from tests.support.airflow_factory import FreshAirflows
from tests.support.world import World

WITHOUT_PLUGIN = Path(__file__).parent / "without_plugin"


@pytest.mark.slow
def test_run_marked_failed_between_its_tasks_is_undone_by_polling_whatever_the_policy(
    fresh_airflow: FreshAirflows, airflow_env: dict[str, str], world: World, request: pytest.FixtureRequest
) -> None:
    airflow = fresh_airflow(env={**airflow_env, "PYTHONPATH": str(WITHOUT_PLUGIN)})
    scene = Scene(Stage(airflow, world), request.node.nodeid)
    trip = scene.trip("keep")
    trip.tell("hold", "flights", times=1)
    trip.start(a=["flights"], b=["hotels"])
    trip.await_calls("flights")
    airflow.pause("keep")
    trip.release("flights")
    trip.wait_task("a", "success")

    trip.mark_failed()

    view = trip.wait_saga("CANCELLED", timeout=SOON)
    assert [(request.cause, request.state) for request in view.requests] == [("marked_failed", "SETTLED")]
    trip.must_be_net_zero()
    assert trip.task_state("b") == "skipped"
