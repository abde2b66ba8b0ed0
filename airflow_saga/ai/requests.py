"""A model request as a READ_ONLY action: streamed, closed when the saga stops, its words and its bill kept.

The request is recorded where it leaves for the model, below everything that prepares it, so that a retry of it is one
HTTP request more and nothing else. Clients of providers retry by themselves, which nobody sees and which multiplies
with ours and with Airflow's: so they are told not to. Whatever the agent asked for, the model is always asked to
stream: only a stream can be closed in the middle.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar

from pydantic import TypeAdapter
from pydantic_ai.exceptions import ModelHTTPError, UnexpectedModelBehavior
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.models import CompletedStreamedResponse, Model, ModelRequestParameters, StreamedResponse
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import RunContext
from pydantic_ai.usage import RequestUsage

from airflow_saga.ai.fingerprints import Fingerprints, what_differs
from airflow_saga.core.actions import READ_ONLY, Action
from airflow_saga.core.declare import action
from airflow_saga.core.identity import MODEL_REQUEST
from airflow_saga.core.policies import Retry

log = logging.getLogger(__name__)

DEFAULT_MODEL_TIMEOUT = timedelta(seconds=30)
CHARACTERS_PER_TOKEN = 4
"""For an estimate where the provider told no usage."""

_RESPONSE: TypeAdapter[ModelResponse] = TypeAdapter(ModelResponse)
_NEVER_BETTER = frozenset({400, 401, 403, 404, 405, 413, 422})
"""Status codes with which a provider refuses the request itself: another try would be refused too."""


@dataclass
class Exchange:
    """One request to a model and what has come back of it so far.

    :ivar failures: of earlier tries, one line each.
    """

    model: Model
    messages: list[ModelMessage]
    settings: ModelSettings | None
    parameters: ModelRequestParameters
    run_context: RunContext[Any] | None
    params: dict[str, Any]
    stream: StreamedResponse | None = None
    response: ModelResponse | None = None
    failures: list[str] = field(default_factory=list)
    tries: int = 0

    async def ask(self) -> ModelResponse:
        """Ask the model once, by a stream; closed wherever this is cancelled.

        :raises UnexpectedModelBehavior: it ended before the model had finished; half an answer is never acted upon.
        """
        self.tries += 1
        self.stream = None
        try:
            response = await self._answered()
        except Exception as problem:
            self.failures.append(f"try {self.tries}: {type(problem).__name__}: {str(problem)[:300]}")
            log.warning(
                "a request to the model failed: %s (the client makes no tries of its own)", self.failures[-1]
            )
            if isinstance(problem, ModelHTTPError) and problem.status_code in _NEVER_BETTER:
                problem.final = True  # type: ignore[attr-defined]
            raise
        self.response = response
        return response

    async def _answered(self) -> ModelResponse:
        try:
            return await self._streamed()
        except NotImplementedError:
            if self.stream is not None:
                raise  # it had begun to stream, so that was a request: another one would be another try
        # A model that cannot stream: nothing was sent yet.
        return await self.model.request(self.messages, self.settings, self.parameters)

    async def _streamed(self) -> ModelResponse:
        async with self.model.request_stream(
            self.messages, self.settings, self.parameters, self.run_context
        ) as stream:
            self.stream = stream
            async for _ in stream:
                pass
        response = stream.get()
        if response.state == "incomplete" or not _has_ended(self.model, response):
            raise UnexpectedModelBehavior(
                "the stream ended before the model had finished its answer; nothing of it is acted upon"
            )
        return response

    def so_far(self) -> dict[str, Any] | None:
        """What has come of a request that did not end well: its words, the calls it had begun, its bill."""
        if self.tries == 0:
            return None
        kept: dict[str, Any] = {"tries": self.tries, "failures": self.failures}
        if self.stream is None:
            return kept
        response = self.stream.get()
        text = "".join(part.content for part in response.parts if isinstance(part, TextPart))
        begun = [part.tool_name for part in response.parts if isinstance(part, ToolCallPart)]
        usage, estimated = self._usage(response)
        return {
            **kept,
            "text": text,
            "tool_calls_not_made": begun,
            "usage": {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens},
            "usage_estimated": estimated,
            "note": "the stream was not read to its end: the provider may bill more than this",
        }

    def _usage(self, response: ModelResponse) -> tuple[RequestUsage, bool]:
        if response.usage.output_tokens:
            return response.usage, False
        said = sum(_length(part) for part in response.parts)
        asked = sum(_length(part) for message in self.messages for part in message.parts)
        return RequestUsage(
            input_tokens=response.usage.input_tokens or -(-asked // CHARACTERS_PER_TOKEN),
            output_tokens=-(-said // CHARACTERS_PER_TOKEN),
        ), True


def _length(part: Any) -> int:
    if isinstance(part, TextPart | ThinkingPart):
        return len(part.content)
    if isinstance(part, ToolCallPart):
        return len(part.tool_name) + len(part.args_as_json_str())
    return len(str(getattr(part, "content", "")))


def _has_ended(model: Model, response: ModelResponse) -> bool:
    """Whether the provider itself said that this is all. A stream that is cut off can look like one that ends, and
    pydantic-ai then fills in a reason of its own; what the provider said is in the details.
    """
    if model.system in ("test", "function"):  # pydantic-ai's models for tests give no reason
        return True
    told = "finish_reason" in (response.provider_details or {})
    return told or response.finish_reason == "content_filter"


@dataclass(eq=False)
class ModelRequestAction(Action[Any, Any]):
    """The action of all model requests of an agent. Called with the :class:`Exchange`."""

    closes_on_stop: ClassVar[bool] = True
    steers: ClassVar[bool] = True

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(kwargs["exchange"].params)

    def left_behind(self, kwargs: Mapping[str, Any]) -> Any:
        return kwargs["exchange"].so_far()

    def tries_told(self, kept: Iterable[Any]) -> int:
        """Only tries that failed by themselves count: one that was cut short by a stop has used up none."""
        return sum(len(each.get("failures", ())) for each in kept if isinstance(each, dict))

    def what_differs(self, recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
        return what_differs(recorded, asked)


async def _ask(*, exchange: Exchange) -> Any:
    return _RESPONSE.dump_python(await exchange.ask(), mode="json", exclude_none=True)


def model_request_action(timeout: timedelta, tries: int) -> Action[Any, Any]:
    """READ_ONLY: a model request leaves nothing behind but its bill."""
    made: Action[Any, Any] = action(
        _ask,
        compensate=READ_ONLY,
        name=MODEL_REQUEST,
        timeout=timeout,
        retry=Retry(tries=tries),
        kind=ModelRequestAction,
    )
    return made


class RecordedModel(WrapperModel):
    """A model whose requests are actions of the step that runs.

    :ivar replayed: responses that came from the log, by identity; they cost nothing in this attempt.
    """

    def __init__(
        self,
        wrapped: Model,
        request_action: Action[Any, Any],
        fingerprints: Fingerprints,
        from_log: set[str],
        replayed: list[ModelResponse],
    ) -> None:
        super().__init__(wrapped)
        self._action = request_action
        self._fingerprints = fingerprints
        self._from_log = from_log
        self._replayed = replayed

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        return await self._recorded(messages, model_settings, model_request_parameters, None)

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse]:
        """The answer is read to its end and recorded first; whoever watches the stream sees it then."""
        response = await self._recorded(messages, model_settings, model_request_parameters, run_context)
        yield CompletedStreamedResponse(
            response, model_request_parameters=model_request_parameters, replay_events=True
        )

    async def _recorded(
        self,
        messages: list[ModelMessage],
        settings: ModelSettings | None,
        parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None,
    ) -> ModelResponse:
        prepared, prepared_parameters = self.wrapped.prepare_request(settings, parameters)
        params = self._fingerprints.of_request(
            self.wrapped.model_id, messages, dict(prepared or {}), prepared_parameters, self._from_log
        )
        once = ModelSettings(**{**(settings or {}), "max_retries": 0})
        exchange = Exchange(self.wrapped, messages, once, parameters, run_context, params)
        recorded = await self._action(exchange=exchange)
        if exchange.response is not None:
            return exchange.response
        response = replace(_RESPONSE.validate_python(recorded), usage=RequestUsage())
        self._replayed.append(response)
        return response
