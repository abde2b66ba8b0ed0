"""The journal: few commits, one connection, no open transaction, and what happens when the store goes away."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_saga.core.actions import READ_ONLY
from airflow_saga.core.declare import action
from airflow_saga.core.errors import (
    ActionTimedOut,
    SagaCancelledError,
    StoreNotMigratedError,
    StoreUnavailableError,
)
from airflow_saga.runtime import watch
from airflow_saga.store.connect import Address
from airflow_saga.store.requests import RequestVerbs
from tests.runtime import deeds
from tests.runtime.lab import LIMITS, Alarm, Lab, Running, wait_until
from tests.runtime.wire import Line
from tests.support.ports import free_port


@pytest.fixture
def line(lab: Lab) -> Iterator[Line]:
    with Line(lab.url) as made:
        yield made


@action(compensate=deeds.unbook, timeout=deeds.TIMEOUT)
async def nothing_async(number: int, kind: str = "nothing") -> int:
    await asyncio.sleep(0)
    return number


@action(compensate=READ_ONLY)
def looks(number: int) -> int:
    return number


def transactions(lab: Lab) -> int:
    """How many writing transactions the server has begun."""
    row = lab.connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    assert row is not None
    return int(row[0])


# -- commits --------------------------------------------------------------------------------------------------------


def test_one_commit_for_each_action_of_a_sequence(lab: Lab) -> None:
    counted = []

    def body(saga: Any) -> None:
        deeds.nothing(0)
        before = transactions(lab)
        for number in range(1, 201):
            deeds.nothing(number)
        counted.append(transactions(lab) - before)

    lab.step(body, limits=dataclasses.replace(LIMITS, heartbeat_seconds=30, lease_seconds=60))
    assert counted[0] <= 204


def test_parallel_actions_share_commits(lab: Lab) -> None:
    counted = []

    async def all_of() -> None:
        await asyncio.gather(*[nothing_async(number) for number in range(100)])

    def body(saga: Any) -> None:
        before = transactions(lab)
        asyncio.run(all_of())
        counted.append(transactions(lab) - before)

    lab.step(body, limits=dataclasses.replace(LIMITS, heartbeat_seconds=30, lease_seconds=60))
    assert len(lab.actions()) == 100
    assert counted[0] <= 20


def test_an_outcome_without_a_next_intent_is_committed_soon(lab: Lab) -> None:
    def body(saga: Any) -> None:
        deeds.nothing(1)
        wait_until(lambda: lab.states() == [("nothing", "DONE")], "it is committed", 0.5)

    lab.step(body)


def test_a_reading_is_committed_within_half_a_second(lab: Lab) -> None:
    def body(saga: Any) -> None:
        time.sleep(0.3)  # the journal sleeps until its next heartbeat
        looks(1)
        wait_until(lambda: lab.states() == [("looks", "DONE")], "it is committed", 0.9)

    lab.step(body, limits=dataclasses.replace(LIMITS, heartbeat_seconds=5, lease_seconds=20))


def test_many_readings_are_a_few_commits(lab: Lab) -> None:
    before = transactions(lab)
    lab.step(lambda saga: [looks(number) for number in range(200)])
    assert len(lab.actions()) == 200
    assert transactions(lab) - before <= 40


# -- the connection -------------------------------------------------------------------------------------------------


def test_c74_a_step_holds_one_connection(lab: Lab) -> None:
    seen = []

    async def all_of() -> None:
        await asyncio.gather(*[nothing_async(number) for number in range(30)])

    def body(saga: Any) -> None:
        deeds.book("flights")
        seen.append(len(lab.sessions()))
        asyncio.run(all_of())
        seen.append(len(lab.sessions()))

    lab.step(body)
    assert seen == [1, 1]
    assert lab.sessions() == []


def test_c75_no_transaction_is_open_while_a_call_is_under_way(own_lab: Lab) -> None:
    lab = own_lab
    name = lab.connection.info.dbname
    lab.connection.execute(f'ALTER DATABASE "{name}" SET idle_in_transaction_session_timeout = 300')
    sessions: list[dict[str, Any]] = []

    def look_while_held(verb: str) -> None:
        for kind in ("hotels", "flights")[:: 1 if verb == "undo" else -1]:
            lab.world.await_received(kind, verb=verb)
            until = time.monotonic() + 0.7
            while time.monotonic() < until:
                sessions.extend(lab.sessions())
            lab.world.release(kind)

    lab.world.tell("hold", "*", verb="*")
    looking = Running(lambda: look_while_held("forward"))
    lab.step(lambda saga: [deeds.book(kind) for kind in ("flights", "hotels")])
    looking.result()
    looking = Running(lambda: look_while_held("undo"))
    assert lab.undo().saga.state == "CANCELLED"
    looking.result()
    assert {row["state"] for row in sessions} <= {"idle", "active"}
    assert len({row["pid"] for row in sessions}) == 2, "one connection forward, one in the undo"


# -- no store at the start ------------------------------------------------------------------------------------------


def test_no_store_at_the_start_calls_nothing_and_says_so(lab: Lab) -> None:
    nowhere = Address(f"postgresql://postgres@127.0.0.1:{free_port()}/none")
    limits = dataclasses.replace(LIMITS, store_outage_seconds=0.5)
    problem = lab.fails(
        lambda saga: deeds.book("flights"), StoreUnavailableError, address=nowhere, limits=limits
    )
    assert "does not answer" in str(problem)
    assert lab.world.ledger() == []


def test_a_store_that_comes_up_in_time_is_waited_for(lab: Lab, line: Line) -> None:
    line.cut()
    threading.Timer(0.5, line.mend).start()
    lab.step(lambda saga: deeds.book("flights"), address=Address(line.url))
    assert lab.step_state() == "SUCCEEDED"


def test_a_store_without_tables_names_the_command(lab: Lab) -> None:
    bare = lab.url.rpartition("/")[0] + "/postgres"
    problem = lab.fails(lambda saga: deeds.book("flights"), StoreNotMigratedError, address=Address(bare))
    assert "airflow saga db migrate" in str(problem)
    assert lab.world.ledger() == []


# -- the store goes away in the middle ------------------------------------------------------------------------------


def while_held(lab: Lab, act: Any, kind: str = "flights") -> Running:
    """Do something while a call is under way, then let the call end."""

    def do() -> None:
        lab.world.await_received(kind)
        act()
        lab.world.release(kind)

    return Running(do)


def test_a_short_outage_during_a_call_costs_nothing(lab: Lab, line: Line) -> None:
    lab.world.tell("hold", "flights")
    acting = while_held(lab, line.cut)
    threading.Timer(1.2, line.mend).start()
    lab.step(lambda saga: [deeds.book("flights"), deeds.book("hotels")], address=Address(line.url))
    acting.result()
    assert lab.states() == [("book", "DONE"), ("book", "DONE")]
    assert [len(lab.world.calls(kind)) for kind in ("flights", "hotels")] == [1, 1]


def test_a_long_outage_ends_the_step_before_its_next_call(lab: Lab, line: Line) -> None:
    lab.world.tell("hold", "flights")
    acting = while_held(lab, line.cut)
    limits = dataclasses.replace(LIMITS, store_outage_seconds=0.5)
    with pytest.raises(StoreUnavailableError):
        lab.step(
            lambda saga: [deeds.book_quickly("flights"), deeds.book("hotels")],
            address=Address(line.url),
            limits=limits,
        )
    acting.result()
    assert lab.world.calls("hotels") == []
    assert lab.states() == [("book_quickly", "PENDING")]
    lab.step(lambda saga: [deeds.book_quickly("flights"), deeds.book("hotels")], try_number=2)
    assert len(lab.world.calls("flights")) == 1
    assert lab.states() == [("book_quickly", "DONE"), ("book", "DONE")]


def test_a_body_that_swallows_errors_calls_nothing_without_the_store(lab: Lab, line: Line) -> None:
    lab.world.tell("hold", "flights")
    acting = while_held(lab, line.cut)
    limits = dataclasses.replace(LIMITS, store_outage_seconds=0.5)

    def swallows(saga: Any) -> None:
        for number in range(20):
            try:
                deeds.book("flights" if number == 0 else "hotels", str(number))
            except Exception:  # noqa: BLE001, S112 - as a careless body does
                continue

    with pytest.raises(StoreUnavailableError):
        lab.step(swallows, address=Address(line.url), limits=limits)
    acting.result()
    assert lab.world.calls("hotels") == []


def test_deadlines_hold_while_the_store_is_away(lab: Lab, line: Line) -> None:
    threading.Timer(3.0, line.mend).start()
    _LINES[:] = [line]
    _ENDED.clear()
    begun = time.monotonic()
    with pytest.raises(ActionTimedOut):
        lab.step(lambda saga: cuts_the_line(30.0), address=Address(line.url))
    assert _ENDED[0] - begun < 2.5, "the call was ended only when the store was back"
    assert [row.state for row in lab.actions()] == ["IN_DOUBT"]


_LINES: list[Line] = []
_ENDED: list[float] = []


@action(compensate=deeds.unbook, timeout=deeds.QUICK, retry=deeds.ONCE)
def cuts_the_line(seconds: float, kind: str = "cuts") -> None:
    _LINES[0].cut()
    try:
        time.sleep(seconds)
    finally:
        _ENDED.append(time.monotonic())


@pytest.mark.parametrize("answers", [1, 2, 3])
def test_a_commit_that_was_not_heard_of_is_not_made_twice(lab: Lab, line: Line, answers: int) -> None:
    """Intent, outcome and the end of the step, each with its answer lost: nobody knows whether it was committed."""

    def body(saga: Any) -> list[str]:
        made = []
        for kind in ("flights", "hotels", "cars"):
            line.lose_answers(answers)
            made.append(deeds.book(kind)["kind"])
        line.lose_answers(answers)
        return made

    assert lab.step(body, address=Address(line.url)).output == ["flights", "hotels", "cars"]
    assert line.lost >= 3
    assert lab.states() == [("book", "DONE")] * 3
    assert [len(lab.world.calls(kind)) for kind in ("flights", "hotels", "cars")] == [1, 1, 1]
    assert lab.step_state() == "SUCCEEDED"


def test_an_outcome_whose_commit_was_not_heard_of_is_kept_once(lab: Lab, line: Line) -> None:
    lab.world.tell("hold", "flights")
    acting = while_held(lab, line.lose_answers)
    lab.step(lambda saga: deeds.book("flights"), address=Address(line.url))
    acting.result()
    assert line.lost == 1
    assert lab.states() == [("book", "DONE")]
    assert not any("late" in what for what in lab.whats())


def test_a_retry_whose_commit_was_not_heard_of_is_made_once(lab: Lab, line: Line) -> None:
    """The row is PENDING with the next number then, and nobody else's: the fence is ours."""
    lab.world.tell("refuse", "flights", times=1)
    retries = []

    def body(saga: Any) -> Any:
        journal = lab.last_run.journal  # type: ignore[union-attr]
        assert journal is not None
        retry = journal._line.verbs.retry_if_allowed
        original = journal._writer._retry

        def lose_its_answer(intent: Any) -> Any:
            retries.append(retry)
            line.lose_answers()
            return original(intent)

        journal._writer._retry = lose_its_answer  # type: ignore[method-assign]
        return deeds.book("flights")

    lab.step(body, address=Address(line.url))
    assert line.lost == 1
    assert len(lab.world.calls("flights")) == 2
    (row,) = lab.actions()
    assert (row.state, row.tries) == ("DONE", 2)


@pytest.mark.parametrize("answers", [1, 2])
def test_an_undo_whose_commits_were_not_heard_of_calls_nothing_twice(
    lab: Lab, line: Line, answers: int
) -> None:
    kinds = ("flights", "hotels", "cars")
    lab.step(lambda saga: [unbooked_behind("x", kind) for kind in kinds])
    _LINES[:] = [line]
    _LOSSES[:] = [answers]
    request = lab.ask_undo().request
    assert request is not None
    lab.carry_out(request.request_uuid, address=Address(line.url))
    assert lab.saga_state() == "CANCELLED"
    assert line.lost >= 3
    assert [len(lab.world.undo_calls(kind)) for kind in kinds] == [1, 1, 1]
    assert [row.undo_failures for row in lab.actions()] == [0, 0, 0]


_LOSSES: list[int] = []


def unbook_and_lose(record: Any) -> None:
    deeds.unbook(record)
    _LINES[0].lose_answers(_LOSSES[0])


@action(compensate=unbook_and_lose, timeout=deeds.TIMEOUT, undo_retry=deeds.ONCE)
def unbooked_behind(what: str, kind: str, *, key: str) -> Any:
    return deeds._book(kind, what, key)


def test_a_checkpoint_made_while_the_store_is_away_is_kept(lab: Lab, line: Line) -> None:
    def body(saga: Any) -> None:
        if saga.restored:
            raise ValueError(saga.restored)
        line.cut()
        saga.checkpoint("page 7")
        time.sleep(0.5)  # a heartbeat finds the line cut
        line.mend()
        raise KeyError("no more")

    lab.fails(body, KeyError, address=Address(line.url))
    assert "page 7" in str(lab.fails(body, ValueError, try_number=2))


def test_c69_a_line_that_went_silent_is_given_up_and_a_cancel_is_heard_again(
    lab: Lab, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SILENT_SECONDS", 1.0)
    seen: dict[str, float] = {}

    def decide() -> None:
        lab.world.await_received("flights")
        line.silence()
        line.mend()
        lab.world.release("flights")
        wait_until(lambda: line.connections > 1, "it connects anew")
        time.sleep(0.3)
        seen["asked"] = time.monotonic()
        RequestVerbs(lab.connection).cancel(lab.dag_id, "r", actor="ann")

    deciding = Running(decide)
    lab.world.tell("hold", "flights")

    def body(saga: Any) -> None:
        deeds.book("flights")
        while True:
            saga.check()
            time.sleep(0.005)

    limits = dataclasses.replace(LIMITS, heartbeat_seconds=0.5, lease_seconds=10)
    lab.fails(body, SagaCancelledError, address=Address(line.url), limits=limits)
    deciding.result()
    assert time.monotonic() - seen["asked"] < 1.0
    assert lab.states() == [("book", "DONE")]


def test_a_cancel_is_heard_by_notification_long_before_the_next_heartbeat(lab: Lab) -> None:
    asked: list[float] = []

    def decide() -> None:
        wait_until(lambda: lab.sessions(), "the step runs")
        time.sleep(0.3)
        asked.append(time.monotonic())
        lab.cancel()

    deciding = Running(decide)

    def body(saga: Any) -> None:
        while True:
            saga.check()
            time.sleep(0.001)

    lab.fails(
        body, SagaCancelledError, limits=dataclasses.replace(LIMITS, heartbeat_seconds=10, lease_seconds=30)
    )
    deciding.result()
    assert time.monotonic() - asked[0] < 2.0


def test_a_notification_that_comes_with_an_answer_is_heard_too(lab: Lab) -> None:
    """Then the socket has nothing more to read, and waiting for it would mean waiting for the next heartbeat."""
    asked: list[float] = []
    asks = threading.Event()

    def decide() -> None:
        assert asks.wait(10)
        wait_until(lambda: lab.sessions(state="active"), "the journal waits for an answer")
        lab.cancel()

    deciding = Running(decide)

    def body(saga: Any) -> None:
        assert lab.last_run is not None
        assert lab.last_run.journal is not None
        asks.set()
        lab.last_run.journal.ask(lambda connection: connection.pgconn.exec_(b"SELECT pg_sleep(1)"))
        asked.append(time.monotonic())
        while True:
            saga.check()
            time.sleep(0.001)

    slow = dataclasses.replace(LIMITS, heartbeat_seconds=10, lease_seconds=30)
    lab.fails(body, SagaCancelledError, limits=slow)
    deciding.result()
    assert time.monotonic() - asked[0] < 2.0


# -- the server rolls back ------------------------------------------------------------------------------------------


def test_c78_serialization_failures_and_deadlocks_are_tried_again_and_no_call_is(own_lab: Lab) -> None:
    lab = own_lab
    lab.connection.execute("CREATE SEQUENCE airflow_saga.turns", prepare=False)
    lab.connection.execute(
        """
        CREATE FUNCTION airflow_saga.be_difficult() RETURNS trigger LANGUAGE plpgsql AS $$
        DECLARE turn bigint := nextval('airflow_saga.turns');
        BEGIN
            IF turn % 9 = 1 THEN RAISE EXCEPTION 'could not serialize' USING ERRCODE = '40001'; END IF;
            IF turn % 9 = 2 THEN RAISE EXCEPTION 'deadlock detected' USING ERRCODE = '40P01'; END IF;
            IF turn % 9 = 3 THEN RAISE EXCEPTION 'lock timeout' USING ERRCODE = '55P03'; END IF;
            RETURN NEW;
        END $$
        """,
        prepare=False,
    )
    for table in ("action", "step", "undo_request"):
        lab.connection.execute(
            f"CREATE TRIGGER difficult BEFORE INSERT OR UPDATE ON airflow_saga.{table} "
            f"FOR EACH ROW EXECUTE FUNCTION airflow_saga.be_difficult()".encode(),
            prepare=False,
        )
    kinds = ("flights", "hotels", "cars", "notes")
    lab.step(lambda saga: [deeds.book(kind) for kind in kinds])
    assert all(len(lab.world.calls(kind)) == 1 for kind in kinds)
    assert lab.states() == [("book", "DONE")] * 4
    assert lab.undo().saga.state == "CANCELLED"
    assert all(len(lab.world.undo_calls(kind)) == 1 for kind in kinds)
    assert len(lab.view().requests) == 1


def test_a_write_that_can_never_be_made_ends_the_step_and_leaves_nobody_waiting(own_lab: Lab) -> None:
    lab = own_lab
    lab.connection.execute(
        "ALTER TABLE airflow_saga.action ADD CONSTRAINT no_hotels CHECK (params NOT LIKE '%hotels%')",
        prepare=False,
    )

    def body(saga: Any) -> None:
        deeds.book("flights")
        deeds.book("hotels")

    begun = time.monotonic()
    lab.fails(body, StoreUnavailableError)
    assert time.monotonic() - begun < 10
    assert lab.world.calls("hotels") == []
    assert len(lab.world.calls("flights")) == 1


def test_c64_an_interruption_in_the_middle_of_a_write_leaves_it_whole_or_undone(own_lab: Lab) -> None:
    lab = own_lab
    lab.connection.execute(
        """
        CREATE FUNCTION airflow_saga.be_slow() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN PERFORM pg_sleep(0.005); RETURN NEW; END $$
        """,
        prepare=False,
    )
    lab.connection.execute(
        "CREATE TRIGGER slow BEFORE INSERT OR UPDATE ON airflow_saga.action "
        "FOR EACH ROW EXECUTE FUNCTION airflow_saga.be_slow()",
        prepare=False,
    )
    chance = random.Random(3)

    async def cut_async(seconds: float) -> None:
        async def forever() -> None:
            while True:
                await nothing_async(1)

        await asyncio.wait_for(forever(), seconds)

    with Alarm(KeyboardInterrupt) as alarm:
        for trial in range(200):
            run, seconds = f"r{trial}", chance.uniform(0.001, 0.03)

            def body(saga: Any, trial: int = trial, seconds: float = seconds) -> None:
                if trial % 2:
                    asyncio.run(cut_async(seconds))
                alarm.after(seconds)
                while True:
                    deeds.nothing(1)
                    alarm.check()

            lab.fails(body, (KeyboardInterrupt, TimeoutError), run)
            alarm.off()
            rows = lab.actions(run)
            assert "PENDING" not in [row.state for row in rows]
            assert all(row.state == "DONE" for row in rows[:-1])
            assert lab.cancel(run).undoes
            assert lab.saga_state(run) == "CANCELLING"
    assert lab.sessions() == []


# -- a lost step ----------------------------------------------------------------------------------------------------


def test_a_step_that_is_taken_over_ends_by_itself_and_its_answer_is_kept(lab: Lab) -> None:
    lab.world.tell("hold", "flights", times=1)
    first = lab.start(lambda saga: [deeds.book_patiently("flights"), deeds.book("hotels")])
    lab.world.await_received("flights")
    assert lab.runs.mark_step_if_running(lab.dag_id, "r", "t", -1)
    lab.world.release("flights")
    from airflow_saga.core.errors import StepFencedError

    assert isinstance(first.wait(), StepFencedError)
    assert lab.world.calls("hotels") == []
    (row,) = lab.actions()
    assert (row.state, row.result is not None) == ("DONE", True)
    assert any("late answer" in what for what in lab.whats())


def test_a_call_held_up_for_more_than_a_second_asks_again_whether_it_may_begin(lab: Lab) -> None:
    """A process may stand still between the intent and the call; meanwhile its step may belong to another (A1)."""
    from airflow_saga.core.errors import StepFencedError
    from airflow_saga.runtime import drive

    stood = []

    def stand_still(intent_sent: float | None) -> bool:
        if not stood:
            stood.append(True)
            time.sleep(1.2)
            lab.runs.mark_step_if_running(lab.dag_id, "r", "t", -1)
        return original(intent_sent)

    original = drive._in_time
    drive._in_time = stand_still
    try:
        lab.fails(lambda saga: deeds.book("flights"), StepFencedError)
    finally:
        drive._in_time = original
    assert lab.world.calls() == []
    assert lab.states() == [("book", "FAILED")]


def test_a_call_held_up_in_a_step_that_is_still_ours_is_made(lab: Lab) -> None:
    from airflow_saga.runtime import drive

    stood = []

    def stand_still(intent_sent: float | None) -> bool:
        if not stood:
            stood.append(True)
            time.sleep(1.2)
        return original(intent_sent)

    original = drive._in_time
    drive._in_time = stand_still
    try:
        lab.step(lambda saga: deeds.book("flights"))
    finally:
        drive._in_time = original
    assert lab.states() == [("book", "DONE")]
    assert stood


class PenTakenAndInterrupted:
    """A lock whose taker is hit by a signal at the worst moments: just after taking it, just before giving it back."""

    def __init__(self, lock: Any, worst: str) -> None:
        self._lock = lock
        self._worst = worst
        self.hits = 0

    def _hit(self, moment: str) -> None:
        if moment == self._worst and threading.current_thread() is threading.main_thread() and not self.hits:
            self.hits += 1
            raise KeyboardInterrupt

    def acquire(self, blocking: bool = True) -> bool:
        got = bool(self._lock.acquire(blocking=blocking))
        if got:
            self._hit("taken")
        return got

    def release(self) -> None:
        self._hit("giving back")
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("worst", ["taken", "giving back"])
def test_an_interruption_never_takes_the_pen_away_for_good(lab: Lab, worst: str) -> None:
    def body(saga: Any) -> None:
        deeds.nothing(1)
        assert lab.last_run is not None
        journal = lab.last_run.journal
        assert journal is not None
        turns = journal._turns
        pen = turns._pen = PenTakenAndInterrupted(turns._pen, worst)  # type: ignore[assignment]
        for number in range(2, 50):
            deeds.nothing(number)
        pytest.fail(f"nobody was interrupted: {pen}")

    begun = time.monotonic()
    lab.fails(body, KeyboardInterrupt)
    assert time.monotonic() - begun < 5
    assert lab.step_state() == "STOPPED"
    assert "PENDING" not in [row.state for row in lab.actions()]
