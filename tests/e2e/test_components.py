"""Components killed and restarted, a store that goes away, a listener that nobody hears: in Airflows of their own."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.scene import SOON, Scene, Stage, Trip
from tests.support.airflow_factory import AirflowFactory
from tests.support.postgres import PostgresServer, available_servers
from tests.support.world import World

pytestmark = pytest.mark.slow
WITHOUT_PLUGIN = Path(__file__).parent / "without_plugin"
NEVER = {"SAGA_RECONCILE_EVERY_SECONDS": "86400"}


@pytest.fixture(scope="module")
def by_hooks(airflow_factory: AirflowFactory, airflow_env: dict[str, str], world: World) -> Iterator[Stage]:
    """Only the hooks tell of runs here, and the connection of the store is in Airflow's metadata."""
    with airflow_factory.create(env={**airflow_env, **NEVER}, store_in_metadata=True) as airflow:
        yield Stage(airflow, world)


@pytest.fixture(scope="module")
def store_server() -> Iterator[PostgresServer]:
    _, binaries = next(available_servers())
    with PostgresServer(binaries) as server:
        yield server


@pytest.fixture(scope="module")
def by_polling(
    airflow_factory: AirflowFactory, airflow_env: dict[str, str], world: World, store_server: PostgresServer
) -> Iterator[Stage]:
    """No hook is called here, only the reconciler looks; and the store is on a server of its own."""
    env = {**airflow_env, "PYTHONPATH": str(WITHOUT_PLUGIN)}
    with airflow_factory.create(env=env, store_server=store_server) as airflow:
        yield Stage(airflow, world)


@pytest.fixture
def hooked(request: pytest.FixtureRequest, by_hooks: Stage) -> Scene:
    return Scene(by_hooks, request.node.nodeid)


@pytest.fixture
def polled(request: pytest.FixtureRequest, by_polling: Stage) -> Scene:
    return Scene(by_polling, request.node.nodeid)


def test_c30_two_runs_that_fail_in_one_pass_of_the_scheduler_are_both_undone(hooked: Scene) -> None:
    airflow = hooked.airflow
    trips = [hooked.trip("line") for _ in range(2)]
    for trip in trips:
        trip.tell("hold", "hotels")
        trip.start(a=["flights"], b=["hotels", "raise"])
    for trip in trips:
        trip.await_calls("hotels")

    airflow.kill("scheduler", signal.SIGSTOP)
    for trip in trips:
        trip.release("hotels")
    for trip in trips:
        trip.wait_task("b", "failed")
        assert trip.run_state == "running"
    airflow.kill("scheduler", signal.SIGCONT)

    for trip in trips:
        view = trip.must_be_undone(calls=2)
        assert view.saga.cause == "failure"
    assert airflow.components["scheduler"].running
    assert airflow.grep_logs(r"UNEXPECTED COMMIT|DetachedInstanceError|Exception when executing") == []


def test_c86_scheduler_killed_starts_a_second_attempt_that_takes_over(hooked: Scene) -> None:
    airflow = hooked.airflow
    trip = hooked.trip("line")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["hotels", "cars"])
    trip.await_calls("hotels")
    first = trip.process("b")

    airflow.kill("scheduler", signal.SIGKILL)
    airflow.restart("scheduler")

    trip.wait(lambda: trip.step("b").fence > 1, SOON, "a second attempt has taken over")
    trip.must_be_completed(calls=3)
    first.wait_gone(SOON)
    assert (trip.step("b").fence, trip.action("hotels").tries) == (2, 1)
    assert trip.action("hotels").note == "verify: yes"


def test_c28_run_marked_failed_is_undone_by_polling_and_still_once_when_hooks_are_back(polled: Scene) -> None:
    trip = polled.trip("line")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["hotels", "cars"])
    trip.await_calls("hotels")
    other = polled.trip("line")
    other.tell("hold", "hotels")
    other.start(a=["flights"], b=["hotels", "cars"])
    other.await_calls("hotels")
    attempt = other.process("b")

    trip.mark_failed()
    attempt.kill(signal.SIGKILL)
    other.mark_failed()

    trip.must_be_undone(calls=2)
    other.must_be_undone(calls=2)
    seen = {row["kind"] for row in trip.read(lambda reader: reader.components())}
    assert not seen & {"api-server", "scheduler"}

    give_the_hooks_back(polled)
    trip.mark_failed()
    trip.wait(
        lambda: "api-server" in {row["kind"] for row in trip.read(lambda reader: reader.components())},
        SOON,
        "the API server has called a hook",
    )
    trip.must_be_undone(calls=2)


def give_the_hooks_back(scene: Scene) -> None:
    """The API server and the scheduler have the plugin from here on; the other two stay without it."""
    if scene.airflow.env.pop("PYTHONPATH", None) is not None:
        scene.airflow.restart("api-server")
        scene.airflow.restart("scheduler")


def test_c33_doctor_names_each_component_with_its_last_hook_and_those_without_the_plugin(
    polled: Scene,
) -> None:
    """C33 "Plugin loaded but the hook is never called". After C28, which wants an Airflow without any hook."""
    give_the_hooks_back(polled)
    trip = polled.trip("line").start(a=["flights"], b=["hotels"])
    trip.must_be_completed(calls=2)
    trip.mark_failed()
    trip.must_be_undone(calls=2)

    def found() -> dict[str, str] | None:
        said = polled.airflow.cli("saga", "doctor", "--output", "json", check=False).stdout
        messages = {each["check"]: each["message"] for each in json.loads(said)}
        hooked = all("last hook" in messages[kind] for kind in ("scheduler", "api-server"))
        return messages if hooked else None

    messages = trip.wait(found, SOON, "doctor has heard of a hook in both")
    assert "last hook on_dag_run_" in messages["scheduler"]
    assert "last hook on_dag_run_failed" in messages["api-server"]
    for kind in ("dag-processor", "triggerer"):
        assert messages[kind].startswith("the plugin was never seen in it")


@dataclass(frozen=True)
class Outage:
    """The trips that were under way when the store's server crashed, and are still when it is back."""

    calling: Trip
    undoing: Trip
    marked: Trip


@pytest.fixture(scope="module")
def outage(by_polling: Stage, store_server: PostgresServer) -> Outage:
    """While the store is away a call ends, a compensation ends, and a run whose step dies is marked failed."""
    scene = Scene(by_polling, "outage")
    trips = Outage(scene.trip("line"), scene.trip("line"), scene.trip("line"))
    trips.calling.tell("hold", "hotels")
    trips.calling.start(a=["flights"], b=["hotels", "cars"])
    trips.undoing.tell("hold", "hotels", verb="undo", times=1)
    trips.undoing.start(a=["flights"], b=["hotels", "raise"])
    trips.undoing.await_calls("hotels", verb="undo")
    trips.marked.tell("hold", "yachts")
    trips.marked.start(a=["flights"], b=["yachts", "cars"])
    for trip, kind in ((trips.calling, "hotels"), (trips.marked, "yachts")):
        trip.await_calls(kind)
    attempt = trips.marked.process("b")

    store_server.stop("immediate")
    trips.calling.release("hotels")
    trips.undoing.release("hotels")
    trips.marked.mark_failed()
    by_polling.airflow.wait_log("line", trips.calling.run_id, "b", "lost the saga store")
    attempt.wait_gone(SOON)
    store_server.start()
    return trips


def test_call_that_ends_while_the_store_is_away_is_done_when_it_is_back(outage: Outage) -> None:
    outage.calling.must_be_completed(calls=3)

    assert not outage.calling.action("hotels").in_doubt


def test_compensation_that_ends_while_the_store_is_away_is_confirmed_when_it_is_back(outage: Outage) -> None:
    outage.undoing.must_be_undone(calls=2)

    assert len({undo["key"] for undo in outage.undoing.undo_calls("hotels")}) == 1


def test_run_marked_failed_while_the_store_is_away_is_undone_when_it_is_back(outage: Outage) -> None:
    outage.marked.must_be_undone(calls=2)

    assert outage.marked.undo_order == ["yachts", "flights"]
