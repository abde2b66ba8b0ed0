"""One request to a model that cannot stream, or breaks while it does: how often it is asked, and what is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelResponse, TextPart
from pydantic_ai.models import ModelRequestParameters

from airflow_saga.ai.requests import Exchange


class Breaks:
    """A stream that ends in the error of a model that cannot stream."""

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        raise NotImplementedError("this part of the answer is not known here")


class Model:
    """Counts what it is asked without a stream."""

    def __init__(self, *, streams: bool, fails: Exception | None = None) -> None:
        self.asked, self._streams, self._fails = 0, streams, fails

    @asynccontextmanager
    async def request_stream(self, *given: Any) -> AsyncIterator[Breaks]:
        if not self._streams:
            raise NotImplementedError("no streams")
        yield Breaks()

    async def request(self, *given: Any) -> ModelResponse:
        self.asked += 1
        if self._fails is not None:
            raise self._fails
        return ModelResponse([TextPart("hello")])


def exchange(model: Model) -> Exchange:
    made: Any = Exchange
    return made(model, [], None, ModelRequestParameters(), None, {})  # type: ignore[no-any-return]


def test_a_model_that_cannot_stream_is_asked_without_one() -> None:
    model = Model(streams=False)
    answer = asyncio.run(exchange(model).ask())
    assert (model.asked, answer.parts[0].content) == (1, "hello")  # type: ignore[union-attr]


def test_a_stream_that_breaks_is_not_asked_a_second_time_within_one_try() -> None:
    model = Model(streams=True)
    asked = exchange(model)
    with pytest.raises(NotImplementedError):
        asyncio.run(asked.ask())
    assert (model.asked, len(asked.failures)) == (0, 1)


def test_a_refusal_of_a_model_that_cannot_stream_is_kept_and_final() -> None:
    asked = exchange(Model(streams=False, fails=ModelHTTPError(401, "m")))
    with pytest.raises(ModelHTTPError) as refused:
        asyncio.run(asked.ask())
    assert len(asked.failures) == 1
    assert refused.value.final  # type: ignore[attr-defined]
