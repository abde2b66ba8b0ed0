"""Behind a transaction pooler: no statement stays prepared, no notification comes, and it works all the same."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator

import pytest

from airflow_saga.core.errors import SagaCancelledError
from airflow_saga.runtime.saga import Saga
from tests.runtime.deeds import book
from tests.runtime.lab import LIMITS, Lab, wait_until
from tests.support.pgbouncer import find_pgbouncer, pooled
from tests.support.world import View

POLL_AND_GRACE_SECONDS = LIMITS.heartbeat_seconds + 2.0


@pytest.fixture
def pooled_lab(database_url: str, world: View) -> Iterator[Lab]:
    program = find_pgbouncer()
    if program is None:
        pytest.skip("there is no pgbouncer, and only root on a Debian can install it: C68 is NOT tested here")
    with pooled(program, database_url) as url:
        lab = Lab(url, world, f"trip-{uuid.uuid4().hex[:8]}")
        yield lab
        lab.close()


def test_c68_a_cancel_is_seen_by_polling_behind_a_transaction_pooler(
    pooled_lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    assert pooled_lab.connection.prepare_threshold is None, "the pooler was not recognised"

    def body(saga: Saga) -> None:
        for number in range(3):
            book("flights", f"seat {number}")
        while True:
            saga.check()
            time.sleep(0.01)

    with caplog.at_level(logging.WARNING):
        running = pooled_lab.start(body)
        wait_until(lambda: pooled_lab.begun() and len(pooled_lab.actions()) == 3, "three bookings")
        pooled_lab.cancel()
        asked = time.monotonic()
        problem = running.wait()
    assert isinstance(problem, SagaCancelledError)
    assert time.monotonic() - asked < POLL_AND_GRACE_SECONDS
    assert "polling every" in caplog.text
    settled = pooled_lab.carry_out(pooled_lab.view().requests[-1].request_uuid)
    assert settled.saga.state == "CANCELLED"
    assert pooled_lab.world.net().total == 0


def test_c68_a_saga_completes_and_resumes_behind_a_transaction_pooler(pooled_lab: Lab) -> None:
    def stops(saga: Saga) -> None:
        book("flights", "a")
        raise RuntimeError("stop here")

    def goes_on(saga: Saga) -> str:
        book("flights", "a")
        book("flights", "b")
        return "done"

    pooled_lab.fails(stops, RuntimeError)
    assert pooled_lab.step(goes_on, try_number=2).output == "done"
    assert len(pooled_lab.world.calls("flights")) == 2
