"""The real store, driven at random by everybody who may touch it, against the truth of a simulated world.

Forward attempts that crash, are taken over and answer late; people who cancel, keep, undo, clear, settle; hooks and
the reconciler; undo attempts that are killed, fenced, refused. After each move the log must tell of every effect that
stands or may, undone in the right order and with the right end (PROTOCOL P2 to P10), and at the end of each run a
working undo must be able to close the saga. `SAGA_STATEFUL_EXAMPLES` plays that many random runs instead of the usual
fixed ones.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from airflow_saga.core.errors import VerbRefusedError
from airflow_saga.core.records import RequestRow
from airflow_saga.core.states import RESIDUAL_ACTION_STATES
from airflow_saga.store.decision import Verdict
from airflow_saga.store.freeze import Freeze
from airflow_saga.store.reader import SagaView
from tests.store.forward_moves import ForwardMoves
from tests.store.scene import Scene, connect
from tests.store.undo_moves import UndoMoves
from tests.store.world import BACKWARDS, TASKS, UndoProcess, World

EXAMPLES = int(os.environ.get("SAGA_STATEFUL_EXAMPLES", "0"))
OWNERS = ("undo__1", "undo__2")
Draw = Callable[[random.Random], Any]


def one_of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


def pick(rng: random.Random) -> int:
    return rng.randrange(10_000)


def pick_or_next(rng: random.Random) -> int | None:
    return pick(rng) if rng.random() < 0.3 else None


FLAG = one_of(False, True)
TASK = one_of(*TASKS)
OWNER = one_of(*OWNERS)
ENDS = one_of("confirm", "confirm", "confirm", "fail", "give up", "later", "crash")
MOVES: dict[str, tuple[Draw, ...]] = {
    "attach": (TASK,),
    "begin": (pick,),
    "act": (pick, one_of(1, 2, 3)),
    "call_again": (pick, pick),
    "a_probe_is_asked": (pick, pick),
    "the_wire_ends": (pick, FLAG),
    "call_ends": (pick, FLAG),
    "process_ends": (pick, one_of("finish", "finish", "stop", "crash")),
    "a_call_lands_after_all": (pick,),
    "time_passes": (FLAG,),
    "somebody_stops_it_now": (),
    "somebody_stops_it": (one_of("cancel", "keep", "undo", "marked failed"), FLAG),
    "somebody_clears": (TASK, FLAG),
    "it_runs_again": (),
    "the_run_ends": (FLAG,),
    "something_smaller": (TASK, one_of("mark", "hold", "release")),
    "reconciler": (),
    "deadline": (),
    "a_person_settles": (pick, FLAG),
    "freeze": (OWNER, FLAG),
    "attach_undo": (TASK, OWNER),
    "undo_goes_on": (pick, pick_or_next, FLAG),
    "an_undo_run_works": (pick, pick_or_next, FLAG, OWNER),
    "compensation_ends": (pick, FLAG, ENDS),
    "settle": (OWNER,),
}
"""Every move, and what it is played with."""


class Play(ForwardMoves, UndoMoves, RuleBasedStateMachine):
    """One run of one saga; the moves of people, hooks and the reconciler are here."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        with connect(self.url) as connection:
            connection.execute("DELETE FROM airflow_saga.saga; DELETE FROM airflow_saga.action")
        self.scene = Scene(self.url)
        self.world = World()
        self.made: list[str] = []
        self.scene.runs.open_if_new(*self.scene.run)
        self.saga_id = self.scene.saga.saga_id
        self.view = self.look()
        self._begins()

    def _begins(self) -> None:
        """Enough to go wrong: a step that has finished, one after it in the middle of a call, one beside them."""
        for task, calls in (("flight", 2), ("hotel", 1), ("car", 1)):
            self.look()
            self.attach(task)
            self.look()
            self.act(len(self.world.processes) - 1, calls)
            if task == "flight":
                self.process_ends(0, "finish")
            if task == "hotel":
                self.begin(len(self.world.processes) - 2)
        self.look()

    @rule(seed=st.integers(0, 2**32))
    def somebody_moves(self, seed: int) -> None:
        # Hypothesis prefers small and equal values, which here would mean the same few moves again and again.
        rng = random.Random(f"{seed} {len(self.made)}")
        name = rng.choice(self._likely())
        drawn = [draw(rng) for draw in MOVES[name]]
        self.made.append(name)
        note(f"{name}{tuple(drawn)}")
        getattr(self, name)(*drawn)

    def _likely(self) -> list[str]:
        """The moves that can be made now, each as often as it is likely: left alone, chance never gets to an undo."""
        world, request = self.world, self._open_request()
        open_calls = [process for process in world.living() if process.open_call]
        trying = [process for process in world.undos if process.trying]
        lives, runs = bool(world.living()), self.view.saga.state == "RUNNING"
        ended = self.view.saga.state in ("CANCELLED", "SUSPENDED", "COMPLETED", "FAILED")
        weights = {
            "attach": 4,
            "time_passes": 2,
            "somebody_clears": 1,
            "it_runs_again": 6 * ended,
            "the_run_ends": 1,
            "something_smaller": 1,
            "reconciler": 1,
            "somebody_stops_it": 1,
            "somebody_stops_it_now": runs,
            "begin": 4 * lives,
            "act": 4 * (lives and runs),
            "call_again": 2 * lives,
            "a_probe_is_asked": 2 * lives,
            "process_ends": 2 * lives,
            "the_wire_ends": 2 * bool(world.on_the_wire()),
            "call_ends": 4 * bool(open_calls),
            "a_call_lands_after_all": 2 * bool(self._dropped()),
            "deadline": self.view.saga.mode == "undo",
            "a_person_settles": 2 * bool(self.view.residual),
            "freeze": bool(request),
            "attach_undo": bool(request),
            "settle": 2 * bool(request),
            "an_undo_run_works": 10 * bool(request),
            "undo_goes_on": 3 * (len(world.undos) > len(trying)),
            "compensation_ends": 10 * bool(trying),
        }
        return [name for name, weight in weights.items() for _ in range(weight)]

    # -- people, hooks, the reconciler ------------------------------------------------------------------------------

    def somebody_stops_it_now(self) -> None:
        """The call under way is abandoned, and the undo seizes its step at once."""
        self._cancel(False, True)
        if self._open_request() is not None:
            self.freeze("undo__1", False)

    def somebody_stops_it(self, what: str, now: bool) -> None:
        if what in ("cancel", "keep"):
            self._cancel(what == "keep", now)
        else:
            self._undo(what == "marked failed", now)

    def _cancel(self, keep: bool, now: bool) -> None:
        decision = self.scene.requests.cancel(
            *self.scene.run, actor="ann", keep=keep, stop_now=now, clear_number=self.world.clear_number
        )
        saga = self.look().saga
        assert decision.message
        if decision.verdict in (Verdict.CANCELLING, Verdict.QUEUED):
            assert (saga.state, saga.mode) == ("CANCELLING", "undo")
        if decision.verdict in (Verdict.CANCELLED, Verdict.NOTHING):
            assert saga.state == "CANCELLED"
        if decision.verdict is Verdict.FINISHED:
            assert saga.state in ("COMPLETED", "FAILED", "SUSPENDED", "PARTIALLY_CANCELLED")
        if not keep or decision.request is None:
            assert saga.state not in ("PENDING", "RUNNING")

    def _undo(self, by_hook: bool, now: bool) -> None:
        before = self.view.saga.state
        decision = self.scene.requests.undo(
            *self.scene.run,
            actor="hook" if by_hook else "ann",
            cause="marked_failed" if by_hook else "user",
            stop_now=now,
            clear_number=self.world.clear_number,
        )
        if by_hook and before not in ("PENDING", "RUNNING", "COMPLETED"):
            assert decision.verdict is Verdict.IGNORED
        else:
            assert self.look().saga.state in ("CANCELLING", "CANCELLED")

    def somebody_clears(self, task: str, whole_run: bool) -> None:
        self.world.clear(set(TASKS) if whole_run else {task})

    def it_runs_again(self) -> None:
        """All of it is cleared, and Airflow starts the first task."""
        self.world.clear(set(TASKS))
        self.attach("flight")

    def the_run_ends(self, failed: bool) -> None:
        before = self.view.saga.state
        if failed:
            self.scene.runs.fail_and_hint(
                *self.scene.run, cause="failure", clear_number=self.world.clear_number
            )
            return
        self.scene.runs.complete_if_over(*self.scene.run)
        after = self.look()
        if after.saga.state == "COMPLETED" and before != "COMPLETED":
            assert self._open_request() is None
            assert {step.state for step in after.steps} <= {"SUCCEEDED"}

    def something_smaller(self, task: str, what: str) -> None:
        request = self._open_request()
        if what == "mark":
            self.scene.runs.mark_step_if_running(*self.scene.run, task, -1)
        elif what == "hold":
            self.scene.sweeps.hold_if_mass_outage(causes=["failure"], threshold=0, window_seconds=60)
        elif request is not None and request.state == "HELD":
            self.scene.requests.release(*self.scene.run, actor="ann")

    def reconciler(self) -> None:
        saga_id = self.view.saga.saga_id
        for row in self.scene.reader.lost_leases():
            self.scene.sweeps.stop_if_lost(saga_id, row["step_id"])
        self.scene.sweeps.suspend_if_quiet(saga_id)
        self.scene.settles.ask_again_if_due(saga_id)

    def deadline(self) -> None:
        for call in self.world.on_the_wire():
            call.landed = False
        before = self.view.steps
        self.scene.time_passes(4000)
        self.scene.settles.expire_if_past_deadline(self.view.saga.saga_id)
        assert self.look().saga.state in ("CANCELLED", "PARTIALLY_CANCELLED")
        fences = {step.step_id: step.fence for step in self.view.steps}
        for step in before:
            if step.state in ("RUNNING", "UNDOING"):
                assert fences[step.step_id] > step.fence, "the deadline fences all"

    def a_person_settles(self, pick: int, accept: bool) -> None:
        row = self._pick(list(self.view.residual), pick)
        answer = "DONE" if self.world.stands(row.action_id) else "FAILED"
        settled = "ACCEPTED" if accept else "COMPENSATED"
        to = answer if self.view.step_of(row).state == "STOPPED" else settled
        try:
            self.scene.resolves.resolve(*self.scene.run, row.action_id, to=to, actor="ann", note_text="seen")
        except VerbRefusedError:
            assert self._row(row.action_id) == row
            return
        assert row.action_id not in self._wire(), "A1 was not over"
        if to == "COMPENSATED":
            self.world.compensate(row.action_id)

    # -- what must hold after every move ----------------------------------------------------------------------------

    @invariant()
    def the_log_tells_the_truth(self) -> None:
        view = self.look()
        self.world.undone -= {row.action_id for row in view.actions if row.state == "IN_DOUBT"}
        wire = self._wire()
        for row in view.actions:
            told = row.state in RESIDUAL_ACTION_STATES or row.state == "ACCEPTED"
            if self.world.stands(row.action_id):
                assert told, f"an effect stands that the log calls {row.state} (P4)"
                assert self.world.standing[row.action_id] == 1, "two effects in one row"
            if row.action_id in wire:
                assert told, f"a call may still land that the log calls {row.state} (A1)"
        begun = {call.action_id for _, call in self.world.calls()}
        assert begun <= {row.action_id for row in view.actions}, "an action was forgotten (P4)"
        if view.saga.state == "CANCELLED":
            assert view.residual == (), "CANCELLED although something stands, or may (P6)"
        if view.saga.state == "PARTIALLY_CANCELLED":
            assert view.residual, "PARTIALLY_CANCELLED names nothing (P6)"
        for step in view.steps:
            assert step.fence >= self.world.fences.get(step.step_id, 0), "a fence fell (P7)"
            self.world.fences[step.step_id] = step.fence
        self._requests_are_in_order(view)

    def _requests_are_in_order(self, view: SagaView) -> None:
        states = [row.state for row in view.requests]
        assert sum(state in ("HINTED", "HELD", "REQUESTED", "FROZEN") for state in states) <= 1, "P10"
        assert states.count("QUEUED") <= states.count("FROZEN"), "it waits behind nothing"
        if any(step.state == "UNDOING" for step in view.steps):
            assert "FROZEN" in states, "nobody undoes what was seized"
        whole = [row.state for row in view.requests if row.whole_run]
        if view.saga.mode == "undo":
            assert {"REQUESTED", "FROZEN", "QUEUED"} & set(whole), "nobody will end this stop"
        else:
            assert not {"REQUESTED", "FROZEN", "QUEUED"} & set(whole), (
                "an undo of a saga that is not being stopped"
            )

    # -- the end ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self._a_working_undo_closes_the_saga()
        finally:
            self.scene.close()

    def _a_working_undo_closes_the_saga(self) -> None:
        for call in self.world.on_the_wire():
            call.landed = False
        for _ in range(4):
            self.scene.time_passes(100)
            self.scene.requests.undo(*self.scene.run, actor="ann", stop_now=True)
            self.look()
            request = self._open_request()
            if request is None:
                break
            self._carry_out(request)
        for row in self.look().residual:
            assert row.state == "NON_COMPENSABLE", f"{row.state} stands after a working undo"
            self.scene.resolves.resolve(
                *self.scene.run, row.action_id, to="ACCEPTED", actor="ann", note_text="so be it"
            )
        assert self.look().saga.state == "CANCELLED"
        self.the_log_tells_the_truth()

    def _carry_out(self, request: RequestRow) -> None:
        frozen = self.scene.freezes.freeze_if_quiet(request.request_uuid, "undo__end", owner_is_over=True)
        assert frozen.outcome is Freeze.FROZEN, frozen
        for task in BACKWARDS:
            attached = self.scene.undos.attach_undo_if_in_order(
                request.request_uuid, task, -1, "undo__end", lease_seconds=15, host="h", pid=1
            )
            for opened in attached.open_actions if attached is not None else ():
                assert attached is not None
                row = self._row(opened.action_id)
                if row.effect == "NON_COMPENSABLE":
                    assert self.scene.undos.settle_action_if_held(attached, row, "NON_COMPENSABLE")
                elif row.state == "IN_DOUBT":
                    self._probe(UndoProcess(attached), row, unknown=False)
                row = self._row(opened.action_id)
                if not row.settled:
                    self.world.compensate(row.action_id)
                    self.scene.compensate(attached, row)
        assert self.scene.settles.settle_if_all_settled(request.request_uuid, "undo__end") is not None


@pytest.mark.slow
@pytest.mark.timeout(7200 if EXAMPLES else 600)
def test_whatever_happens_the_log_tells_the_truth(store_url: str) -> None:
    class PlayHere(Play):
        url = store_url

    run_state_machine_as_test(
        PlayHere,
        settings=settings(
            max_examples=EXAMPLES or 40,
            stateful_step_count=50,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
