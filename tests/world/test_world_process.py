"""The service as a process: killed, restarted, orphaned, called by several processes, bound to loopback only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dags.support import travel
from tests.support.world import DAGS, View, World

TRIP = {"id": "trip-1"}
ROOT = DAGS.parent


def test_nothing_that_landed_is_lost_when_the_service_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with World() as world, ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv("TRAVEL_URL", world.url)
        flight = travel.book_flight(TRIP, idempotency_key="k1")
        hotel = travel.book_hotel(TRIP, idempotency_key="k2")
        travel.cancel_hotel(hotel["id"], idempotency_key="u2")
        world.tell("hold", "cars")
        held = pool.submit(travel.book_car, TRIP, idempotency_key="k3")
        world.await_landed("cars")
        before = world.net()

        world.kill()
        assert held.exception(timeout=10) is not None
        world.start()

        assert world.net() == before
        assert world.net().of("cars", "k3") == 1
        assert world.calls("cars")[0]["heard"] == "service killed"
        assert travel.book_flight(TRIP, idempotency_key="k1") == flight
        assert travel.cancel_hotel(hotel["id"], idempotency_key="u2")["status"] == "undone"
        assert travel.find_car("k3") is not None
        after = world.net()
        assert (after.kinds, after.standing) == (before.kinds, before.standing)


def test_a_held_call_that_did_not_land_is_gone_with_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with World() as world, ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv("TRAVEL_URL", world.url)
        world.tell("hold", "cars", lands="release")
        held = pool.submit(travel.book_car, TRIP, idempotency_key="k")
        world.await_received("cars")
        world.kill()
        assert held.exception(timeout=10) is not None
        world.start()
        assert (world.net().total, world.told()) == (0, [])
        assert travel.find_car("k") is None


def test_a_promised_refund_settles_although_the_service_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with World() as world:
        monkeypatch.setenv("TRAVEL_URL", world.url)
        payment = travel.charge(TRIP, "10.00", idempotency_key="k")
        world.tell("later", "payments", seconds=0.5)
        token = travel.refund(payment["id"], idempotency_key="u")["token"]
        world.kill()
        world.start()
        world.await_landed("payments", verb="undo")
        assert travel.refund_status(token) == "settled"
        assert world.net().total == 0


def test_a_torn_last_line_of_the_ledger_is_dropped(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    with World(ledger) as world:
        assert world.call("POST", "/flights", TRIP, key="k1")[0] == 201
    whole = ledger.read_bytes()
    ledger.write_bytes(whole + b'{"n": 99, "world": "", "ev')
    with World(ledger) as world:
        assert world.net().of("flights", "k1") == 1
        assert world.call("POST", "/flights", TRIP, key="k2")[0] == 201
    events = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert ledger.read_bytes().startswith(whole)
    assert [event["n"] for event in events] == sorted({event["n"] for event in events})


def test_the_file_has_each_stage_of_each_call_before_its_answer(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    with World(ledger) as world:
        world.call("POST", "/flights", TRIP, key="k")
        world.tell("apply_and_drop", "hotels")
        with pytest.raises(ConnectionError):
            world.call("POST", "/hotels", TRIP, key="k")
        world.kill()
    events = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [event["event"] for event in events] == ["received", "landed", "answered"] * 2
    assert [event["status"] for event in events if event["event"] == "answered"] == [201, None]


def test_other_processes_share_a_world_by_its_url(world: View) -> None:
    code = """
import sys
from support import travel
for n in range(20):
    travel.book_flight({"id": sys.argv[1]}, idempotency_key=f"shared-{n}")
"""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(number)],
            env={**os.environ, **world.env(), "PYTHONPATH": str(DAGS)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    errors = [process.communicate(timeout=60)[1] for process in running]
    view = World.attach(world.url)
    entries = view.net().keys["flights"].values()
    assert sum(entry["landed"] for entry in entries) == 20
    assert sum(entry["calls"] for entry in entries) <= 80
    assert any("422" in error for error in errors), "the trips differ, so a shared key must have been refused"


def test_the_service_ends_when_the_process_that_started_it_is_killed() -> None:
    code = """
import sys
from tests.support.world import World
world = World()
world.start()
print(world.pid, flush=True)
sys.stdin.read()
"""
    starter = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    assert starter.stdin is not None
    service = int(starter.stdout.readline())
    assert _is_running(service)
    starter.kill()
    starter.communicate()
    deadline = time.monotonic() + 15
    while _is_running(service):
        assert time.monotonic() < deadline, f"service {service} outlived its starter"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_it_runs_as_a_plain_script_and_binds_to_loopback_only(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    script = DAGS / "support" / "travel_service.py"
    process = subprocess.Popen(
        [sys.executable, str(script), "--port", "0", "--ready-file", str(ready)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        printed = process.stdout.readline().strip()
        said = json.loads(ready.read_text())
        assert (said["url"], said["pid"]) == (printed, process.pid)
        assert World.attach(printed).call("POST", "/flights", TRIP, key="k")[0] == 201
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        bound = [
            line[1]
            for line in listening
            if line[3] == "0A" and int(line[1].split(":")[1], 16) == said["port"]
        ]
        assert [address.split(":")[0] for address in bound] == ["0100007F"]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert list(tmp_path.iterdir()) == [ready]


def test_waiting_in_vain_shows_the_ledger(world: View) -> None:
    world.call("POST", "/flights", TRIP, key="the-key")
    with pytest.raises(AssertionError, match=r"(?s)received hotels .*0 of 1.*forward flights key=the-key"):
        world.await_received("hotels", timeout=0.2)


def test_waiting_ends_as_soon_as_it_has_happened(world: View) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.await_received, "flights", 3, 30.0, verb="forward")
        for _ in range(3):
            assert not waiting.done()
            world.call("POST", "/flights", TRIP)
        began = time.monotonic()
        assert len(waiting.result(timeout=10)) == 3
        assert time.monotonic() - began < 5


def test_airflow_does_not_look_for_dags_among_the_support_modules() -> None:
    from airflow.utils.file import list_py_file_paths

    assert not [path for path in list_py_file_paths(DAGS, safe_mode=False) if "support" in path]
