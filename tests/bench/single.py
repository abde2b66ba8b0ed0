"""One step alone: what recording, undoing and resuming an action costs."""

from __future__ import annotations

import time
from typing import Any

from airflow_saga.core.records import ActionRecord
from airflow_saga.runtime.saga import Saga
from airflow_saga.runtime.undo import StepUndo
from airflow_saga.store.connect import Address
from airflow_saga.store.freeze import Freeze, FreezeVerbs
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.settle import SettleVerbs
from tests.bench.ground import KNOWN_SECRETS, PARAMS, Floor, do_nothing, run_step, step_run, undone
from tests.bench.report import Report, p50_ms, p99_ms

ACTIONS = 3000
BLOCK = 50


def action_overhead(address: Address, report: Report) -> None:
    """A no-op effectful action in a sync step, in blocks that alternate with the floor."""
    floor = Floor(address)
    taken: list[float] = []
    cpu = [0.0]
    run = step_run(address, "overhead")
    commits: list[int] = []

    def body(saga: Saga) -> None:
        assert run.journal is not None
        number = 0
        for _ in range(ACTIONS // BLOCK):
            cpu_began, commits_began = time.process_time(), run.journal.commits
            for _ in range(BLOCK):
                began = time.perf_counter()
                do_nothing(number, PARAMS)
                taken.append(time.perf_counter() - began)
                number += 1
            cpu[0] += time.process_time() - cpu_began
            commits.append(run.journal.commits - commits_began)
            for _ in range(BLOCK):
                floor.measure()

    run.run(body)
    floor.close()
    report.line(
        "action_overhead",
        p50_ms=p50_ms(taken),
        p99_ms=p99_ms(taken),
        ratio=p50_ms(taken) / p50_ms(floor.seconds),
        count=len(taken),
        floor_p50_ms=p50_ms(floor.seconds),
        commits_per_action=sum(commits) / len(taken),
        cpu_ms=cpu[0] / len(taken) * 1000,
        limits={"ratio": ("<=", 1.8), "commits_per_action": ("<=", 1.02), "cpu_ms": ("<=", 0.3)},
    )


def action_overhead_10000(address: Address, report: Report) -> None:
    """Whether the 10,000th action of a step costs what the 100th does."""
    taken: list[float] = []

    def body(saga: Saga) -> None:
        for number in range(10_000):
            began = time.perf_counter()
            do_nothing(number, PARAMS)
            taken.append(time.perf_counter() - began)

    run_step(address, "ten thousand", body)
    early, late = taken[100:1100], taken[9000:]
    report.line(
        "action_overhead_10000",
        p50_ms=p50_ms(late),
        p99_ms=p99_ms(late),
        ratio=p50_ms(late) / p50_ms(early),
        count=len(taken),
        limits={"ratio": ("<=", 1.2)},
    )


def undo_overhead(address: Address, report: Report) -> None:
    """From the end of one no-op compensation to the beginning of the next; the floor is measured inside of them."""
    run_step(address, "undo", lambda saga: [do_nothing(number, PARAMS) for number in range(1500)] and None)
    floor = Floor(address)
    taken: list[float] = []
    ended = [0.0]

    def watch(record: ActionRecord) -> None:
        now = time.perf_counter()
        if ended[0]:
            taken.append(now - ended[0])
        floor.measure()
        ended[0] = time.perf_counter()

    undone.append(watch)
    try:
        _undo(address, "undo")
    finally:
        undone.remove(watch)
    floor.close()
    report.line(
        "undo_overhead",
        p50_ms=p50_ms(taken),
        p99_ms=p99_ms(taken),
        ratio=p50_ms(taken) / p50_ms(floor.seconds),
        count=len(taken),
        floor_p50_ms=p50_ms(floor.seconds),
        limits={"ratio": ("<=", 1.8)},
    )


def _undo(address: Address, run_id: str) -> None:
    connection = address.open()
    try:
        request = RequestVerbs(connection).undo("bench", run_id, actor="bench").request
        assert request is not None
        frozen = FreezeVerbs(connection).freeze_if_quiet(request.request_uuid, "bench")
        assert frozen.outcome is Freeze.FROZEN
        limits = step_run(address, run_id).limits
        StepUndo(address, request.request_uuid, "bench", "step", -1, limits, KNOWN_SECRETS).run()
        settled = SettleVerbs(connection).settle_if_all_settled(request.request_uuid, "bench")
        assert settled is not None
        assert not settled.residual
    finally:
        connection.close()


def resume_1000(address: Address, report: Report) -> None:
    _resume(address, report, 1000, limit_ms=20.0)


def resume_10000(address: Address, report: Report) -> None:
    _resume(address, report, 10_000, limit_ms=200.0)


def _resume(address: Address, report: Report, actions: int, *, limit_ms: float) -> None:
    """Attach to a step with so many DONE actions and get past all of them."""
    taken: list[float] = []
    name = f"resume_{actions}"

    def first(saga: Saga) -> None:
        for number in range(actions):
            do_nothing(number, PARAMS)
        raise RuntimeError("stop here")

    _stopped(address, name, 1, first)
    for try_number in range(2, 22):
        began = time.perf_counter()

        def again(saga: Saga, began: float = began) -> None:
            for number in range(actions):
                do_nothing(number, PARAMS)
            taken.append(time.perf_counter() - began)
            raise RuntimeError("stop here")

        _stopped(address, name, try_number, again)
    report.line(
        name,
        p50_ms=p50_ms(taken),
        p99_ms=p99_ms(taken),
        count=len(taken),
        limits={"p50_ms": ("<=", limit_ms)},
    )


def checkpoint_10000(address: Address, report: Report) -> None:
    """What a checkpoint costs its caller, in a loop that does nothing else."""
    taken: list[float] = []

    def body(saga: Saga) -> None:
        for number in range(10_000):
            began = time.perf_counter()
            saga.checkpoint({"page": number, "of": "the handbook"})
            taken.append(time.perf_counter() - began)

    run_step(address, "checkpoints", body)
    report.line(
        "checkpoint_10000",
        p50_ms=p50_ms(taken),
        p99_ms=p99_ms(taken),
        count=len(taken),
        limits={"p50_ms": ("<=", 0.02)},
    )


def _stopped(address: Address, run_id: str, try_number: int, body: Any) -> None:
    try:
        step_run(address, run_id, try_number=try_number).run(body)
    except RuntimeError as stop:
        if str(stop) != "stop here":
            raise
