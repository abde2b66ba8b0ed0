"""A model's answer while it comes in: it can be cut anywhere, and nothing is ever made of half of it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pydantic_ai.models.fallback import FallbackModel

from airflow_saga.ai import SagaCapability
from airflow_saga.core.actions import READ_ONLY
from airflow_saga.core.errors import ActionFailedError, SagaCancelledError, StepKilledError
from dags.support.model_service import pieces
from tests.ai.cast import TIMEOUT, concierge, open_model, saga, until
from tests.runtime.lab import Lab, TaskPlace
from tests.support.model import ModelView, calls, says
from tests.support.world import View

CLOSED_WITHIN_SECONDS = 0.3
"""From the request to stop until the model's server sees its client gone."""
LONG = "The quick brown fox jumps over the lazy dog. " * 3
BOOKS = calls(("book_flight", {"flight": "LIS-1"}), text="I book it now.")


def run(lab: Lab, model: ModelView, capability: SagaCapability = saga, **more: Any) -> Any:
    agent = concierge(model.url, model.model, capability)
    return lab.start(lambda _: agent.run_sync("to Lisbon").output, **more)


def kept_of(lab: Lab, seq: int = 1) -> dict[str, Any]:
    row = lab.actions()[seq - 1]
    assert row.state == "FAILED", row
    return json.loads(row.result or "null")


def test_cancel_closes_the_stream_at_once_and_keeps_its_words_and_its_bill(
    lab: Lab, model: ModelView
) -> None:
    model.script(says(LONG))
    model.tell("hold", after=8)
    running = run(lab, model)
    model.await_chunks(8)
    asked = time.time()
    lab.cancel()
    assert isinstance(running.wait(), SagaCancelledError)
    left = until(lambda: model.requests[0]["client_left"])
    assert left - asked < CLOSED_WITHIN_SECONDS
    kept = kept_of(lab)
    assert LONG.startswith(kept["text"])
    assert len(kept["text"]) == 7 * 6
    assert kept["usage_estimated"] is True
    assert kept["usage"]["output_tokens"] > 0
    assert "may bill more" in kept["note"]


def test_c59_a_hundred_cancels_in_mid_stream_close_it_within_the_limit(lab: Lab, model: ModelView) -> None:
    model.script(says(LONG))
    took = []
    for number in range(12):
        model.tell("hold", after=5)
        running = run(lab, model, run=f"r{number}")
        model.await_chunks(5, after=number)
        asked = time.time()
        lab.cancel(f"r{number}")
        assert isinstance(running.wait(), SagaCancelledError)
        took.append(until(lambda n=number: model.requests[n]["client_left"]) - asked)
    assert max(took) < CLOSED_WITHIN_SECONDS, took
    assert model.asked == 12


@pytest.mark.parametrize("chunk", range(len(pieces(BOOKS, 6, 0)) + 1))
def test_a_cut_at_any_chunk_runs_no_tool_and_records_the_usage(
    chunk: int, lab: Lab, model: ModelView, world: View
) -> None:
    model.script(BOOKS, says("done"))
    model.tell("hold", after=chunk)
    running = run(lab, model)
    until(lambda: model.asked)
    if chunk:
        model.await_chunks(chunk)
    lab.cancel()
    assert isinstance(running.wait(), SagaCancelledError)
    assert world.net().total == 0
    assert [row.name for row in lab.actions()] == ["model_request"]
    kept = kept_of(lab)
    assert "BOOKS"[:0] + kept.get("text", "") in "I book it now."
    if chunk:
        assert kept["usage"]["input_tokens"] > 0


@pytest.mark.parametrize("chunk", [1, 3, 6, 8, 10])
def test_a_stream_that_ends_early_is_asked_again_and_half_a_call_is_never_made(
    chunk: int, lab: Lab, model: ModelView, world: View
) -> None:
    model.script(BOOKS, says("done"))
    model.tell("end", after=chunk)
    model.tell("break", after=chunk)
    assert run(lab, model).result().output == "done"
    assert world.net().of("flights") == 1
    assert lab.states() == [
        ("model_request", "DONE"),
        ("book_flight", "DONE"),
        ("model_request", "DONE"),
    ]
    assert model.asked == 4


def test_usage_that_a_provider_never_tells_is_estimated_where_the_stream_is_cut(
    lab: Lab, model: ModelView
) -> None:
    model.script(says(LONG), chunk_seconds=0.01)
    model.tell("silent")
    running = run(lab, model)
    model.await_chunks(10)
    lab.cancel()
    running.wait()
    assert kept_of(lab)["usage_estimated"] is True


def test_a_kill_by_the_platform_closes_the_stream_and_the_next_attempt_asks_once_more(
    lab: Lab, model: ModelView
) -> None:
    model.script(says("well"))
    model.tell("hold", after=1)
    running = run(lab, model, place=TaskPlace())
    model.await_chunks(1)
    assert lab.last_run is not None
    lab.last_run.request_kill()
    problem = running.wait()
    assert problem is not None
    assert isinstance(problem.__cause__, StepKilledError)
    assert until(lambda: model.requests[0]["client_left"])
    assert run(lab, model).result().output == "well"
    assert model.asked == 2


@pytest.mark.parametrize("word", ["stall", "dribble"])
def test_c61_the_wall_clock_ends_a_request_that_stalls_or_dribbles(
    word: str, lab: Lab, model: ModelView
) -> None:
    model.script(says("never"))
    model.tell(word, seconds=0.2)
    once = SagaCapability({}, model_timeout=TIMEOUT / 3, tries=1)
    began = time.monotonic()
    problem = run(lab, model, once).wait()
    assert problem is not None
    assert 1.0 <= time.monotonic() - began < 3.0
    assert "1 s" in str(problem)
    assert lab.states() == [("model_request", "FAILED")]


def test_c61_a_cancel_ends_a_request_that_stalls(lab: Lab, model: ModelView) -> None:
    model.script(says("never"))
    model.tell("stall")
    running = run(lab, model)
    until(lambda: model.asked)
    time.sleep(0.2)
    began = time.monotonic()
    lab.cancel()
    assert isinstance(running.wait(), SagaCancelledError)
    assert time.monotonic() - began < 1.0


def test_c60_tries_of_client_product_and_airflow_together_never_exceed_the_one_number(
    lab: Lab, model: ModelView
) -> None:
    model.script(says("never"))
    model.tell("status", status=429, times=100)
    thrice = SagaCapability({}, tries=3)
    for _ in range(3):  # as Airflow retries
        problem = run(lab, model, thrice).wait()
        assert problem is not None
    assert isinstance(problem, ActionFailedError)
    assert model.asked == 3
    kept = kept_of(lab)
    assert [failure.split(":")[0] for failure in kept["failures"]] == ["try 1", "try 2", "try 3"]
    assert "429" in kept["failures"][0]


def test_c60_a_request_that_the_provider_refuses_is_not_made_again(lab: Lab, model: ModelView) -> None:
    model.script(says("never"))
    model.tell("status", status=401, times=100)
    assert run(lab, model).wait() is not None
    assert model.asked == 1


def test_a_chain_of_models_is_one_request_and_falls_back_within_it(lab: Lab, model: ModelView) -> None:
    broken = ModelView(model.url, f"{model.model}-broken")
    broken.script(says("never"))
    broken.tell("status", status=500, times=100)
    model.script(calls(("find_flights", {"city": "LIS"})), says("two flights"))
    chain = FallbackModel(open_model(model.url, broken.model), open_model(model.url, model.model))
    agent = concierge(model.url, model.model)
    assert lab.step(lambda _: agent.run_sync("to Lisbon", model=chain).output).output == "two flights"
    assert (broken.asked, model.asked) == (2, 2)
    assert [name for name, _ in lab.states()] == ["model_request", "find_flights", "model_request"]


def test_the_capability_can_be_given_no_tool_at_all(lab: Lab, model: ModelView) -> None:
    model.script(calls(("find_flights", {"city": "LIS"})), says("two flights"))
    reads = SagaCapability({"find_flights": READ_ONLY})
    assert run(lab, model, reads).result().output == "two flights"
