"""What callers hand over is gathered once, wherever an interruption strikes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from airflow_saga.core.records import Intent, Outcome
from airflow_saga.runtime.handover import Handover, Work
from airflow_saga.runtime.ticket import Ticket


class Struck(BaseException):
    """What a signal handler raises."""


class Strike:
    """Raises at one of the places where a handler can strike: before and after each thing that changes something."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.struck = False

    def may_strike(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.struck = True
            raise Struck

    def around(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any) -> Any:
            self.may_strike()
            answer = change(*args)
            self.may_strike()
            return answer

        return changed

    def gather(self, handover: Handover) -> None:
        """:raises Struck: if it strikes before the end."""
        queue = handover.queue
        handover.queue = Watched(queue, self)
        try:
            handover.gather()
        finally:
            handover.queue = queue


class Watched(deque[Any]):
    """The queue, with a strike around each entry and around its leaving."""

    def __init__(self, queue: deque[Any], strike: Strike) -> None:
        super().__init__()
        self.queue = queue
        self.strike = strike

    def __bool__(self) -> bool:
        return bool(self.queue)

    def __len__(self) -> int:
        return len(self.queue)

    def __getitem__(self, place: Any) -> Any:
        return self.strike.around(self.queue[place])

    def popleft(self) -> Any:
        return self.strike.around(self.queue.popleft)()


def handed_over() -> tuple[Handover, Outcome, Ticket[float], Ticket[Any]]:
    handover = Handover()
    outcome = Outcome(1, "DONE", "1")
    intent = Intent(2, "book", 1, "COMPENSABLE", "f", "k", "{}", 10.0, 0.0)
    begun: Ticket[float] = Ticket()
    asked: Ticket[Any] = Ticket()
    handover.put(lambda work: work.outcomes.append(outcome), wake=False)
    handover.put(lambda work: work.intents.append((intent, begun)), wake=False)
    handover.put(lambda work: work.asked.append((lambda connection: None, asked)), wake=False)
    return handover, outcome, begun, asked


def test_an_interruption_anywhere_neither_loses_nor_doubles_what_was_handed_over() -> None:
    for number in range(10_000):
        handover, outcome, begun, asked = handed_over()
        strike = Strike(number)
        try:
            strike.gather(handover)
        except Struck:
            assert strike.struck
        handover.gather()
        assert handover.work.outcomes == [outcome]
        assert [ticket for _, ticket in handover.work.intents] == [begun]
        assert [ticket for _, ticket in handover.work.asked] == [asked]
        assert not handover.queue
        handover.bell.close()
        if not strike.struck:
            assert number > 10, "it has never struck"
            return
    pytest.fail("gather did not end")


def test_a_second_interruption_is_survived_too() -> None:
    handover, outcome, begun, asked = handed_over()
    for number in (1, 2, 3, 0):
        with suppress(Struck):
            Strike(number).gather(handover)
    handover.gather()
    assert handover.work.outcomes == [outcome]
    assert handover.work.tickets == [begun, asked]
    handover.bell.close()


def test_an_intent_taken_back_in_an_interrupted_gathering_ends_once() -> None:
    def take_back(work: Work) -> None:
        work.outcomes.append(Outcome(7, "FAILED", error="nothing was called"))

    for number in range(6):
        handover = Handover()
        handover.put(take_back, wake=False)
        with suppress(Struck):
            Strike(number).gather(handover)
        handover.gather()
        assert [outcome.seq for outcome in handover.work.outcomes] == [7]
        handover.bell.close()
