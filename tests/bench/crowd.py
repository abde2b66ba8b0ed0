"""Many processes logging at once, against as many that run the same statement with bare psycopg, in the same run."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from airflow_saga.core.records import Intent, Outcome
from airflow_saga.runtime.saga import Saga
from airflow_saga.store.attach import AttachVerbs
from airflow_saga.store.connect import Address
from airflow_saga.store.queries import Q
from airflow_saga.store.steps import write_params
from tests.bench.ground import PARAMS, attempt, do_nothing, step_run
from tests.bench.report import Report

SECONDS = 4.0
ROUNDS = 4
WARM_UP = 20
"""Actions of each process before the clock starts, on both sides: how a forked process warms up is not measured."""


def concurrent(address: Address, report: Report, processes: int) -> None:
    ours, bare = 0.0, 0.0
    for number in range(ROUNDS):
        turns = [(_logging, "ours"), (_bare, "bare")]
        for work, name in (
            turns if number % 2 == 0 else reversed(turns)
        ):  # the table grows: neither is always second
            rate = _per_second(work, address, processes, f"{name} {processes} {number}")
            ours, bare = (ours + rate, bare) if work is _logging else (ours, bare + rate)
    pgbench = _pgbench(address, processes)
    report.line(
        f"concurrent_{processes}",
        ratio=ours / bare,
        count=int(ours / ROUNDS),
        per_second=ours / ROUNDS,
        bare_per_second=bare / ROUNDS,
        pgbench_ratio=None if pgbench is None else ours / ROUNDS / pgbench,
        limits={"ratio": (">=", 0.7)},
    )


def _per_second(work: Any, address: Address, processes: int, run_id: str) -> float:
    context = multiprocessing.get_context("fork")
    gate, counts = context.Barrier(processes + 1), context.SimpleQueue()
    workers = [
        context.Process(target=work, args=(address, run_id, number, gate, counts), daemon=True)
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    gate.wait(120)
    total = sum(counts.get() for _ in workers)
    for worker in workers:
        worker.join(30)
    return total / SECONDS


def _logging(address: Address, run_id: str, number: int, gate: Any, counts: Any) -> None:
    done = [0]

    def body(saga: Saga) -> None:
        for _ in range(WARM_UP):
            do_nothing(0, PARAMS)
        gate.wait(120)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            done[0] += 1
            do_nothing(done[0], PARAMS)

    step_run(address, f"{run_id} {number}").run(body)
    counts.put(done[0])


def _bare(address: Address, run_id: str, number: int, gate: Any, counts: Any) -> None:
    connection = address.open()
    step = AttachVerbs(connection).attach_if_allowed(attempt(f"{run_id} {number}")).step
    assert step is not None
    cursor = connection.cursor()
    intent = Intent(
        0, "do_nothing", 1, "COMPENSABLE", "f" * 32, "k" * 36, '{"number":1,"trip":{}}', 10.0, 0.0
    )

    def write(seq: int) -> None:
        ended = Outcome(seq - 1, "DONE", '{"id":1}') if seq > 1 else None
        cursor.execute(Q.write_forward, write_params(step, ended, (intent, None)) | {"seq": seq})
        cursor.fetchone()

    seq = 0
    for seq in range(1, WARM_UP + 1):
        write(seq)
    gate.wait(120)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        seq += 1
        write(seq)
    counts.put(seq - WARM_UP)
    connection.close()


def _pgbench(address: Address, clients: int) -> float | None:
    """Transactions per second of pgbench with one INSERT like the floor's; None where there is no pgbench."""
    program = shutil.which("pgbench") or next(
        (str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/pgbench"))), None
    )
    if program is None:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write("INSERT INTO floor (name, params) VALUES ('do_nothing', '{\"number\": 1}');\n")
        script.flush()
        done = subprocess.run(
            [
                program,
                *["-n", "-M", "prepared", "-j", "2", "-T", "4"],
                "-f",
                script.name,
                "-c",
                str(clients),
                address.conninfo,
            ],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PGCONNECT_TIMEOUT": "10"},
        )
    found = re.search(r"tps = ([\d.]+)", done.stdout)
    return float(found.group(1)) if found else None
