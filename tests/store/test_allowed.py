"""C96: what may be asked of a saga in each of its states, and what comes of it; a move outside is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from airflow_saga.core.errors import VerbRefusedError
from airflow_saga.store.decision import Verdict
from airflow_saga.store.rewind import RewindVerbs
from tests.store.scene import Scene

CLEARED = {"max_tries": 1, "try_number": 2, "clear_number": 1}


def running(scene: Scene) -> None:
    step = scene.act(scene.attach("flight"), 1)
    RewindVerbs(scene.connection).savepoint_if_held(step, 2, "half", None)
    scene.steps.stop_if_held(scene.act(step, 2))


def completed(scene: Scene) -> None:
    step = scene.act(scene.attach("flight"), 1)
    RewindVerbs(scene.connection).savepoint_if_held(step, 2, "half", None)
    scene.finish(scene.act(step, 2))
    scene.runs.complete_if_over(*scene.run)


def failed(scene: Scene) -> None:
    running(scene)
    scene.hint()


def suspended(scene: Scene) -> None:
    running(scene)
    scene.requests.cancel(*scene.run, actor="ann", keep=True)
    assert scene.sweeps.suspend_if_quiet(scene.saga.saga_id)


def cancelling(scene: Scene) -> None:
    running(scene)
    scene.freeze(scene.cancel())


def cancelled(scene: Scene) -> None:
    running(scene)
    scene.undone("flight", request=scene.cancel())


def partially_cancelled(scene: Scene) -> None:
    running(scene)
    scene.freeze(scene.cancel())
    attached = scene.undo_of()
    last, first = attached.open_actions
    scene.compensate(attached, last, "COMPENSATION_FAILED")
    scene.compensate(attached, first)
    assert scene.settle() is not None


def cancel(scene: Scene) -> str:
    return scene.requests.cancel(*scene.run, actor="ann").verdict.name


def undo(scene: Scene) -> str:
    return scene.requests.undo(*scene.run, actor="ann").verdict.name


def run_again(scene: Scene) -> str:
    return scene.try_attach("flight", try_number=2).decision.go.name


def clear(scene: Scene) -> str:
    return scene.try_attach("flight", **CLEARED).decision.go.name


def rewind(scene: Scene) -> str:
    try:
        RewindVerbs(scene.connection).rewind(*scene.run, "half", actor="ann")
    except VerbRefusedError:
        return "REFUSED"
    return Verdict.REWINDING.name


Enter = Callable[[Scene], None]
ASKED = (cancel, undo, run_again, clear, rewind)
ALLOWED: dict[Enter, tuple[str, ...]] = {
    running: ("CANCELLING", "CANCELLING", "RESUME", "RESUME", "REWINDING"),
    completed: ("FINISHED", "CANCELLING", "REPLAY", "WAIT", "REWINDING"),
    failed: ("FINISHED", "CANCELLING", "RESUME", "RESUME", "REWINDING"),
    suspended: ("FINISHED", "CANCELLING", "REFUSE", "RESUME", "REWINDING"),
    cancelling: ("ALREADY", "ALREADY", "REFUSE", "WAIT", "REFUSED"),
    cancelled: ("CANCELLED", "CANCELLED", "REFUSE", "ANEW", "REFUSED"),
    partially_cancelled: ("FINISHED", "CANCELLING", "REFUSE", "REFUSE", "REFUSED"),
}


@pytest.mark.parametrize(
    ("enter", "ask", "expected"),
    [
        pytest.param(enter, ask, expected, id=f"{enter.__name__}-{ask.__name__}")
        for enter, row in ALLOWED.items()
        for ask, expected in zip(ASKED, row, strict=True)
    ],
)
def test_c96_what_is_asked_of_a_saga_comes_to_what_its_state_allows(
    scene: Scene, enter: Enter, ask: Callable[[Scene], str], expected: str
) -> None:
    enter(scene)
    before = scene.tables()
    assert ask(scene) == expected
    if expected in ("REFUSED", "CANCELLED", "FINISHED"):
        assert scene.tables() == before


def test_c96_what_is_undone_is_never_undone_again(scene: Scene) -> None:
    cancelled(scene)
    scene.finish(scene.act(scene.attach("flight", **CLEARED), 1))
    settled = scene.undone("flight", request=scene.ask())
    assert not settled.residual
    tries = {(row.generation, row.seq): row.undo_tries for row in scene.view.actions}
    assert tries == {(1, 1): 1, (1, 2): 1, (2, 1): 1}
