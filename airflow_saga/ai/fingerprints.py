"""What a model request is recognised by: model, settings, instructions, tools and the conversation so far.

Left out is what differs between two tellings of the same conversation: times, ids (that a provider gives a tool call,
above all), usage. Results of recorded tool calls are left out too: they come from the log.

A message is looked at once, so that a request late in a long conversation costs what an early one does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from pydantic_ai.messages import (
    BaseToolCallPart,
    BaseToolReturnPart,
    ModelMessage,
    ModelRequest,
    RetryPromptPart,
    SystemPromptPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_core import to_json

from airflow_saga.ai.history import Seen

VOLATILE = frozenset(
    {
        "timestamp",
        "tool_call_id",
        "id",
        "run_id",
        "conversation_id",
        "usage",
        "metadata",
        "provider_details",
        "provider_name",
        "provider_url",
        "provider_response_id",
        "signature",
        "canonical_system",
        "model_id",
    }
)
_SETTINGS_THAT_SAY_NOTHING = frozenset(
    {"timeout", "extra_headers", "extra_body", "request_timeout", "max_retries"}
)

WORDS = {
    "model": "the model",
    "settings": "the model's settings",
    "instructions": "the instructions",
    "tools": "the tools",
    "prompt": "the prompt",
    "conversation": "the conversation so far",
}


class Fingerprints:
    """Of the requests of one run of an agent."""

    def __init__(self) -> None:
        self._seen = Seen()
        self._so_far = blake2b(digest_size=16)
        """Of the messages that were seen."""

    def of_request(
        self,
        model: str,
        messages: Sequence[ModelMessage],
        settings: Mapping[str, Any] | None,
        parameters: ModelRequestParameters,
        from_log: Collection[str],
    ) -> dict[str, Any]:
        """The parts by which it is recognised, each a short digest, so that what changed can be named.

        :param from_log: the ids of tool calls whose results come from the log.
        """
        asked = {k: v for k, v in (settings or {}).items() if k not in _SETTINGS_THAT_SAY_NOTHING}
        return {
            "model": model,
            "messages": len(messages),
            "settings": _digest(asked),
            "instructions": _digest([_instructions(messages), _plain(parameters.instruction_parts or [])]),
            "tools": _digest([_tools(parameters), str(parameters.output_mode)]),
            "prompt": _digest(_first_prompt(messages)),
            "conversation": self._of_conversation(messages, from_log),
        }

    def _of_conversation(self, messages: Sequence[ModelMessage], from_log: Collection[str]) -> str:
        begin = self._seen.grown_from(messages)
        if begin == 0:
            self._so_far = blake2b(digest_size=16)
        for message in messages[begin:]:
            parts = [_of_part(part, from_log) for part in message.parts]
            self._so_far.update(_digest([message.kind, parts]).encode())
        self._seen.keep(messages)
        return self._so_far.hexdigest()


def what_differs(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """What of a request has changed since it was recorded, in words."""
    if recorded.get("model") != asked.get("model"):
        return f"the model has changed: {recorded.get('model')} was asked, now it is {asked.get('model')}"
    changed = [word for part, word in WORDS.items() if recorded.get(part) != asked.get(part)]
    if len(changed) > 1 and WORDS["conversation"] in changed:
        changed.remove(WORDS["conversation"])  # it begins with what has changed
    return f"{' and '.join(changed)} changed" if changed else ""


def _of_part(part: Any, from_log: Collection[str]) -> Any:
    if isinstance(part, BaseToolReturnPart):
        content = None if part.tool_call_id in from_log else part.content
        return ["tool-return", part.tool_name, str(part.outcome), content]
    if isinstance(part, BaseToolCallPart):
        return ["tool-call", part.tool_name, part.args_as_dict() if part.has_content() else {}]
    if isinstance(part, RetryPromptPart):
        return ["retry", part.tool_name, part.content]
    return _plain(part)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name not in VOLATILE and not field.name.startswith("_")
        }
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _tools(parameters: ModelRequestParameters) -> list[Any]:
    return [
        [tool.name, tool.description, tool.parameters_json_schema]
        for tool in [*parameters.function_tools, *parameters.output_tools]
    ]


def _instructions(messages: Sequence[ModelMessage]) -> list[str]:
    first = next((message for message in messages if isinstance(message, ModelRequest)), None)
    return [] if first is None else [p.content for p in first.parts if isinstance(p, SystemPromptPart)]


def _first_prompt(messages: Sequence[ModelMessage]) -> Any:
    for message in messages:
        for part in message.parts:
            if isinstance(part, UserPromptPart):
                return _plain(part.content)
    return None


def _digest(value: Any) -> str:
    return blake2b(to_json(value, fallback=repr, inf_nan_mode="strings"), digest_size=16).hexdigest()
