"""What a person asks first: how does it stand, what still stands and why, and what is to be done now.

The answers are words made from states, and commands made from names, so each can be tested without a terminal.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from airflow_saga.core.identity import compensation_dag_id
from airflow_saga.core.records import ActionRow, RequestRow, StepRow
from airflow_saga.core.states import (
    GOES_ON_CAUSES,
    OPEN_REQUEST_STATES,
    RETRIABLE_ACTION_STATES,
    ActionState,
    Cause,
    Effect,
    Mode,
    RequestState,
    SagaState,
    StepState,
)
from airflow_saga.store.reader import SagaView
from airflow_saga.telling.display import Display, moment, plural, second

_CAUSES: dict[str, str] = {
    Cause.USER: "asked for by {actor}",
    Cause.MARKED_FAILED: "marked failed, seen by {actor},",
    Cause.FAILURE: "undone since its run failed",
    Cause.TIMEOUT: "undone since a task ran out of time",
    Cause.DAGRUN_TIMEOUT: "undone since its run ran out of time",
    Cause.LOST_WORKER: "undone since its worker was lost",
    Cause.LATE: "undone since an answer came late",
    Cause.DUE: "undone since a compensation was due",
    Cause.RETRY: "tried again by {actor}",
    Cause.REDO: "undone since a finished step was cleared",
    Cause.DIVERGED: "undone since a step diverged from its log",
}
_SAID_BY_ITS_CAUSE: dict[str, str] = {Cause.FAILURE: "the run failed"}
_AFTER_A_PLACE = frozenset({SagaState.SUSPENDED, SagaState.PARTIALLY_CANCELLED})
_AT_REST = frozenset({SagaState.CANCELLED, SagaState.PARTIALLY_CANCELLED, SagaState.CANCELLING})


@dataclass(frozen=True)
class Move:
    """Something a person can do now. ``command`` None: in Airflow, or outside.

    :ivar answer: what the command says of an action, as the API names it; ``retry``: it has its undo tried again.
    """

    what: str
    command: str | None = None
    answer: str | None = None


@dataclass(frozen=True)
class Standing:
    """An effect that stands, or may, and why nothing has taken it away."""

    action: int
    name: str
    step: str
    state: str
    certain: bool
    why: str
    next: tuple[Move, ...]

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


class Story:
    """The words about one saga.

    :param now: the database's clock. :param start_alert_seconds: when an undo that has not begun is said to be stuck.
    """

    def __init__(
        self, view: SagaView, display: Display, now: datetime, *, start_alert_seconds: float = 300.0
    ) -> None:
        self.view = view
        self.saga = view.saga
        self._display = display
        self._now = now
        self._start_alert_seconds = start_alert_seconds
        self._steps = {step.step_id: step for step in view.steps}
        self._effects = [action for action in view.actions if action.effect != Effect.READ_ONLY]

    # -- the sentence -------------------------------------------------------------------------------------------------

    def headline(self) -> str:
        """One sentence: which saga, how it stands, who wanted that and why, how much is undone and how much stands."""
        return f"{self.saga.dag_id} / {self.saga.run_id} is {self._state()}: {self._told()}."

    def sentence(self) -> str:
        """The same for where the names and the state are shown already."""
        told = self._told()
        return f"{told[:1].upper()}{told[1:]}." if told else ""

    def _told(self) -> str:
        return "; ".join(part for part in (self._because(), self._counts()) if part)

    def _state(self) -> str:
        mode = (
            {Mode.UNDO: "to be undone", Mode.KEEP: "keeping its effects"}.get(Mode(self.saga.mode))
            if (self.saga.mode)
            else None
        )
        return f"{self.saga.state} ({mode})" if mode else self.saga.state

    def _because(self) -> str:
        saga, request = self.saga, self._telling_request()
        if saga.state == SagaState.PENDING:
            return "no step has begun"
        if saga.state in (SagaState.RUNNING, SagaState.COMPLETED):
            return ""
        if saga.state == SagaState.FAILED:
            reason = f" ({self._display.text(saga.reason)})" if saga.reason else ""
            return f"{saga.cause or 'failure'} at {second(saga.changed_at)}{reason}"
        if request is not None and saga.state in _AT_REST:
            said = self._said(request.cause, request.actor, request.asked_at, request.reason)
            late = saga.reason if saga.actor == "reconciler" and saga.reason else None
            return f"{said}, but {late}" if late else said
        return self._said(saga.cause, saga.actor, saga.changed_at, saga.reason)

    def _said(self, cause: str | None, actor: str | None, at: datetime, reason: str | None) -> str:
        words = _CAUSES.get(cause or "", "stopped by {actor}").format(
            actor=self._display.text(actor) or "airflow"
        )
        why = (
            f" ({self._display.text(reason)})"
            if reason and reason != _SAID_BY_ITS_CAUSE.get(cause or "")
            else ""
        )
        return f"{words} at {second(at)}{why}"

    def _telling_request(self) -> RequestRow | None:
        """The request that says who wanted this: not one that only followed from it."""
        known = [request for request in self.view.requests if is_decision(request)]
        first_hand = [request for request in known if request.cause not in GOES_ON_CAUSES]
        told = first_hand or known
        return told[-1] if told else None

    def _counts(self) -> str:
        states = [action.state for action in self._effects]
        certain, uncertain, awaited, stays = 0, 0, 0, 0
        for action in self._effects:
            if action.residual and self._stays(action):
                stays += 1
            elif action.residual and action.reconcile_at is not None:
                awaited += 1
            elif action.residual and stands_for_sure(action):
                certain += 1
            elif action.residual:
                uncertain += 1
        if self.saga.state in (SagaState.RUNNING, SagaState.COMPLETED, SagaState.PENDING):
            return self._forward_counts(states)
        if not states:
            return "no action had begun"
        parts = [f"{states.count(ActionState.COMPENSATED)} undone"]
        if accepted := states.count(ActionState.ACCEPTED):
            parts.append(f"{accepted} accepted as {'it is' if accepted == 1 else 'they are'}")
        if certain:
            parts.append(f"{certain} still {'stands' if certain == 1 else 'stand'}")
        if uncertain:
            parts.append(f"{uncertain} may still stand")
        if awaited:
            parts.append(f"{awaited} awaited")
        if stays:
            parts.append(f"{stays} kept, from before that")
        if self.saga.state == SagaState.CANCELLED:
            parts.append("nothing else stands" if accepted else "nothing stands")
        return ", ".join(parts)

    def _forward_counts(self, states: list[str]) -> str:
        if self.saga.state == SagaState.PENDING:
            return ""
        running = [step.label for step in self.view.steps if step.state == StepState.RUNNING]
        parts = [plural(states.count(ActionState.DONE), "action") + " done"]
        for state, word in (
            (ActionState.PENDING, "under way"),
            (ActionState.FAILED, "without effect"),
            (ActionState.IN_DOUBT, "in doubt"),
            (ActionState.COMPENSATED, "undone"),
        ):
            if count := states.count(state):
                parts.append(f"{count} {word}")
        if running:
            parts.append(f"at work in {', '.join(running[:5])}" + (" …" if len(running) > 5 else ""))
        return ", ".join(parts)

    # -- what stands --------------------------------------------------------------------------------------------------

    def standing(self) -> list[Standing]:
        """What stands, or may: all of it once the saga is stopped, and only what is in doubt while it runs."""
        if self.saga.state in (SagaState.RUNNING, SagaState.COMPLETED, SagaState.PENDING):
            shown = [action for action in self._effects if action.state == ActionState.IN_DOUBT]
        else:
            shown = [action for action in self._effects if action.residual and not self._stays(action)]
        return [
            Standing(
                action=action.action_id,
                name=action.name,
                step=self._steps[action.step_id].label,
                state=action.state,
                certain=stands_for_sure(action),
                why=self._why(action),
                next=tuple(self._settle(action, self._steps[action.step_id])),
            )
            for action in sorted(shown, key=lambda action: -action.action_id)
        ]

    def _why(self, action: ActionRow) -> str:
        error = self._display.text(action.error)
        told = f": {error}" if error else ""
        if action.reconcile_at is not None:
            until = f"its compensation is under way, asked for again at {moment(action.reconcile_at)}"
            return until + (
                f"; waiting for {self._display.text(action.waiting_for)}" if action.waiting_for else ""
            )
        match action.state:
            case ActionState.COMPENSATION_FAILED:
                return f"its compensation gave up after {plural(action.undo_tries, 'try', 'tries')}{told}"
            case ActionState.NON_COMPENSABLE:
                return "it is declared NON_COMPENSABLE: nothing of ours can undo it"
            case ActionState.IN_DOUBT:
                said = probe_said(self.view, action.action_id, self._display)
                return f"nobody knows whether it took effect{told}" + (f"; its probe: {said}" if said else "")
            case ActionState.PENDING:
                return f"its call is under way since {moment(action.begun_at)}"
            case ActionState.COMPENSATING:
                return f"its compensation is under way, try {action.undo_tries}{told}"
            case _:
                return self._why_done(action) + told

    def _why_done(self, action: ActionRow) -> str:
        if self.saga.state == SagaState.CANCELLING and self.saga.mode == Mode.UNDO:
            return "its turn to be undone has not come yet"
        if self.saga.state == SagaState.PARTIALLY_CANCELLED:
            return "the undo ended before its turn came"
        return "nobody has undone it"

    def _stays(self, action: ActionRow) -> bool:
        """It came before the place from which the saga was undone."""
        request = self._telling_request()
        if self.saga.state not in _AFTER_A_PLACE or request is None or request.whole_run:
            return False
        return action.kept or self._steps[action.step_id].state != StepState.PARTLY_UNDONE

    def _settle(self, action: ActionRow, step: StepRow) -> Iterator[Move]:
        request = self._open_request()
        if request is not None and request.state in OPEN_REQUEST_STATES:
            return  # an undo that is asked for settles it, or is what a person waits for
        if action.state == ActionState.PENDING:
            return
        resolvable = step.state == StepState.PARTLY_UNDONE
        answerable = step.state == StepState.STOPPED and action.state == ActionState.IN_DOUBT
        if not resolvable and not answerable:
            return
        if action.lands_by is not None and action.lands_by > self._now:
            yield Move(
                f"wait until {moment(action.lands_by)}: a call that did not report may land until then"
            )
        if action.reconcile_at is not None:
            yield Move("nothing: its compensation is asked again by itself")
        if resolvable and action.state in RETRIABLE_ACTION_STATES and action.effect != Effect.NON_COMPENSABLE:
            what = "ask for it again now" if action.reconcile_at is not None else "try its undo again"
            yield Move(what, self._command("retry", str(action.action_id)), "retry")
        if resolvable:
            gone = "it is not there, or is undone by hand" if action.in_doubt else "it is undone by hand"
            yield Move(gone, self._resolve(action, "--undone"), "undone")
            yield Move("it stands, and may stay", self._resolve(action, "--accepted"), "accepted")
        else:
            command = self._resolve(action, '--happened \'{"its": "result"}\'')
            yield Move("it took effect", command, "happened")
            yield Move("it did not", self._resolve(action, "--did-not-happen"), "did_not_happen")

    # -- what to do ---------------------------------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        """What a person can do about the saga as a whole; nothing where it goes on by itself or has ended well."""
        request = self._open_request()
        if request is not None:
            return list(self._about_request(request))
        return list(self._about_rest())

    def _about_request(self, request: RequestRow) -> Iterator[Move]:
        if request.state == RequestState.HELD:
            yield Move("its undo is held since many sagas failed at once, which looks like an outage")
            yield Move("let it go on", self._command("release"))
            return
        if request.state == RequestState.FROZEN and self._is_owned(request):
            yield Move(f"nothing: {compensation_dag_id(self.saga.dag_id)} / {request.owner_run_id} undoes it")
            return
        busy = [
            step.label for step in self.view.steps if step.state == StepState.RUNNING and self._is_live(step)
        ]
        if busy:
            yield Move(
                f"nothing: {', '.join(busy)} may let its call end first; or abandon that call",
                self._command("cancel", "--now"),
            )
            return
        if (self._now - request.asked_at).total_seconds() > self._start_alert_seconds:
            undo_dag_id = compensation_dag_id(self.saga.dag_id)
            yield Move(
                f"its undo is asked for since {moment(request.asked_at)} and nobody does it: is {undo_dag_id} paused?",
                f"airflow dags unpause {shlex.quote(undo_dag_id)}",
            )
            yield Move("look for what else is wrong", "airflow saga doctor")
            yield Move("start it now", "airflow saga reconcile")

    def _about_rest(self) -> Iterator[Move]:
        state = self.saga.state
        if state == SagaState.PARTIALLY_CANCELLED:
            if any(
                action.residual and action.state != ActionState.NON_COMPENSABLE for action in self._effects
            ):
                yield Move("try the undo again", self._command("undo"))
        elif state == SagaState.SUSPENDED:
            yield Move("go on with it: clear the run's tasks in Airflow")
            yield Move("or undo it", self._command("undo"))
        elif state == SagaState.FAILED and any(action.residual for action in self._effects):
            kept = self.saga.on_failure == "keep"
            if not kept and self.saga.cause not in ("incomplete", "refused"):
                return  # the policy asks for the undo, at the latest through the reconciler
            why = "on_failure is 'keep'" if kept else f"its cause is {self.saga.cause}"
            yield Move(f"no undo is asked for, since {why}: clear what failed in Airflow to go on")
            yield Move("or undo it", self._command("undo"))

    # -- small parts --------------------------------------------------------------------------------------------------

    def _open_request(self) -> RequestRow | None:
        waiting = (*OPEN_REQUEST_STATES, RequestState.HINTED, RequestState.HELD)
        return next((request for request in self.view.requests if request.state in waiting), None)

    def _is_owned(self, request: RequestRow) -> bool:
        return request.owner_lease_until is not None and request.owner_lease_until > self._now

    def _is_live(self, step: StepRow) -> bool:
        return step.lease_until is not None and step.lease_until > self._now

    def _command(self, verb: str, *more: str) -> str:
        names = f"{shlex.quote(self.saga.dag_id)} {shlex.quote(self.saga.run_id)}"
        return " ".join(["airflow saga", verb, names, *more])

    def _resolve(self, action: ActionRow, answer: str) -> str:
        return self._command("resolve", f"{action.action_id} {answer} --note 'how you know'")


def is_decision(request: RequestRow) -> bool:
    """Whether it is about the saga, not about a step that is redone or goes back within a run that goes on."""
    is_meant = request.whole_run or request.cause == Cause.USER
    return is_meant and request.state != RequestState.WITHDRAWN


def probe_said(view: SagaView, action_id: int, display: Display) -> str | None:
    """What its verify probe said of an action in doubt when a person last asked."""
    event = view.probes.get(action_id)
    return None if event is None else f"{display.text(event['detail'])} (asked at {second(event['at'])})"


def stands_for_sure(action: ActionRow) -> bool:
    """Whether an effect is known to stand; the others only may."""
    return not action.in_doubt and action.state in (
        ActionState.DONE,
        ActionState.COMPENSATION_FAILED,
        ActionState.NON_COMPENSABLE,
    )
