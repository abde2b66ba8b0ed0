"""Conversations as checkpoints: the last rounds of one, and nothing torn apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Message = TypeVar("Message")


def last_rounds(
    messages: Sequence[Message], keep: int, *, begins_round: Callable[[Message], bool] | None = None
) -> list[Message]:
    """The last rounds of a conversation, for ``saga.checkpoint(last_rounds(messages, keep=10))``.

    A round is what a user says and all that follows until the user speaks again, so a tool's call and its result stay
    together. What stands before the first round (instructions) is always kept: it is small, and the model needs it.

    :param messages: oldest first.
    :param keep: how many rounds, at least 1.
    :param begins_round: whether a message begins a round; without it, one whose ``role`` (key or attribute) is "user".
    :raises ValueError: ``keep`` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: a conversation goes on from at least one round")
    begins = begins_round or _is_of_user
    starts = [place for place, message in enumerate(messages) if begins(message)]
    if len(starts) <= keep:
        return list(messages)
    return [*messages[: starts[0]], *messages[starts[-keep] :]]


def _is_of_user(message: Any) -> bool:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return bool(role == "user")
