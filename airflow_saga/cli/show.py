"""A saga told whole for a terminal: the sentence, what stands, what to do, the timeline, the steps, the requests."""

from __future__ import annotations

from collections.abc import Iterator

from airflow_saga.core.identity import compensation_dag_id
from airflow_saga.core.records import ActionRow, RequestRow
from airflow_saga.telling.conversation import in_words
from airflow_saga.telling.display import Display, moment, short, span
from airflow_saga.telling.story import Move
from airflow_saga.telling.timeline import Entry
from airflow_saga.telling.told import Told


class Shown(Told):
    """One saga, ready to be printed."""

    def text(self) -> str:
        """All of it, most urgent first."""
        parts = [self.story.headline(), *self._moves(), *self._standing(), *self._history()]
        return "\n".join([*parts, *self._steps(), *self._requests()])

    def _moves(self) -> Iterator[str]:
        moves = self.story.moves()
        if moves:
            yield "\nWhat to do"
            yield from (f"  {line}" for move in moves for line in _told(move))

    def _standing(self) -> Iterator[str]:
        standing = self.story.standing()
        if not standing:
            return
        sure = sum(each.certain for each in standing)
        yield f"\nWhat stands: {sure} for sure, {len(standing) - sure} perhaps"
        by_id = {action.action_id: action for action in self.view.actions}
        for each in standing:
            action = by_id[each.action]
            yield f"  #{each.action} {each.name} of step {each.step} is {each.state}"
            yield f"      why   {each.why}"
            yield f"      call  {self._call(action)}"
            yield f"      keys  {action.key}" + (f", undo {action.undo_key}" if action.undo_key else "")
            for move in each.next:
                yield from (f"      {line}" for line in _told(move))

    def _call(self, action: ActionRow) -> str:
        result = "<not stored>" if action.result_lost else short(self.display.value(action.result))
        known = action.result is not None or action.result_lost
        told = in_words(action.name, self.display.value(action.params), self.display.value(action.result))
        if told is not None:
            return told
        return short(self.display.value(action.params)) + (f" → {result}" if known else "")

    def _history(self) -> Iterator[str]:
        yield "\nTimeline"
        for entry in self.timeline:
            yield "  " + _line(entry)
            yield from (f"        {detail}" for detail in _details(entry))

    def _steps(self) -> Iterator[str]:
        if self.view.steps:
            yield "\nSteps"
        for step in self.view.steps:
            where = f", on {step.host} pid {step.pid}" if step.host else ""
            lease = f", lease until {moment(step.lease_until)}" if step.lease_until else ""
            yield (
                f"  {step.label} is {step.state} since {moment(step.changed_at)}: try {step.try_number}, "
                f"generation {step.generation}, fence {step.fence}{where}{lease}"
            )

    def _requests(self) -> Iterator[str]:
        if self.view.requests:
            yield "\nUndo requests"
        for request in self.view.requests:
            yield f"  {request_line(request, self.display)}"
            times = (
                ("triggered", request.triggered_at),
                ("frozen", request.frozen_at),
                ("ended", request.ended_at),
                ("deadline", None if request.ended_at else request.deadline_at),
            )
            said = [f"{word} {moment(at)}" for word, at in times if at is not None]
            if request.owner_run_id:
                said.append(
                    f"by {compensation_dag_id(self.view.saga.dag_id)} / {self.display.text(request.owner_run_id)}"
                )
            if request.plan_hash:
                said.append(f"plan {request.plan_hash[:12]}")
            if said:
                yield f"      {', '.join(said)}"


# -- lines ------------------------------------------------------------------------------------------------------------


def _told(move: Move) -> Iterator[str]:
    yield f"→ {move.what}" + (":" if move.command else "")
    if move.command:
        yield f"    {move.command}"


def _line(entry: Entry) -> str:
    number = f"#{entry.action} " if entry.action else ""
    where = f" ({entry.step})" if entry.step else ""
    parts = [f"{moment(entry.at)}  {entry.kind:<7}  {number}{entry.what}{where}"]
    if entry.state:
        parts.append(entry.state)
    if entry.seconds is not None:
        parts.append(span(entry.seconds))
    if entry.tries and (entry.tries > 1 or entry.kind == "undo"):
        parts.append(f"{entry.tries} {'try' if entry.tries == 1 else 'tries'}")
    if entry.who:
        parts.append(f"by {entry.who}")
    return "  ".join(parts)


def _details(entry: Entry) -> Iterator[str]:
    told = in_words(entry.what, entry.params, entry.result)
    if told is not None:
        yield told
    elif entry.params is not None:
        result = f" → {short(entry.result)}" if entry.result is not None else ""
        yield f"{short(entry.params)}{result}"
    if entry.key:
        yield f"key {entry.key}"
    if entry.detail:
        yield short(entry.detail, 400)
    if entry.error:
        yield f"error: {short(entry.error, 400)}"


def request_line(request: RequestRow, display: Display) -> str:
    reason = f": {display.text(request.reason)}" if request.reason else ""
    scope = "the whole run" if request.whole_run else "some steps"
    now = ", now" if request.stop_now else ""
    return (
        f"{request.number}. {request.state}: {scope}{now}, asked for by {display.text(request.actor)} at "
        f"{moment(request.asked_at)}, cause {request.cause}{reason}"
    )
