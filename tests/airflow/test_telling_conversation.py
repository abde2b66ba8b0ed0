"""A request to a model on one line, as `show` tells it."""

from __future__ import annotations

from airflow_saga.telling.conversation import in_words

ASKED = {"model": "openai:gpt", "messages": 3}
USAGE = {"input_tokens": 46, "output_tokens": 12}


def test_an_answer_is_its_words_its_calls_and_its_cost() -> None:
    answer = {
        "parts": [
            {"part_kind": "text", "content": "Let me look."},
            {"part_kind": "tool-call", "tool_name": "search", "args": '{"to": "LIS"}'},
        ],
        "usage": USAGE,
    }
    assert in_words("model_request", ASKED, answer) == (
        'openai:gpt, message 3 → "Let me look.", calls search(to="LIS") (46 + 12 tokens)'
    )


def test_an_answer_that_was_cut_says_so_and_that_its_cost_is_an_estimate() -> None:
    cut = {
        "tries": 1,
        "failures": [],
        "text": "Your flight leaves a",
        "tool_calls_not_made": ["book"],
        "usage": USAGE,
        "usage_estimated": True,
    }
    assert in_words("model_request", ASKED, cut) == (
        'openai:gpt, message 3 → cut after "Your flight leaves a", a call of book was never made '
        "(about 46 + 12 tokens)"
    )


def test_a_request_that_failed_tells_each_try() -> None:
    failed = {"tries": 2, "failures": ["try 1: Timeout: slow", "try 2: ModelHTTPError: 429"]}
    assert "no answer, try 1: Timeout: slow; try 2: ModelHTTPError: 429" in str(
        in_words("model_request", ASKED, failed)
    )


def test_any_other_action_is_told_as_ever() -> None:
    assert in_words("book_flight", {"to": "LIS"}, {"id": 1}) is None
