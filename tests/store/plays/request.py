"""Plays of the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from airflow_saga.core.records import RequestRow
from airflow_saga.core.states import Move
from tests.store.plays import Plays
from tests.store.scene import Scene

REQUEST = Plays("request")


def hinted(scene: Scene, state: str) -> RequestRow:
    scene.stopped("flight", 1)
    request = scene.hint()
    if state == "HELD":
        scene.sweeps.hold_if_mass_outage(causes=["failure"], threshold=0, window_seconds=60)
    return request


def queued(scene: Scene) -> tuple[RequestRow, RequestRow]:
    """The frozen undo of one step, and the wider wish behind it."""
    scene.ran("flight", 1)
    first = scene.freeze(scene.redo(scene.step()))
    return first, scene.cancel()


@REQUEST.of("ask")
def _ask(scene: Scene, move: Move) -> Iterator[Any]:
    scene.attach()
    yield
    scene.cancel()


@REQUEST.of("hint")
def _hint(scene: Scene, move: Move) -> Iterator[Any]:
    scene.stopped("flight", 1)
    yield
    scene.hint()


@REQUEST.of("hold")
def _hold(scene: Scene, move: Move) -> Iterator[Any]:
    hinted(scene, "HINTED")
    yield
    scene.sweeps.hold_if_mass_outage(causes=["failure"], threshold=0, window_seconds=60)


@REQUEST.of("release")
def _release(scene: Scene, move: Move) -> Iterator[Any]:
    hinted(scene, "HELD")
    yield
    scene.requests.release(*scene.run, actor="ann")


@REQUEST.of("widen")
def _widen(scene: Scene, move: Move) -> Iterator[Any]:
    if move.source == "REQUESTED":
        scene.ran("flight", 1)
        scene.redo(scene.step())
    elif move.source == "QUEUED":
        queued(scene)
    else:
        hinted(scene, move.source or "")
    yield
    if move.source == "QUEUED":
        scene.requests.cancel(*scene.run, actor="bob", stop_now=True)
        assert scene.request.stop_now
    else:
        scene.ask()
        assert (scene.request.whole_run, scene.request.cause, scene.request.number) == (True, "user", 1)


@REQUEST.of("queue")
def _queue(scene: Scene, move: Move) -> Iterator[Any]:
    scene.ran("flight", 1)
    scene.freeze(scene.redo(scene.step()))
    yield
    scene.cancel()


@REQUEST.of("withdraw")
def _withdraw(scene: Scene, move: Move) -> Iterator[Any]:
    hinted(scene, move.source or "")
    yield
    scene.attach(try_number=2)


@REQUEST.of("freeze")
def _freeze(scene: Scene, move: Move) -> Iterator[Any]:
    request = hinted(scene, "HINTED") if move.source == "HINTED" else None
    if request is None:
        scene.stopped("flight", 1)
        scene.cancel()
    yield
    scene.freeze()


@REQUEST.of("take over")
def _take_over(scene: Scene, move: Move) -> Iterator[Any]:
    scene.stopped("flight", 1)
    scene.freeze(scene.cancel())
    scene.time_passes(61)
    yield
    assert scene.freeze(owner="undo__2").owner_run_id == "undo__2"


@REQUEST.of("settle")
def _request_settle(scene: Scene, move: Move) -> Iterator[Any]:
    scene.stopped("flight", 1)
    scene.freeze(scene.cancel())
    scene.undo_step()
    yield
    scene.settle()


@REQUEST.of("next")
def _next(scene: Scene, move: Move) -> Iterator[Any]:
    first, _ = queued(scene)
    scene.undo_step(request=first)
    yield
    scene.settle(first)


@REQUEST.of("expire")
def _request_expire(scene: Scene, move: Move) -> Iterator[Any]:
    if move.source == "QUEUED":
        queued(scene)
    else:
        scene.stopped("flight", 1)
        request = scene.cancel()
        if move.source == "FROZEN":
            scene.freeze(request)
    scene.time_passes(3601)
    yield
    scene.settles.expire_if_past_deadline(scene.saga.saga_id)
