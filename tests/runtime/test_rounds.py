from __future__ import annotations

from types import SimpleNamespace

import pytest

from airflow_saga import last_rounds

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "calls a tool"},
    {"role": "tool", "content": "its result"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "three"},
]


def test_instructions_and_the_last_rounds_are_kept_whole() -> None:
    assert last_rounds(TALK, keep=1) == [TALK[0], TALK[7]]
    assert last_rounds(TALK, keep=2) == [TALK[0], *TALK[5:]]
    assert last_rounds(TALK, keep=3) == TALK
    assert last_rounds(TALK, keep=9) == TALK
    assert last_rounds([], keep=1) == []


def test_a_round_may_be_told_by_an_attribute_or_by_whatever_the_caller_says() -> None:
    objects = [SimpleNamespace(role="user"), SimpleNamespace(role="assistant"), SimpleNamespace(role="user")]
    assert last_rounds(objects, keep=1) == objects[2:]
    assert last_rounds([3, 1, 0, 2], keep=1, begins_round=lambda number: number == 0) == [3, 1, 0, 2]
    assert last_rounds([0, 1, 0, 2], keep=1, begins_round=lambda number: number == 0) == [0, 2]


def test_no_rounds_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="keep=0"):
        last_rounds(TALK, keep=0)
