"""A saga drawn over time: a lane for each step, bars for calls and for undos, a line where somebody stopped it.

Only numbers are made here; the template makes the picture. Lanes and bars are bounded, whatever the saga is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from airflow_saga.core.records import ActionRow, StepRow
from airflow_saga.core.states import ActionState, Effect
from airflow_saga.store.reader import SagaView
from airflow_saga.telling.story import is_decision
from airflow_saga.telling.timeline import forward_state

LEFT, RIGHT, TOP, LANE = 200, 985, 26, 34
MAX_LANES = 24
MAX_BARS = 120
_LEAST_WIDTH = 3.0
_UNDO_KINDS = {
    ActionState.COMPENSATED: "undone",
    ActionState.COMPENSATION_FAILED: "refused",
    ActionState.NON_COMPENSABLE: "stands",
}


_BRIEF = timedelta(seconds=10)


@dataclass(frozen=True)
class Bar:
    x: float
    width: float
    kind: str
    title: str


@dataclass(frozen=True)
class Lane:
    label: str
    y: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Line:
    x: float
    label: str
    leans_left: bool


@dataclass(frozen=True)
class Drawing:
    height: int
    lanes: tuple[Lane, ...]
    lines: tuple[Line, ...]
    ticks: tuple[tuple[float, datetime, str], ...]
    is_brief: bool
    """So short that whole seconds would all look the same."""
    more_lanes: int


def draw(view: SagaView, now: datetime) -> Drawing | None:
    """None where nothing has been called yet."""
    by_step: dict[int, list[ActionRow]] = {}
    for action in view.actions:
        by_step.setdefault(action.step_id, []).append(action)
    steps = sorted(
        (step for step in view.steps if step.step_id in by_step),
        key=lambda step: by_step[step.step_id][0].begun_at,
    )
    if not steps:
        return None
    scale = _Scale(view, now)
    lanes = tuple(
        Lane(step.label, TOP + LANE * place, _bars(step, by_step[step.step_id], scale))
        for place, step in enumerate(steps[:MAX_LANES])
    )
    return Drawing(
        TOP + LANE * len(lanes) + 34,
        lanes,
        tuple(_lines(view, scale)),
        scale.ticks(),
        scale.length < _BRIEF,
        max(0, len(steps) - MAX_LANES),
    )


class _Scale:
    """From moments to places on the picture."""

    def __init__(self, view: SagaView, now: datetime) -> None:
        self.now = now
        moments = [at for action in view.actions for at in _moments(action)]
        moments += [request.asked_at for request in view.requests if is_decision(request)]
        self.begin = min(moments)
        is_moving = any(
            action.state in (ActionState.PENDING, ActionState.COMPENSATING) and action.reconcile_at is None
            for action in view.actions
        )
        self.end = max([*moments, now] if is_moving else moments)
        self.length = max(self.end - self.begin, timedelta(milliseconds=1))

    def x(self, at: datetime) -> float:
        return round(LEFT + (RIGHT - LEFT) * ((at - self.begin) / self.length), 1)

    def bar(self, begin: datetime, end: datetime, kind: str, title: str) -> Bar:
        left = min(self.x(begin), RIGHT - _LEAST_WIDTH)
        return Bar(left, round(max(self.x(end) - left, _LEAST_WIDTH), 1), kind, title)

    def ticks(self) -> tuple[tuple[float, datetime, str], ...]:
        places = (0.0, 0.5, 1.0)
        anchors = ("start", "middle", "end")
        return tuple(
            (round(LEFT + (RIGHT - LEFT) * place, 1), self.begin + self.length * place, anchor)
            for place, anchor in zip(places, anchors, strict=True)
        )


def _moments(action: ActionRow) -> Iterator[datetime]:
    yield action.begun_at
    yield from (
        at for at in (action.finished_at, action.undo_begun_at, action.undo_finished_at) if at is not None
    )


def _bars(step: StepRow, actions: Sequence[ActionRow], scale: _Scale) -> tuple[Bar, ...]:
    if len(actions) > MAX_BARS:
        return tuple(_summed(step, actions, scale))
    return tuple(bar for action in actions for bar in (_call(action, scale), *_undo(action, scale)))


def _summed(step: StepRow, actions: Sequence[ActionRow], scale: _Scale) -> Iterator[Bar]:
    """One bar for all calls of a step and one for all its undos."""
    ends = [action.finished_at or scale.now for action in actions]
    yield scale.bar(actions[0].begun_at, max(ends), "forward", f"{len(actions)} actions of {step.label}")
    undone = [action for action in actions if action.undo_begun_at is not None]
    if undone:
        begin = min(action.undo_begun_at for action in undone if action.undo_begun_at)
        end = max(action.undo_finished_at or scale.now for action in undone)
        is_clean = all(action.state == ActionState.COMPENSATED for action in undone)
        yield scale.bar(begin, end, "undone" if is_clean else "refused", f"{len(undone)} of them, undone")


def _call(action: ActionRow, scale: _Scale) -> Bar:
    state = forward_state(action)
    kind = "read" if action.effect == Effect.READ_ONLY else "forward"
    if state == ActionState.IN_DOUBT:
        kind = "doubt"
    elif state == ActionState.FAILED:
        kind = "noeffect"
    end = action.finished_at or (scale.now if action.state == ActionState.PENDING else action.begun_at)
    return scale.bar(action.begun_at, end, kind, f"{action.name}: {state}")


def _undo(action: ActionRow, scale: _Scale) -> Iterator[Bar]:
    begin = action.undo_begun_at or action.undo_finished_at
    if begin is None:
        return
    end = action.undo_finished_at or (begin if action.reconcile_at is not None else scale.now)
    kind = _UNDO_KINDS.get(ActionState(action.state), "undoing")
    yield scale.bar(begin, end, kind, f"undo of {action.name}: {action.state}")


def _lines(view: SagaView, scale: _Scale) -> Iterator[Line]:
    for request in view.requests:
        if is_decision(request):
            x = scale.x(request.asked_at)
            label = "undo asked for" if request.whole_run else "undo of a part asked for"
            yield Line(x, label, leans_left=x > (LEFT + RIGHT) / 2)
