"""Two at once: what each pair of verbs may leave behind, whoever comes first. Many trials, fixed seeds."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from airflow_saga.core.decide import Go
from airflow_saga.core.errors import SagaError
from airflow_saga.core.records import Outcome, StepRow
from airflow_saga.store.attach import AttachVerbs
from airflow_saga.store.connect import Address
from airflow_saga.store.decision import Verdict
from airflow_saga.store.freeze import Freeze, FreezeVerbs
from airflow_saga.store.reader import Reader
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.runs import RunVerbs
from airflow_saga.store.steps import Checkpoint, StepVerbs
from airflow_saga.store.undo import EndedTry, UndoVerbs
from tests.store.scene import Scene, connect

PATIENCE_SECONDS = 60.0


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Each call in a thread of its own, all started at the same moment; their results in order."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE_SECONDS)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE_SECONDS) for future in [pool.submit(run, call) for call in calls]]


@contextmanager
def connections(url: str, count: int) -> Iterator[list[Any]]:
    opened = [Address(url).open() for _ in range(count)]
    yield opened
    for connection in opened:
        connection.close()


# -- P2 -------------------------------------------------------------------------------------------------------------

WRITERS = 8
TRIALS = 500


class Writer:
    """A step that begins one action after the other, for as long as it is let."""

    def __init__(self, scene: Scene, number: int) -> None:
        self.scene, self.verbs = scene, StepVerbs(Address(scene.url).open())
        attempt = scene.attempt(f"writer_{number}", lease_seconds=3600)
        step = AttachVerbs(self.verbs.connection).attach_if_allowed(attempt).step
        assert step is not None
        self.step: StepRow = step
        self.seq = 0
        self.sent_at: list[float] = []

    def write_until_refused(self) -> None:
        self.sent_at = []
        ended: list[Outcome] = []
        while True:
            self.seq += 1
            sent_at = time.monotonic()
            written = self.verbs.write_forward(self.step, ended, [self.scene.intent(self.step, self.seq)])
            assert len(written.ended) == len(ended), "an outcome is never refused"
            if not written.begun:
                return
            self.sent_at.append(sent_at)
            ended = [Outcome(self.seq, "DONE")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_p2_once_cancel_has_returned_nothing_begins(store_url: str) -> None:
    """500 trials against 8 busy steps: what began is what was there when cancel returned; nothing was sent later."""
    scene = Scene(store_url)
    rng = random.Random(2)
    writers = [Writer(scene, number) for number in range(WRITERS)]
    begun_in_all = 0
    with ThreadPoolExecutor(WRITERS) as pool, connect(store_url) as plain:
        for _ in range(TRIALS):
            running = [pool.submit(writer.write_until_refused) for writer in writers]
            time.sleep(rng.uniform(0.0, 0.008))
            assert scene.cancel().state == "REQUESTED"
            returned_at = time.monotonic()
            there = scene.sql("SELECT count(*) AS n FROM airflow_saga.action")[0]["n"]
            for future in running:
                future.result(PATIENCE_SECONDS)
            assert scene.sql("SELECT count(*) AS n FROM airflow_saga.action")[0]["n"] == there
            assert not [sent for writer in writers for sent in writer.sent_at if sent > returned_at]
            begun_in_all += sum(len(writer.sent_at) for writer in writers)
            with plain.transaction():  # back to the start, past the triggers: no verb leads there
                plain.execute("SET LOCAL session_replication_role = replica")
                plain.execute("DELETE FROM airflow_saga.undo_request")
                plain.execute("UPDATE airflow_saga.action SET state = 'DONE' WHERE state = 'PENDING'")
                plain.execute("UPDATE airflow_saga.saga SET state = 'RUNNING', mode = NULL")
    assert begun_in_all > TRIALS, "the writers did write"
    for writer in writers:
        writer.verbs.connection.close()
    scene.close()


def test_p2_a_cancel_is_not_kept_waiting_by_steps_that_write_without_a_pause(store_url: str) -> None:
    """Share locks come and go all the time; the one that wants the row for itself must get its turn."""
    scene = Scene(store_url)
    writers = [Writer(scene, number) for number in range(WRITERS)]
    with ThreadPoolExecutor(WRITERS) as pool:
        running = [pool.submit(writer.write_until_refused) for writer in writers]
        time.sleep(0.3)
        asked_at = time.monotonic()
        scene.cancel()
        waited = time.monotonic() - asked_at
        for future in running:
            future.result(PATIENCE_SECONDS)
    assert waited < 5
    for writer in writers:
        writer.verbs.connection.close()
    scene.close()


# -- pairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_p10_of_many_cancels_one_decides(each_store_url: str, known: bool) -> None:
    for trial in range(10):
        scene = Scene(each_store_url, f"run_{trial}")
        if known:
            scene.act(scene.attach(), 1)
        with connections(scene.url, 6) as opened:
            calls = [
                lambda c=c, who=who, run=scene.run: RequestVerbs(c).cancel(*run, actor=f"user_{who}")
                for who, c in enumerate(opened)
            ]
            decisions = at_once(*calls)
        verdicts = Counter(decision.verdict for decision in decisions)
        if known:
            assert verdicts == {Verdict.CANCELLING: 1, Verdict.ALREADY: 5}
            assert len(scene.view.requests) == 1
        else:
            assert verdicts == {Verdict.NOTHING: 1, Verdict.CANCELLED: 5}
        first = next(d for d in decisions if d.verdict in (Verdict.CANCELLING, Verdict.NOTHING))
        assert scene.saga.actor is not None
        assert all(scene.saga.actor in d.message for d in decisions if d is not first)
        scene.close()


def test_an_outcome_and_the_freeze_agree_on_who_was_first(each_store_url: str) -> None:
    seen: Counter[str] = Counter()
    rng = random.Random(6)
    with connections(each_store_url, 2) as (writes, freezes):
        for trial in range(60):
            scene = Scene(each_store_url, f"run_{trial}")
            step = scene.attach()
            assert scene.begin(step, 1)
            request = scene.cancel(stop_now=True)
            pause = rng.uniform(-0.004, 0.004)

            def end(step: StepRow = step, pause: float = pause) -> bool:
                time.sleep(max(0.0, -pause))
                return bool(StepVerbs(writes).write_forward(step, [Outcome(1, "DONE", '"r"')], []).ended)

            def freeze(uuid: Any = request.request_uuid, pause: float = pause) -> Any:
                time.sleep(max(0.0, pause))
                return FreezeVerbs(freezes).freeze_if_quiet(uuid, "undo__1")

            taken, frozen = at_once(end, freeze)
            row = scene.action()
            assert frozen.outcome is Freeze.FROZEN
            assert (row.state, row.lands_by is None) == (("DONE", True) if taken else ("IN_DOUBT", False))
            assert frozen.request.plan["steps"][0]["actions"][0]["state"] == row.state
            seen[row.state] += 1
            scene.close()
    assert min(seen["DONE"], seen["IN_DOUBT"]) > 0, seen


def test_an_attach_and_the_freeze_of_a_hint_agree_on_who_was_first(each_store_url: str) -> None:
    seen: Counter[str] = Counter()
    rng = random.Random(7)
    with connections(each_store_url, 2) as (attaches, freezes):
        for trial in range(60):
            scene = Scene(each_store_url, f"run_{trial}")
            scene.stopped("flight", 1)
            hint = scene.hint()
            attempt = scene.attempt(try_number=2)
            pause = rng.uniform(-0.004, 0.004)

            def attach(attempt: Any = attempt, pause: float = pause) -> Any:
                time.sleep(max(0.0, pause))
                return AttachVerbs(attaches).attach_if_allowed(attempt)

            def freeze(uuid: Any = hint.request_uuid, pause: float = pause) -> Any:
                time.sleep(max(0.0, -pause))
                return FreezeVerbs(freezes).freeze_if_quiet(uuid, "undo__1")

            attached, frozen = at_once(attach, freeze)
            if attached.decision.go is Go.RESUME:
                assert frozen.outcome is Freeze.ENDED
                assert (scene.saga.state, scene.request.state) == ("RUNNING", "WITHDRAWN")
                assert scene.begin(attached.step, 2)
            else:
                assert attached.decision.go is Go.REFUSE
                assert frozen.outcome is Freeze.FROZEN
                assert (scene.saga.state, scene.step().state) == ("CANCELLING", "UNDOING")
            seen[attached.decision.go] += 1
            scene.close()
    assert len(seen) == 2, seen


def test_c77_of_many_attempts_each_has_a_fence_of_its_own_and_only_the_newest_writes(
    each_store_url: str,
) -> None:
    scene = Scene(each_store_url)
    scene.attach()
    with connections(scene.url, 20) as opened:
        calls = [
            lambda c=c: AttachVerbs(c).attach_if_allowed(scene.attempt(try_number=2)).step for c in opened
        ]
        steps = at_once(*calls)
        assert sorted(step.fence for step in steps) == list(range(2, 22))
        begun = at_once(
            *(
                lambda c=c, step=step: StepVerbs(c).write_forward(step, [], [scene.intent(step)]).begun
                for c, step in zip(opened, steps, strict=True)
            )
        )
    assert [step.fence for step, seqs in zip(steps, begun, strict=True) if seqs] == [21]
    scene.close()


def test_two_undo_attempts_never_both_begin_a_compensation(each_store_url: str) -> None:
    for trial in range(20):
        scene = Scene(each_store_url, f"run_{trial}")
        scene.stopped("flight", 1)
        scene.freeze(scene.cancel())
        uuid = scene.request.request_uuid
        row = scene.action()

        def undo(connection: Any, uuid: Any = uuid, row: Any = row, scene: Scene = scene) -> int:
            verbs = UndoVerbs(connection)
            attached = verbs.attach_undo_if_in_order(
                uuid, "flight", -1, "undo__1", lease_seconds=15, host="h", pid=1
            )
            assert attached is not None
            try:
                begun = verbs.write_undo(attached, None, scene.next_try(row))[1]
                return attached.step.fence if begun is not None else 0
            except SagaError:
                return 0

        with connections(scene.url, 3) as opened:
            fences = at_once(*(lambda c=c: undo(c) for c in opened))
        assert max(fences) == scene.step().fence, "the newest one goes on"
        assert scene.action().undo_tries == sum(1 for fence in fences if fence)
        scene.close()


# -- C89, C90 -------------------------------------------------------------------------------------------------------

PAIRS = 6
"""Trials that run side by side: most of each is waiting."""


def trials(url: str, one: Callable[[Scene, random.Random], str], seed: int) -> Counter[str]:
    def lane(number: int) -> Counter[str]:
        rng = random.Random(seed * 1000 + number)
        seen: Counter[str] = Counter()
        for trial in range(number, TRIALS, PAIRS):
            scene = Scene(url, f"run_{trial}")
            seen[one(scene, rng)] += 1
            scene.close()
        return seen

    with ThreadPoolExecutor(PAIRS) as pool:
        return sum(pool.map(lane, range(PAIRS)), Counter())


def cancel_attach(scene: Scene, rng: random.Random) -> str:
    """A cancel within 50 ms of the first attach."""
    pause = rng.uniform(-0.05, 0.05) * rng.choice((0.1, 1))
    attempt = scene.attempt()

    def attach() -> Any:
        time.sleep(max(0.0, pause))
        attached = AttachVerbs(other).attach_if_allowed(attempt)
        step, verbs = attached.step, StepVerbs(other)
        return attached, step is not None and bool(verbs.write_forward(step, [], [scene.intent(step)]).begun)

    def cancel() -> Any:
        time.sleep(max(0.0, -pause))
        decision = scene.requests.cancel(*scene.run, actor="ann")
        return decision, {row.seq for row in scene.view.actions}

    with Address(scene.url).open() as other:
        (attached, begun), (decision, there) = at_once(attach, cancel)
    assert {row.seq for row in scene.view.actions} == there, "nothing began after cancel had returned"
    assert begun == bool(there)
    if decision.verdict is Verdict.NOTHING:
        assert (attached.decision.go, scene.saga.state, scene.view.steps) == (Go.REFUSE, "CANCELLED", ())
    else:
        assert decision.verdict is Verdict.CANCELLING
        assert (attached.decision.go, scene.saga.state) == (Go.START, "CANCELLING")
    return f"{decision.verdict.name}{' begun' if begun else ''}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_c89_a_cancel_around_the_first_attach_is_answered_truly(store_url: str) -> None:
    seen = trials(store_url, cancel_attach, 89)
    assert seen.total() == TRIALS
    assert min(seen["NOTHING"], seen["CANCELLING begun"]) > 20, seen


def cancel_completion(scene: Scene, rng: random.Random) -> str:
    """A cancel within 20 ms of the end of the last step."""
    step = scene.act(scene.attach(), 1)
    pause = rng.uniform(-0.02, 0.02)
    run_is_success = threading.Event()

    def complete() -> Any:
        time.sleep(max(0.0, pause))
        finished = StepVerbs(other).finish_if_held(step, None, False)
        run_is_success.set()
        return finished, RunVerbs(other).complete_if_over(*scene.run)

    def cancel() -> Any:
        time.sleep(max(0.0, -pause))
        return scene.requests.cancel(*scene.run, actor="ann", run_is_success=run_is_success.is_set())

    with Address(scene.url).open() as other:
        (finished, _), decision = at_once(complete, cancel)
    assert finished, "a step may finish in any state of its saga"
    state, requests = scene.saga.state, scene.view.requests
    if decision.verdict is Verdict.FINISHED:
        assert (state, requests) == ("COMPLETED", ())
    else:
        assert decision.verdict is Verdict.CANCELLING
        assert (state, [request.state for request in requests]) == ("CANCELLING", ["REQUESTED"])
        scene.undone("flight")
        assert scene.saga.state == "CANCELLED"
    return str(decision.verdict.name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_c90_a_cancel_around_the_end_agrees_with_how_the_saga_ends(store_url: str) -> None:
    seen = trials(store_url, cancel_completion, 90)
    assert seen.total() == TRIALS
    assert min(seen["FINISHED"], seen["CANCELLING"]) > 20, seen


# -- everything at once ---------------------------------------------------------------------------------------------

STORM_SECONDS = 10.0
STORM_RUNS = [f"storm_{number}" for number in range(3)]
TASKS = {"flight": (), "hotel": ("flight",), "car": ()}


class Storm:
    """One of several who do whatever comes to mind, in a few runs, on a connection of their own."""

    def __init__(self, url: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scene = Scene(url)
        self.begun: list[tuple[int, int, int]] = []
        self.fences: list[tuple[int, int]] = []
        self.done: Counter[str] = Counter()

    def run(self, until: float) -> None:
        moves = [getattr(self, name) for name in dir(self) if name.startswith("do_")]
        while time.monotonic() < until:
            self.scene.run_id = self.rng.choice(STORM_RUNS)
            move = self.rng.choice(moves)
            try:
                move()
                self.done[move.__name__] += 1
            except SagaError:
                self.done[f"{move.__name__} refused"] += 1

    def _step(self) -> StepRow | None:
        saga = self.scene.reader.find(*self.scene.run)
        return saga and self.scene.reader.step(saga.saga_id, self.rng.choice(list(TASKS)), -1)

    def do_attach(self) -> None:
        task = self.rng.choice(list(TASKS))
        clear = self.rng.randint(0, 40)
        attached = self.scene.try_attach(
            task,
            after=TASKS[task],
            try_number=1000,
            clear_number=clear,
            max_tries=clear,
            lease_seconds=self.rng.choice((0.05, 15)),
            others_cleared=frozenset(TASKS),
        )
        if attached.decision.go in (Go.START, Go.RESUME, Go.ANEW) and attached.step is not None:
            self.fences.append((attached.step.step_id, attached.step.fence))

    def do_write(self) -> None:
        step = self._step()
        if step is None:
            return
        own = [row for row in self.scene.view.actions if row.step_id == step.step_id and row.twin_of is None]
        seq = max((row.seq for row in own), default=0) + 1
        ended = [Outcome(self.rng.randint(1, seq), self.rng.choice(("DONE", "FAILED", "IN_DOUBT")))]
        count = self.rng.choice((1, 3))
        intents = [self.scene.intent(step, seq + more, timeout_seconds=0.0) for more in range(count)]
        written = self.scene.steps.write_forward(step, ended, intents)
        self.begun += [(step.step_id, step.generation, begun) for begun in written.begun]

    def do_retry(self) -> None:
        step = self._step()
        if step is not None:
            seq = self.rng.randint(1, 3)
            intent = self.scene.intent(step, seq, max_tries=9, idempotent=True, timeout_seconds=0.0)
            self.scene.steps.retry_if_allowed(step, intent)

    def do_beat(self) -> None:
        step = self._step()
        if step is not None:
            self.scene.steps.heartbeat_if_held(step, 0.1, Checkpoint('"c"', 1))

    def do_end(self) -> None:
        step = self._step()
        if step is not None and self.rng.random() < 0.5:
            self.scene.steps.finish_if_held(step, None, False)
        elif step is not None:
            self.scene.steps.stop_if_held(step)

    def do_late(self) -> None:
        step = self._step()
        if step is None:
            return
        mine = [row for row in self.scene.view.actions if row.step_id == step.step_id]
        if mine:
            action = self.rng.choice(mine)
            older = StepRow(**{**step.__dict__, "generation": action.generation})
            state, tries = self.rng.choice(("DONE", "FAILED")), self.rng.randint(1, action.tries)
            outcome = Outcome(action.seq, state, tries=tries)
            self.scene.lates.record_late(older, outcome, idempotent=False)

    def do_stop(self) -> None:
        if self.rng.random() < 0.3:
            keep, now = self.rng.random() < 0.3, self.rng.random() < 0.5
            self.scene.requests.cancel(*self.scene.run, actor="ann", keep=keep, stop_now=now)
        elif self.rng.random() < 0.3:
            self.scene.requests.undo(*self.scene.run, actor="ann", stop_now=self.rng.random() < 0.5)
        elif self.rng.random() < 0.3:
            self.scene.requests.undo(*self.scene.run, actor="hook", cause="marked_failed", clear_number=99)

    def do_run_end(self) -> None:
        if self.rng.random() < 0.5:
            self.scene.runs.fail_and_hint(*self.scene.run, cause="failure", clear_number=99)
        else:
            self.scene.runs.complete_if_over(*self.scene.run)
        self.scene.runs.mark_step_if_running(*self.scene.run, "car", -1)

    def do_hold(self) -> None:
        self.scene.runs.fail_and_hint(*self.scene.run, cause="failure", clear_number=99)
        self.scene.sweeps.hold_if_mass_outage(causes=["failure"], threshold=0, window_seconds=60)
        self.scene.requests.release(*self.scene.run, actor="ann")

    def do_undo(self) -> None:
        saga = self.scene.reader.saga(*self.scene.run)
        open_now = [row for row in self.scene.view.requests if row.state in ("HINTED", "REQUESTED", "FROZEN")]
        if not open_now:
            self.scene.settles.ask_again_if_due(saga.saga_id)
            return
        uuid = open_now[0].request_uuid
        owner = self.rng.choice(("undo__1", "undo__2"))
        self.scene.freezes.freeze_if_quiet(uuid, owner, owner_is_over=self.rng.random() < 0.2)
        task = self.rng.choice(list(TASKS))
        attached = self.scene.undos.attach_undo_if_in_order(
            uuid, task, -1, owner, lease_seconds=15, host="h", pid=1
        )
        if attached is not None:
            for row in attached.open_actions:
                self._compensate(attached, row)
        self.scene.settles.settle_if_all_settled(uuid, owner)

    def _compensate(self, attached: Any, row: Any) -> None:
        if row.state == "IN_DOUBT":
            state = self.rng.choice(("DONE", "FAILED"))
            self.scene.steps.verified_if_held(attached.step, row.action_id, state, None, "probe")
        if self.scene.undos.write_undo(attached, None, self.scene.next_try(row))[1] is not None:
            ended = self.rng.choice(
                (
                    EndedTry(row.action_id, "COMPENSATED"),
                    EndedTry(row.action_id, "COMPENSATION_FAILED", failed=True),
                    EndedTry(row.action_id, "COMPENSATING", reconcile_seconds=0.05),
                )
            )
            self.scene.undos.write_undo(attached, ended, None)

    def do_sweep(self) -> None:
        saga_id = self.scene.reader.saga(*self.scene.run).saga_id
        for row in self.scene.reader.lost_leases():
            self.scene.sweeps.stop_if_lost(row["saga_id"], row["step_id"])
        self.scene.sweeps.suspend_if_quiet(saga_id)
        if self.rng.random() < 0.1:
            over = (
                "UPDATE airflow_saga.saga SET deadline_at = clock_timestamp() WHERE deadline_at IS NOT NULL"
            )
            self.scene.sql(over)
        self.scene.settles.expire_if_past_deadline(saga_id)

    def do_resolve(self) -> None:
        residual = self.scene.reader.residual(self.scene.reader.saga(*self.scene.run).saga_id)
        if residual:
            to = self.rng.choice(("COMPENSATED", "ACCEPTED", "DONE", "FAILED"))
            action_id = self.rng.choice(residual).action_id
            self.scene.resolves.resolve(*self.scene.run, action_id, to=to, actor="ann", note_text="seen")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_storm_of_verbs_deadlocks_nowhere_and_loses_nothing(database_url: str) -> None:
    with connect(database_url) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET deadlock_timeout = '20ms'".encode())
    storms = [Storm(database_url, seed) for seed in range(6)]
    until = time.monotonic() + STORM_SECONDS
    with ThreadPoolExecutor(len(storms)) as pool:
        list(pool.map(lambda storm: storm.run(until), storms))
    done: Counter[str] = sum((storm.done for storm in storms), Counter())
    for name in (name for name in dir(Storm) if name.startswith("do_")):
        assert done[name] > 0, f"{name} never came through: {done}"
    begun = [key for storm in storms for key in storm.begun]
    fences = [key for storm in storms for key in storm.fences]
    with connect(database_url) as connection:
        connection.execute("SELECT pg_stat_force_next_flush()")
        deadlocks = connection.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
        rows = connection.execute(
            "SELECT step_id, generation, seq FROM airflow_saga.action WHERE twin_of IS NULL"
        ).fetchall()
        twice = connection.execute(
            "SELECT saga_id FROM airflow_saga.undo_request WHERE state IN ('HINTED', 'HELD', 'REQUESTED', 'FROZEN') "
            "GROUP BY saga_id HAVING count(*) > 1"
        ).fetchall()
    assert deadlocks == (0,)
    assert len(begun) == len(set(begun)), "nothing began twice"
    assert set(begun) == set(rows), "what began is there, and nothing else"
    assert len(fences) == len(set(fences)), "each attempt has a fence of its own"
    assert twice == []
    assert done["do_write"] > 100
    for storm in storms:
        storm.scene.close()


def test_reading_never_waits_for_a_verb(scene: Scene) -> None:
    scene.act(scene.attach(), 1)
    with connect(scene.url) as other, other.transaction():
        other.execute("SELECT 1 FROM airflow_saga.saga FOR UPDATE")
        with Address(scene.url).open() as reading:
            reading.execute("SET lock_timeout = '1s'")
            reader = Reader(reading)
            assert reader.view(*scene.run).actions
            assert reader.sagas()
            assert reader.plan(*scene.run).steps["steps"]
            assert reader.sagas_to_read()
