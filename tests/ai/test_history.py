"""Whatever a conversation looks like, what is sent of it is one that a provider takes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)

from airflow_saga.ai import last_rounds, paired
from airflow_saga.ai.history import INTERRUPTED


@st.composite
def conversations(draw: st.DrawFn) -> list[ModelMessage]:
    """A whole one: each round a prompt, some answers with calls and their results, and an answer in words."""
    messages: list[ModelMessage] = []
    number = 0
    for each in range(draw(st.integers(1, 5))):
        parts: list[Any] = [SystemPromptPart("Be brief.")] if each == 0 and draw(st.booleans()) else []
        messages.append(ModelRequest(parts=[*parts, UserPromptPart(f"round {each}")]))
        for _ in range(draw(st.integers(0, 3))):
            asked = [
                ToolCallPart("tool", {"n": number + i}, f"c{number + i}")
                for i in range(draw(st.integers(1, 3)))
            ]
            number += len(asked)
            messages.append(ModelResponse(parts=asked))
            messages.append(
                ModelRequest(
                    parts=[ToolReturnPart("tool", f"r{c.tool_call_id}", c.tool_call_id) for c in asked]
                )
            )
        messages.append(ModelResponse(parts=[TextPart(f"answer {each}")]))
    return messages


def is_whole(messages: list[ModelMessage]) -> bool:
    """What a provider checks: calls are answered at once, all of them, and nothing else is."""
    waiting: set[str] = set()
    for message in messages:
        if isinstance(message, ModelResponse):
            if waiting:
                return False
            waiting = {part.tool_call_id for part in message.tool_calls}
            continue
        answered = [part.tool_call_id for part in message.parts if isinstance(part, ToolReturnPart)]
        if set(answered) != waiting or len(answered) != len(waiting):
            return False
        waiting = set()
    return not waiting


@given(conversations())
def test_a_whole_conversation_is_left_as_it_is(messages: list[ModelMessage]) -> None:
    assert paired(messages) == messages


@settings(max_examples=300)
@given(conversations(), st.data())
def test_a_conversation_cut_anywhere_is_made_whole(messages: list[ModelMessage], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(messages) - 1))
    end = data.draw(st.integers(begin, len(messages)))
    left_out = data.draw(st.sets(st.integers(0, len(messages) - 1), max_size=2))
    torn = [
        message for place, message in enumerate(messages) if begin <= place < end and place not in left_out
    ]
    if torn and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(torn) - 1))
        some = torn[place]
        if len(some.parts) > 1:
            torn[place] = type(some)(parts=some.parts[: data.draw(st.integers(1, len(some.parts) - 1))])
    whole = paired(torn)
    assert is_whole(whole), whole
    kept = [part for message in torn for part in message.parts if isinstance(part, UserPromptPart | TextPart)]
    assert kept == [p for m in whole for p in m.parts if isinstance(p, UserPromptPart | TextPart)]
    calls = [p for m in torn for p in m.parts if isinstance(p, ToolCallPart)]
    assert calls == [p for m in whole for p in m.parts if isinstance(p, ToolCallPart)]


@given(conversations(), st.integers(1, 4))
def test_the_last_rounds_keep_pairs_and_the_system_prompt(messages: list[ModelMessage], keep: int) -> None:
    kept = last_rounds(messages, keep)
    assert is_whole(kept)
    prompts = [p.content for m in messages for p in m.parts if isinstance(p, UserPromptPart)]
    assert [p.content for m in kept for p in m.parts if isinstance(p, UserPromptPart)] == prompts[-keep:]
    system = [p for m in messages for p in m.parts if isinstance(p, SystemPromptPart)]
    assert [p for m in kept for p in m.parts if isinstance(p, SystemPromptPart)] == system


def test_a_lost_result_is_what_the_log_has_and_else_says_that_nobody_knows() -> None:
    call = ToolCallPart("tool", {"n": 1}, "c1")
    torn: list[ModelMessage] = [
        ModelRequest(parts=[UserPromptPart("hi")]),
        ModelResponse(parts=[call]),
    ]
    found = paired(torn, lambda asked: {"found": asked.args_as_dict()["n"]})
    assert [p.content for p in found[-1].parts] == [{"found": 1}]  # type: ignore[union-attr]
    assert [p.content for p in paired(torn)[-1].parts] == [INTERRUPTED]  # type: ignore[union-attr]
