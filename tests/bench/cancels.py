"""A cancel: how soon a running step knows, and that nothing begins after it."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import psycopg

from airflow_saga.core.errors import SagaCancelledError
from airflow_saga.core.records import Intent, Outcome
from airflow_saga.runtime.saga import Saga
from airflow_saga.store.attach import AttachVerbs
from airflow_saga.store.connect import Address
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.steps import StepVerbs
from tests.bench.ground import attempt, step_run
from tests.bench.report import Report, p50_ms, p99_ms

SEEN_TRIALS = 100
POLLING_TRIALS = 20
LINEAR_TRIALS = 1000
BUSY_STEPS = 8


@dataclass(frozen=True)
class PolledAddress(Address):
    """A store that notifications do not reach, as behind a transaction pooler."""

    def open(self) -> psycopg.Connection:
        connection = super().open()
        connection.prepare_threshold = None
        return connection


def cancel_seen(address: Address, report: Report) -> None:
    taken = [_seen(address, address, f"seen {trial}") for trial in range(SEEN_TRIALS)]
    report.line(
        "cancel_seen",
        p50_ms=p50_ms(taken),
        p99_ms=p99_ms(taken),
        count=len(taken),
        limits={"p99_ms": ("<=", 50.0)},
    )


def cancel_seen_polling(address: Address, report: Report) -> None:
    polled = PolledAddress(address.conninfo)
    taken = [_seen(address, polled, f"polled {trial}") for trial in range(POLLING_TRIALS)]
    report.line(
        "cancel_seen_polling",
        p50_ms=p50_ms(taken),
        p99_ms=p99_ms(taken),
        count=len(taken),
        limits={"p99_ms": ("<=", 1200.0)},
    )


def _seen(asker: Address, stepper: Address, run_id: str) -> float:
    """Seconds from the cancel's return to the step's own knowledge of it."""
    began, knows = threading.Event(), [0.0]
    run = step_run(stepper, run_id)

    def body(saga: Saga) -> None:
        assert run.journal is not None
        began.set()
        assert run.journal.stop_event.wait(10)
        knows[0] = time.perf_counter()
        saga.check()

    def work() -> None:
        try:
            run.run(body)
        except SagaCancelledError:
            return

    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(10)
    time.sleep(random.uniform(0.0, 0.05))
    connection = asker.open()
    RequestVerbs(connection).cancel("bench", run_id, actor="bench")
    returned = time.perf_counter()
    thread.join(20)
    connection.close()
    return max(0.0, knows[0] - returned)


def cancel_linear(address: Address, report: Report) -> None:
    """Random cancels against busy steps: how many actions began after the request had returned."""
    context = multiprocessing.get_context("fork")
    orders = [context.SimpleQueue() for _ in range(BUSY_STEPS)]
    ready: Any = context.SimpleQueue()
    workers = [
        context.Process(target=_busy, args=(address, number, orders[number], ready), daemon=True)
        for number in range(BUSY_STEPS)
    ]
    for worker in workers:
        worker.start()
    connection = address.open()
    late, begun = 0, 0
    for trial in range(LINEAR_TRIALS):
        run_id = f"linear {trial}"
        for order in orders:
            order.put(run_id)
        for _ in workers:
            ready.get()
        time.sleep(random.uniform(0.0, 0.01))
        RequestVerbs(connection).cancel("bench", run_id, actor="bench")
        row = connection.execute("SELECT clock_timestamp()").fetchone()
        assert row is not None
        for _ in workers:
            ready.get()
        count = connection.execute(
            "SELECT count(*) FILTER (WHERE a.begun_at > %s), count(*) FROM airflow_saga.saga g "
            "JOIN airflow_saga.step s USING (saga_id) JOIN airflow_saga.action a USING (step_id) WHERE g.run_id = %s",
            (row[0], run_id),
        ).fetchone()
        assert count is not None
        late, begun = late + count[0], begun + count[1]
    for order in orders:
        order.put(None)
    for worker in workers:
        worker.join(10)
    connection.close()
    report.line(
        "cancel_linear", count=late, cancels=LINEAR_TRIALS, actions=begun, limits={"count": ("<=", 0)}
    )


def _busy(address: Address, number: int, orders: Any, ready: Any) -> None:
    """One busy step after another: begins calls as fast as the log lets it, until it is refused."""
    verbs = StepVerbs(address.open())
    while (run_id := orders.get()) is not None:
        step = AttachVerbs(verbs.connection).attach_if_allowed(attempt(run_id, f"step {number}")).step
        assert step is not None
        ready.put(number)
        seq = 1
        while True:
            outcomes = [Outcome(seq - 1, "DONE", "1")] if seq > 1 else []
            intent = Intent(seq, "do_nothing", 1, "COMPENSABLE", "f", f"k{seq}", "{}", 10.0, 0.0)
            if seq not in verbs.write_forward(step, outcomes, [intent]).begun:
                break
            seq += 1
        ready.put(number)
