"""Values on their way through the log: back as they went in, or refused before the call; never a secret."""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
import subprocess
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

from airflow_saga.core.declare import action
from airflow_saga.core.errors import (
    ParamsNotKeptError,
    ResultNotStoredError,
    SecretInParamsError,
    ValueNotKeptError,
)
from airflow_saga.core.records import ActionRecord
from airflow_saga.core.secret import Secret, set_secret_resolver
from tests.runtime import deeds
from tests.runtime.lab import LIMITS, Lab
from tests.support.postgres import PostgresServer

SEEN: list[ActionRecord] = []
CALLS: list[Any] = []
RESULTS: list[Any] = []


@pytest.fixture(autouse=True)
def _anew() -> None:
    for memory in (SEEN, CALLS, RESULTS):
        memory.clear()


def remember(record: ActionRecord) -> None:
    SEEN.append(record)


@action(compensate=remember, timeout=deeds.TIMEOUT, undo_retry=deeds.ONCE)
def keeps(value: Any) -> Any:
    CALLS.append(value)
    return RESULTS[0] if RESULTS else value


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Seat:
    row: int
    letter: str


FOLD = datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Paris"))
VALUES: dict[str, Any] = {
    "nul": "a\x00b",
    "surrogate": "\ud800",
    "bytes": b"\xff\x00",
    "decimal": Decimal("12345678901234567.89"),
    "fold": FOLD,
    "aware": datetime(2026, 1, 1, tzinfo=UTC),
    "date": date(2026, 2, 28),
    "uuid": UUID(int=7),
    "large": 2**70,
    "infinity": math.inf,
    "enum": Color.RED,
    "dataclass": Seat(3, "A"),
    "tuple": (1, (2, "x")),
    "tuple keys": {(1, "a"): "b"},
    "set": {1, 2, 3},
    "deep": {"a": [{"b": (Decimal("0.10"), b"\x00")}]},
}


@pytest.mark.parametrize("name", list(VALUES))
def test_c47_c48_a_value_comes_back_equal_in_type_and_value(lab: Lab, name: str) -> None:
    value = VALUES[name]

    def body(saga: Any) -> None:
        keeps(value)
        raise KeyError("again")

    lab.fails(body, KeyError)
    replayed = []
    lab.step(lambda saga: replayed.append(keeps(value)), try_number=2)
    assert len(CALLS) == 1
    lab.undo()
    for back in (replayed[0], SEEN[0].params["value"], SEEN[0].result):
        assert back == value
        assert type(back) is type(value)
    if name == "fold":
        assert SEEN[0].params["value"].fold == 1
        assert SEEN[0].params["value"].tzinfo == FOLD.tzinfo


def test_c48_nan_comes_back_as_nan(lab: Lab) -> None:
    lab.step(lambda saga: keeps(math.nan) and None)
    lab.undo()
    assert math.isnan(SEEN[0].params["value"])
    assert math.isnan(SEEN[0].result)


def test_params_that_cannot_be_kept_are_refused_before_the_call(lab: Lab) -> None:
    problem = lab.fails(lambda saga: keeps({"a": [object()]}), ParamsNotKeptError)
    assert "value" in str(problem)
    assert CALLS == []
    assert lab.states() == []


def test_a_result_that_cannot_be_kept_leaves_the_effect_recorded_and_undoable(lab: Lab) -> None:
    RESULTS.append(object())
    lab.fails(lambda saga: keeps(1), ResultNotStoredError)
    (row,) = lab.actions()
    assert (row.state, row.result_lost) == ("DONE", True)
    lab.fails(lambda saga: keeps(1), ResultNotStoredError, try_number=2)
    assert len(CALLS) == 1
    assert lab.undo().saga.state == "CANCELLED"
    assert (SEEN[0].result, SEEN[0].result_lost) == (None, True)


@pytest.mark.parametrize("megabytes", [5, 64])
def test_c50_a_large_result_is_kept_or_said_to_be_too_large_once(lab: Lab, megabytes: int) -> None:
    RESULTS.append("x" * (megabytes * 1024 * 1024))
    if megabytes == 5:
        lab.step(lambda saga: len(keeps(1)))
    else:
        problem = lab.fails(lambda saga: keeps(1), ResultNotStoredError)
        assert "max_value_bytes" in str(problem)
    assert len(CALLS) == 1
    assert lab.undo().saga.state == "CANCELLED"
    assert SEEN[0].result_lost is (megabytes == 64)
    if megabytes == 5:
        assert SEEN[0].result == RESULTS[0]


def test_params_that_are_too_large_are_refused_before_the_call(lab: Lab) -> None:
    limits = dataclasses.replace(LIMITS, max_value_bytes=1000)
    problem = lab.fails(lambda saga: keeps("x" * 2000), ValueNotKeptError, limits=limits)
    assert "1000" in str(problem)
    assert CALLS == []


def test_an_output_that_cannot_be_kept_does_not_undo_what_was_done(lab: Lab) -> None:
    value = object()
    assert lab.step(lambda saga: [keeps(1), value][1]).output is value
    assert lab.step_state() == "SUCCEEDED"
    assert lab.view().steps[0].output_lost


# -- secrets --------------------------------------------------------------------------------------------------------

PLANTED = "S3cr3t-XYZ"


@pytest.mark.parametrize(
    "value", [PLANTED, f"pw={PLANTED}!", {"deep": [{"er": (PLANTED,)}]}, PLANTED.encode(), {PLANTED: 1}]
)
def test_a_secret_in_params_is_refused_before_the_call(lab: Lab, value: Any) -> None:
    lab.known_secrets = [PLANTED]
    problem = lab.fails(lambda saga: keeps(value), SecretInParamsError)
    assert PLANTED not in str(problem)
    assert CALLS == []


@action(compensate=remember, timeout=deeds.TIMEOUT, retry=deeds.ONCE, undo_retry=deeds.ONCE)
def raises_it(kind: str) -> None:
    raise RuntimeError(f"login with {PLANTED} failed")


def remember_and_raise(record: ActionRecord) -> None:
    raise RuntimeError(f"refund with {PLANTED} failed")


@action(compensate=remember_and_raise, timeout=deeds.TIMEOUT, undo_retry=deeds.ONCE)
def undone_loudly(kind: str) -> dict[str, Any]:
    return {"session": PLANTED, "raw": PLANTED.encode(), "id": 3}


@action(compensate=remember, timeout=deeds.TIMEOUT)
def logs_in(password: Secret) -> str:
    CALLS.append(password.reveal())
    return "in"


def test_c52_a_planted_secret_is_in_no_table_and_no_log(
    own_lab: Lab, postgres_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    lab = own_lab
    lab.known_secrets = [PLANTED]
    current = [PLANTED]
    set_secret_resolver(lambda conn_id, field: current[0])
    caplog.set_level(logging.DEBUG)

    def body(saga: Any) -> dict[str, Any]:
        logs_in(Secret("bank"))
        kept = undone_loudly("x")
        with pytest.raises(SecretInParamsError):
            saga.checkpoint({"pw": PLANTED})
        with pytest.raises(SecretInParamsError):
            keeps({"pw": PLANTED})
        with pytest.raises(RuntimeError):
            raises_it("x")
        return kept

    try:
        lab.step(body)
        current[0] = "rotated-" + PLANTED
        settled = lab.undo()
    finally:
        set_secret_resolver(None)
    assert CALLS == [PLANTED]
    assert settled.saga.state == "PARTIALLY_CANCELLED"
    record = next(record for record in SEEN if record.name == "logs_in")
    assert record.params["password"] == Secret("bank")
    assert PLANTED not in caplog.text
    dump = _dump(postgres_server, lab.url)
    assert "undone_loudly" in dump, "the dump holds the log"
    assert PLANTED not in dump
    assert PLANTED.encode().hex() not in dump


def _dump(server: PostgresServer, url: str) -> str:
    program = Path(server._bin_dir) / "pg_dump"
    if program.exists():
        done = subprocess.run([program, "--inserts", url], capture_output=True, check=True)
        return done.stdout.decode(errors="surrogateescape")
    import psycopg

    text = ""
    with psycopg.connect(url) as connection:
        tables = connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'airflow_saga'"
        ).fetchall()
        for (table,) in tables:
            with connection.cursor().copy(f"COPY airflow_saga.{table} TO STDOUT".encode()) as copy:
                text += b"".join(bytes(part) for part in copy).decode(errors="surrogateescape")
    return text
