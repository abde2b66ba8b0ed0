"""Bodies of steps that tests run in processes of their own, by name."""

from __future__ import annotations

import threading
import time
from typing import Any

from airflow_saga.core.errors import NotApplied
from tests.runtime import deeds

KINDS = ("flights", "hotels", "cars")


def three(saga: Any, name: str) -> list[str]:
    """Three calls of one action, one after the other."""
    act = getattr(deeds, name)
    return [act(kind)["kind"] for kind in KINDS]


def three_with_savepoint(saga: Any, name: str) -> list[str]:
    act = getattr(deeds, name)
    first = act(KINDS[0])["kind"]
    saga.savepoint("first")
    return [first, *(act(kind)["kind"] for kind in KINDS[1:])]


def five_bookings(saga: Any) -> None:
    deeds.five_bookings(saga)


def these(saga: Any, name: str, *kinds: str) -> list[str]:
    act = getattr(deeds, name)
    return [act(kind)["kind"] for kind in kinds]


def then_fails(saga: Any, name: str, *kinds: str) -> None:
    these(saga, name, *kinds)
    raise ValueError("this step fails in the end")


def hangs(saga: Any, name: str) -> None:
    """Makes one call, then ignores everything."""
    getattr(deeds, name)("flights")
    while True:
        try:
            time.sleep(60)
        except BaseException:  # noqa: BLE001, S112 - it ignores everything
            continue


def calls_each_second(saga: Any, name: str) -> None:
    act = getattr(deeds, name)
    for number in range(200):
        act("flights", str(number))
        time.sleep(0.2)


def backs_off(saga: Any) -> None:
    deeds.slow_to_retry("flights")


def blocks_in_a_thread(saga: Any) -> None:
    """A pool thread sits in C for longer than its call may take."""
    problems: list[BaseException] = []

    def block() -> None:
        try:
            deeds.block_in_c(60)
        except BaseException as problem:  # noqa: BLE001 - handed to the body
            problems.append(problem)

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    raise problems[0]


def refuses(saga: Any) -> None:
    raise NotApplied("no")
