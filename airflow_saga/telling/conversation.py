"""A request to a model as a person reads it: who was asked, what it said, which tools it called, what that cost.

The log keeps the whole answer; on one line of a timeline its first words would say nothing.
"""

from __future__ import annotations

import json
from typing import Any

from airflow_saga.core.identity import MODEL_REQUEST
from airflow_saga.telling.display import short

_WORDS = 120


def in_words(name: str, params: Any, result: Any) -> str | None:
    """One line about a recorded request to a model; None for any other action.

    :param params: as recorded, read and masked.
    :param result: the answer, or what came of it before it was cut; None if nothing did.
    """
    if name != MODEL_REQUEST or not isinstance(params, dict):
        return None
    asked = f"{params.get('model')}, message {params.get('messages')}"
    if not isinstance(result, dict):
        return asked
    said = _answer(result) if "parts" in result else _cut(result)
    return f"{asked} → {said}"


def _answer(result: dict[str, Any]) -> str:
    said = []
    for part in result["parts"]:
        if part.get("part_kind") == "text":
            said.append(f'"{short(part.get("content", ""), _WORDS)}"')
        elif part.get("part_kind") == "tool-call":
            said.append(f"calls {part.get('tool_name')}({_arguments(part.get('args'))})")
    return " ".join([", ".join(said) or "nothing", _usage(result)])


def _cut(result: dict[str, Any]) -> str:
    said = [f'cut after "{short(result["text"], _WORDS)}"'] if result.get("text") else ["no answer"]
    if result.get("tool_calls_not_made"):
        said.append(f"a call of {', '.join(result['tool_calls_not_made'])} was never made")
    if result.get("failures"):
        said.append("; ".join(result["failures"]))
    return " ".join([", ".join(said), _usage(result)])


def _usage(result: dict[str, Any]) -> str:
    usage = result.get("usage") or {}
    if not usage:
        return ""
    about = "about " if result.get("usage_estimated") else ""
    return f"({about}{usage.get('input_tokens', 0)} + {usage.get('output_tokens', 0)} tokens)"


def _arguments(args: Any) -> str:
    try:
        read = json.loads(args) if isinstance(args, str) else args
    except ValueError:
        return short(args, _WORDS)
    if not isinstance(read, dict):
        return short(read, _WORDS)
    return short(", ".join(f"{name}={json.dumps(value)}" for name, value in read.items()), _WORDS)
