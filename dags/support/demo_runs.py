"""The three runs: what is done to each, what is to be seen in it, and what has to come out.

A run is judged by two witnesses: the saga store, and the ledger of the travel service, which knows nothing of sagas.
Whatever is not as expected is a difference, with both in words; a run goes on as far as it can, so that all are told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow_saga.core.errors import UnknownSagaError
from airflow_saga.core.identity import compensation_dag_id, undo_run_id
from airflow_saga.core.states import ActionState, Cause, SagaState
from airflow_saga.plugin.events import What
from airflow_saga.store.reader import Reader, SagaView

from .demo_processes import DemoProblem
from .demo_stack import InVain, Stack

RUN_SECONDS = 150.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Difference:
    """Something that came out otherwise than it has to."""

    where: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, found {self.found}"


@dataclass
class Run:
    """One of the three, and what is known of it."""

    stack: Stack
    tell: Say
    number: int
    dag_id: str
    run_id: str
    title: str
    seen: list[str] = field(default_factory=list)
    """What is to be seen in this run, in sentences."""
    differences: list[Difference] = field(default_factory=list)
    timeline: str = ""
    summary: str = ""
    ledger: list[str] = field(default_factory=list)
    can_do: list[str] = field(default_factory=list)

    @property
    def trip(self) -> str:
        return f"trip-{self.number}"

    def say(self, text: str) -> None:
        self.tell(f"run {self.number}: {text}")

    def expect(self, what: str, expected: object, found: object) -> None:
        if expected != found:
            self.differences.append(Difference(f"run {self.number}, {what}", expected, found))

    # -- looking ----------------------------------------------------------------------------------------------------

    def trigger(self, to: str) -> None:
        self.stack.api.trigger(self.dag_id, self.run_id, {"trip": {"id": self.trip, "to": to}})

    def view(self) -> SagaView | None:
        with self.stack.connect() as connection:
            try:
                return Reader(connection).view(self.dag_id, self.run_id)
            except UnknownSagaError:
                return None

    def wait_for_state(self, state: str, ready: Callable[[SagaView], bool] = lambda view: True) -> SagaView:
        def look() -> SagaView | None:
            view = self.view()
            return view if view is not None and view.saga.state == state and ready(view) else None

        try:
            return self.stack.wait_for(look, RUN_SECONDS, f"it is {state}")
        except InVain as late:
            view = self.view()
            self.expect(
                f"its state after {RUN_SECONDS:g} s", state, view.saga.state if view else "no saga yet"
            )
            raise late

    def wait_for_airflow(self, dag_id: str, run_id: str) -> str:
        def look() -> str | None:
            state = self.stack.api.run_state(dag_id, run_id)
            return state if state in ("success", "failed") else None

        return self.stack.wait_for(look, RUN_SECONDS, f"{dag_id} / {run_id} is over in Airflow")

    def logs(self) -> list[Path]:
        """Where to look for why it went otherwise: its newest task logs, its undo's, and Airflow's own."""
        view = self.view()
        undos = [undo_run_id(request.request_uuid) for request in view.requests] if view else []
        return [
            *self.stack.task_logs(self.run_id)[-2:],
            *self.stack.task_logs(*undos)[-2:],
            self.stack.airflow_log,
        ]

    def fetch(self) -> None:
        """What is printed of it: the same that a person would look at."""
        try:
            self.timeline = self.stack.command("saga", "show", self.dag_id, self.run_id)
        except DemoProblem as problem:
            self.expect("its timeline", "one", problem)
        view, net = self.view(), self.stack.travel.net(self.trip)
        self.ledger = list(ledger_lines(net))
        self.summary = f"run {self.number}  {view.saga.state if view else 'no saga':<20} {net_effect(net)}"


Plays = tuple[tuple[Callable[[Run], None], str, str, str], ...]
"""What is done in a run, its dag_id, its run_id, and its title."""


def play(stack: Stack, tell: Say, plays: Plays, number: int) -> Run:
    """Play one of the three, numbered from 1.

    :raises DemoProblem: something has died, so that there is nothing to judge.
    """
    body, dag_id, run_id, title = plays[number - 1]
    run = Run(stack, tell, number, dag_id, run_id, title)
    try:
        body(run)
    except InVain as late:
        run.differences.append(Difference(f"run {number}", "to go on", late))
    run.fetch()
    return run


def _complete(run: Run) -> None:
    run.trigger("LIS")
    run.wait_for_state(SagaState.COMPLETED)
    run.say("COMPLETED: all is booked")
    run.expect("its state in Airflow", "success", run.wait_for_airflow(run.dag_id, run.run_id))
    net = run.stack.travel.net(run.trip)
    run.expect("net effect", {"flights": 1, "hotels": 1, "cars": 1, "payments": 1}, net["kinds"])
    run.expect("undos", [], net["undo_order"])
    run.seen += [
        "Every call to the travel service is an action: recorded before it is made, with a key of its own, and with",
        "the compensation that undoes it. The run went through, so nothing is undone. It still could be:",
        f"`airflow saga undo {run.dag_id} {run.run_id}`.",
    ]


def _cancel(run: Run) -> None:
    """Mark the run failed while the hotel is being booked."""
    stack = run.stack
    stack.travel.tell("hold", kind="hotels", trip=run.trip, times=1)
    run.trigger("OPO")
    held = f"the hotel of {run.trip} is asked for"
    stack.wait_for(lambda: stack.travel.received("hotels", run.trip, seconds=1), RUN_SECONDS, held)
    run.say("the hotel is booked, its answer on the way: the run is marked failed in Airflow")
    marked_at, marked = datetime.now(UTC), time.monotonic()
    stack.api.mark_failed(run.dag_id, run.run_id)
    view = _await_request(run)
    asked = (view.requests[0].asked_at - marked_at).total_seconds()
    run.say(
        f"the undo was asked for {asked:.2f} s after that, while the call was under way; the hotel answers"
    )
    run.expect("the answer of the hotel that was let go", 1, stack.travel.release("hotels", "forward"))
    view = run.wait_for_state(SagaState.CANCELLED)
    run.say(f"CANCELLED, {time.monotonic() - marked:.1f} s after it was marked failed: nothing stands")
    _judge_cancelled(run, view)
    run.seen += [
        "The run was marked failed as the button in the UI does it, while the hotel's answer was still on its way.",
        f"The listener in Airflow's API server asked for the undo {asked:.2f} s later. The call under way was let end,",
        "so the booking is known; the car was never asked for. Then the hotel was cancelled, and after it the flight:",
        f"look at {compensation_dag_id(run.dag_id)} in the UI.",
    ]


def _await_request(run: Run) -> SagaView:
    def look() -> SagaView | None:
        view = run.view()
        return view if view is not None and view.requests else None

    return run.stack.wait_for(look, RUN_SECONDS, "the undo is asked for", run.stack.airflow_log)


def _judge_cancelled(run: Run, view: SagaView) -> None:
    request = view.requests[0]
    run.expect("undo requests", 1, len(view.requests))
    run.expect("cause of the undo", Cause.MARKED_FAILED, request.cause)
    run.expect("what the listener says of it", What.RUN_MARKED.value, request.reason)
    states = {action.name: action.state for action in view.actions}
    run.expect("actions", {"book_flight": "COMPENSATED", "book_hotel": "COMPENSATED"}, states)
    net = run.stack.travel.net(run.trip)
    run.expect("net effect", {"flights": 0, "hotels": 0}, net["kinds"])
    run.expect("order of the undo", ["hotels", "flights"], [each["kind"] for each in net["undo_order"]])
    run.expect("its state in Airflow", "failed", run.wait_for_airflow(run.dag_id, run.run_id))
    undo = compensation_dag_id(run.dag_id), undo_run_id(request.request_uuid)
    run.expect("state of its undo in Airflow", "success", run.wait_for_airflow(*undo))


def _leave_something(run: Run) -> None:
    """Let a run fail whose refund takes its time, and whose message cannot be unsent."""
    stack = run.stack
    stack.travel.tell("later", kind="payments", trip=run.trip)  # until it is released
    run.trigger("FAO")
    view = run.wait_for_state(SagaState.PARTIALLY_CANCELLED)
    run.say("PARTIALLY_CANCELLED: the refund is under way, the message cannot be unsent")
    states = {action.name: action.state for action in view.actions}
    awaited = {"charge": ActionState.COMPENSATING, "tell_traveller": ActionState.NON_COMPENSABLE}
    run.expect("actions while the refund is under way", awaited, states)
    net = stack.travel.net(run.trip)
    run.expect("net effect while the refund is under way", {"payments": 1, "messages": 1}, net["kinds"])
    run.expect("refunds that were let go", 1, stack.travel.release("payments", "undo"))
    run.say("the bank pays the refund; the reconciler will ask about it")
    view = run.wait_for_state(SagaState.PARTIALLY_CANCELLED, _is_refunded)
    run.say("the refund has settled; the message stands, and a person is asked")
    _judge_left(run, view)


def _is_refunded(view: SagaView) -> bool:
    return any(action.name == "charge" and action.state == ActionState.COMPENSATED for action in view.actions)


def _judge_left(run: Run, view: SagaView) -> None:
    run.expect("what stands", ["tell_traveller"], [action.name for action in view.residual])
    net = run.stack.travel.net(run.trip)
    run.expect("net effect", {"payments": 0, "messages": 1}, net["kinds"])
    causes = [request.cause for request in view.requests]
    run.expect("causes of its undos", [Cause.FAILURE, Cause.DUE], causes)
    run.expect("its state in Airflow", "failed", run.wait_for_airflow(run.dag_id, run.run_id))
    run.seen += [
        "The last step fails, so the run is undone by its policy. The refund was asked for once and was only under",
        "way; the undo ended without it, and the reconciler asked again until it had settled. The message cannot be",
        "unsent. So the run is PARTIALLY_CANCELLED and not CANCELLED, and what stands is named.",
    ]
    number = next((action.action_id for action in view.residual), 0)
    names = f"{run.dag_id} {run.run_id} {number}"
    run.can_do += [
        f"airflow saga resolve {names} --accepted --note 'told the traveller by phone'",
        f"or, in the UI, answer the Required Action of {compensation_dag_id(run.dag_id)}",
    ]


RUNS: Plays = (
    (_complete, "book_trip", "demo-1-completes", "a trip is booked"),
    (_cancel, "book_trip", "demo-2-marked-failed", "marked failed in Airflow in the middle of a booking"),
    (
        _leave_something,
        "refund_later",
        "demo-3-refund-later",
        "a refund that comes later, a message that stays",
    ),
)


def ledger_lines(net: dict[str, Any]) -> Iterator[str]:
    """What the travel service saw of one trip, by kind, and what that adds up to."""
    for kind, keys in net["keys"].items():
        landed, undone = (sum(each[name] for each in keys.values()) for name in ("landed", "undone"))
        yield f"{kind:<9} {landed} made, {undone} undone: {net['kinds'][kind]} standing"
    if net["undo_order"]:
        yield f"undone in this order: {', '.join(each['kind'] for each in net['undo_order'])}"
    yield net_effect(net)


def net_effect(net: dict[str, Any]) -> str:
    if not net["total"]:
        return "net effect 0: nothing stands"
    return f"net effect {net['total']:+d}: {', '.join(str(each['id']) for each in net['standing'])}"
