"""Conversations that a model's provider takes: each call of a tool with its result right after it, wherever it was cut.

An agent that resumes inside its step needs none of this: its log tells the conversation again, word for word. This is
for a history that comes from elsewhere: kept in a checkpoint, handed from run to run, cut to its last rounds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    RetryPromptPart,
    SystemPromptPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)

from airflow_saga.core.actions import NOT_RECORDED
from airflow_saga.runtime.rounds import last_rounds as rounds_of

INTERRUPTED = "Interrupted: nobody knows whether this call took effect."

FindResult = Callable[[ToolCallPart], object]
"""What the log holds of a call; ``NOT_RECORDED`` if nothing."""


class Seen:
    """How much of a conversation that only grows has been looked at: a long one costs no more than what is new."""

    def __init__(self) -> None:
        self._seen: list[ModelMessage] = []

    def grown_from(self, messages: Sequence[ModelMessage]) -> int:
        """How many of its first messages were there the last time, as the same objects; 0 if any is another."""
        seen = self._seen
        same = len(messages) >= len(seen) and all(map(operator.is_, messages, seen))
        return len(seen) if same else 0

    def keep(self, messages: Sequence[ModelMessage]) -> None:
        self._seen = list(messages)


def nothing_recorded(call: ToolCallPart) -> object:
    return NOT_RECORDED


def paired(
    messages: Sequence[ModelMessage], find_result: FindResult = nothing_recorded
) -> list[ModelMessage]:
    """The same conversation, in which every call of a tool has exactly one result right after it.

    A call without one gets what the log recorded, else a result that says it was interrupted; a result without its call
    is left out; nothing else changes.

    :param messages: oldest first.
    :param find_result: what the log knows of a call.
    """
    whole: list[ModelMessage] = []
    waiting: list[ToolCallPart] = []
    for message in messages:
        if isinstance(message, ModelRequest):
            answered = _answered(message, waiting, find_result)
            waiting = []
            if answered.parts:
                whole.append(answered)
            continue
        if waiting:
            whole.append(ModelRequest(parts=[_result(call, find_result) for call in waiting]))
        whole.append(message)
        waiting = [part for part in message.parts if isinstance(part, ToolCallPart)]
    if waiting:
        whole.append(ModelRequest(parts=[_result(call, find_result) for call in waiting]))
    return whole


def _answered(
    message: ModelRequest, waiting: Sequence[ToolCallPart], find_result: FindResult
) -> ModelRequest:
    """A request that answers exactly the calls that wait, results first, in the order they were found in."""
    asked = {call.tool_call_id for call in waiting}
    seen: set[str] = set()
    results: list[ModelRequestPart] = []
    others: list[ModelRequestPart] = []
    dropped = False
    for part in message.parts:
        if isinstance(part, ToolReturnPart) or (isinstance(part, RetryPromptPart) and part.tool_name):
            if part.tool_call_id in asked and part.tool_call_id not in seen:
                seen.add(part.tool_call_id)
                results.append(part)
            else:
                dropped = True
        else:
            others.append(part)
    missing = [_result(call, find_result) for call in waiting if call.tool_call_id not in seen]
    if not missing and not dropped:
        return message
    return replace(message, parts=[*results, *missing, *others])


def _result(call: ToolCallPart, find_result: FindResult) -> ToolReturnPart:
    found = find_result(call)
    content = INTERRUPTED if found is NOT_RECORDED else found
    return ToolReturnPart(tool_name=call.tool_name, content=content, tool_call_id=call.tool_call_id)


def last_rounds(messages: Sequence[ModelMessage], keep: int) -> list[ModelMessage]:
    """The last rounds of a conversation with a pydantic-ai agent, and its system prompt.

    A round is what a user says and all that follows until the user speaks again, so calls and results stay together.

    :param messages: oldest first.
    :param keep: how many rounds, at least 1.
    :raises ValueError: ``keep`` is less than 1.
    """
    kept = rounds_of(messages, keep, begins_round=_begins_round)
    system = _system_of(messages)
    if not system or not kept or any(_system_of([message]) for message in kept):
        return kept
    first = kept[0]
    if isinstance(first, ModelResponse):
        return [ModelRequest(parts=list(system)), *kept]
    return [replace(first, parts=[*system, *first.parts]), *kept[1:]]


def _begins_round(message: ModelMessage) -> bool:
    return isinstance(message, ModelRequest) and any(isinstance(p, UserPromptPart) for p in message.parts)


def _system_of(messages: Sequence[ModelMessage]) -> list[SystemPromptPart]:
    for message in messages:
        found = [part for part in message.parts if isinstance(part, SystemPromptPart)]
        if found:
            return found
    return []
