"""Against a real small language model: what it says is nonsense, so only shapes, effects and stopping are looked at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from airflow_saga.ai import SagaCapability, ToolAction
from airflow_saga.core.actions import READ_ONLY
from airflow_saga.core.errors import SagaCancelledError
from tests.ai.cast import book_flight, concierge, find_flights, unbook, until
from tests.runtime.lab import Lab
from tests.support.small_model import SmallModel, running_small_model
from tests.support.world import View

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STOPS_WITHIN_TOKENS = 6
"""After its client left: it looks between two tokens, and this machine has much else to do."""
PATIENT = SagaCapability(
    {
        "find_flights": READ_ONLY,
        "book_flight": ToolAction(unbook, timeout=timedelta(seconds=10)),
    },
    model_timeout=timedelta(seconds=120),
)


@pytest.fixture(scope="module")
def small() -> Iterator[SmallModel]:
    with running_small_model() as small:
        yield small


def test_a_cancel_stops_the_model_itself_and_its_words_are_kept(lab: Lab, small: SmallModel) -> None:
    agent = concierge(small.url, "small", PATIENT, tools=[])
    running = lab.start(lambda _: agent.run_sync("Tell me a long story about the sea and the wind.").output)
    until(lambda: small.stats["tokens"] >= 8, 120)
    cut = small.stats["cut"]
    lab.cancel()
    assert isinstance(running.wait(30), SagaCancelledError)
    at = small.stats["tokens"]
    until(lambda: small.stats["cut"] == cut + 1, 30)
    time.sleep(1.0)
    assert small.stats["tokens"] - at <= STOPS_WITHIN_TOKENS
    (row,) = lab.actions()
    assert row.state == "FAILED"
    assert '"text":"' in (row.result or "")


def test_a_loop_with_a_tool_is_recorded_and_undone(lab: Lab, small: SmallModel, world: View) -> None:
    agent = concierge(small.url, "small", PATIENT, tools=[book_flight])
    output = lab.step(lambda _: agent.run_sync("Book the flight LIS-1.").output).output
    assert isinstance(output, str)
    names = [name for name, _ in lab.states()]
    assert names[:2] == ["model_request", "book_flight"]
    assert names[-1] == "model_request"
    assert world.net().of("flights") == names.count("book_flight")
    lab.undo()
    assert world.net().total == 0


def test_a_conversation_that_was_cut_goes_on_without_asking_again(lab: Lab, small: SmallModel) -> None:
    agent = concierge(small.url, "small", PATIENT, tools=[find_flights])
    kept: list[Any] = []

    class Cut(Exception):
        pass

    def body(_: Any) -> str:
        kept.append(agent.run_sync("Find flights to LIS.").output)
        if len(kept) == 1:
            raise Cut
        return kept[-1]

    lab.fails(body, Cut)
    asked = small.stats["asked"]
    assert lab.step(body, try_number=2).output == kept[0]
    assert small.stats["asked"] == asked
