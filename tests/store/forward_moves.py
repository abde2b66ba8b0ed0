"""What attempts at a step may do in the random play: begin, call, answer late, crash; and what time does to them."""

from __future__ import annotations

from airflow_saga.core.decide import Go
from airflow_saga.core.records import Outcome
from tests.store.stage import Stage
from tests.store.world import TASKS, Call, Process

A1_SECONDS = 12.0


def effect_of(seq: int) -> str:
    return "NON_COMPENSABLE" if seq % 5 == 4 else "COMPENSABLE"


class ForwardMoves(Stage):
    """Moves of the processes that go forward, and of their calls."""

    def attach(self, task: str) -> None:
        before = self.view
        attached = self.scene.try_attach(task, **self.world.attempt(task))
        go, step = attached.decision.go, attached.step
        if go in (Go.WAIT, Go.REFUSE):
            assert attached.decision.message
            if go is Go.REFUSE:
                after = self.look()
                assert (after.steps, after.requests) == (before.steps, before.requests)
                assert after.saga.state == before.saga.state
            return
        assert before.saga.state not in ("CANCELLING", "PARTIALLY_CANCELLED")
        if before.saga.state in ("CANCELLED", "SUSPENDED"):
            assert self.world.clear_number > before.saga.stop_clear_number, "nobody cleared it since the stop"
        self.world.cleared.discard(task)
        if go is Go.REPLAY:
            return
        assert step is not None
        upstream = [other.state for other in before.steps if other.task_id in TASKS[task]]
        assert not {"UNDOING", "UNDONE", "PARTLY_UNDONE"} & set(upstream)
        seqs = [row.seq for row in attached.recorded if row.twin_of is None]
        self.world.processes.append(Process(task, step, max(seqs, default=0) + 1))

    def begin(self, pick: int) -> None:
        process = self._process(pick)
        if process.open_call is not None:
            return
        allowed = self._holds(process) and self.view.saga.state == "RUNNING"
        seq = process.next_seq
        begun = self.scene.begin(process.step, seq, effect=effect_of(seq))
        assert not begun or allowed, "an intent was written after a stop, or by a fenced attempt (P2, P7)"
        if begun:
            self._called(process, seq, 1)
            process.next_seq += 1

    def _called(self, process: Process, seq: int, tries: int) -> None:
        row = self.scene.steps.recorded_action(process.step, seq)
        assert row is not None
        process.calls.append(Call(row.action_id, seq, tries))

    def act(self, pick: int, count: int) -> None:
        """Calls that begin, take effect and say so."""
        process = self._process(pick)
        for _ in range(count):
            self.begin(pick)
            call = process.open_call
            if call is not None and call.landed is None:
                self.world.land(call)
                self._say(process, call, "DONE")

    def call_again(self, pick: int, which: int) -> None:
        """A call that proved not applied is tried again."""
        process = self._process(pick)
        mine = [
            row for row in self.view.actions if row.step_id == process.step.step_id and row.twin_of is None
        ]
        row = self._pick([row for row in mine if row.generation == process.step.generation], which)
        if row is None or process.open_call is not None:
            return
        allowed = self._holds(process) and self.view.saga.state == "RUNNING" and row.state == "FAILED"
        intent = self.scene.intent(process.step, row.seq, max_tries=4, effect=row.effect)
        tries, _ = self.scene.steps.retry_if_allowed(process.step, intent)
        assert tries is None or allowed, "a call was made again that may not be (P3)"
        if tries is not None:
            self._called(process, row.seq, tries)

    def a_probe_is_asked(self, pick: int, which: int) -> None:
        """What an earlier attempt left in doubt is found out before the step goes on."""
        process = self._process(pick)
        doubts = [
            row
            for row in self.view.actions
            if row.step_id == process.step.step_id and row.state == "IN_DOUBT"
        ]
        row = self._pick(doubts, which)
        if row is None:
            return
        state = "DONE" if self.world.stands(row.action_id) else "FAILED"
        taken = self.scene.steps.verified_if_held(process.step, row.action_id, state, None, "probe")
        assert not taken or row.action_id not in self._wire(), "A1 was not over"

    def the_wire_ends(self, pick: int, lands: bool) -> None:
        call = self._pick(self.world.on_the_wire(), pick)
        if lands:
            self.world.land(call)
        else:
            call.landed = False

    def call_ends(self, pick: int, knows: bool) -> None:
        """It says what became of it, or raises something that says nothing."""
        calling = [process for process in self.world.living() if process.open_call]
        holding = [process for process in calling if self._holds(process)]
        process = self._pick(holding if pick % 4 else calling, pick)
        if process is None:
            return  # the others take their time: see `a_call_lands_after_all`
        call = process.open_call
        assert call is not None
        state = "IN_DOUBT"
        if knows and call.landed is not None:
            state = "DONE" if call.landed else "FAILED"
        self._say(process, call, state)

    def _say(self, process: Process, call: Call, state: str) -> None:
        result = '"r"' if state == "DONE" else None
        outcome = Outcome(call.seq, state, result, own=call.landed is not None, tries=call.tries)
        call.reported = True
        if not self.scene.write(process.step, ended=[outcome]).ended:
            self.scene.lates.record_late(process.step, outcome, idempotent=False)

    def process_ends(self, pick: int, how: str) -> None:
        process = self._process(pick)
        if how != "crash" and process.open_call is not None:
            return
        if how == "finish":
            self.scene.steps.finish_if_held(process.step, '"out"', False)
        elif how == "stop":
            self.scene.steps.stop_if_held(process.step)
        process.die()

    def a_call_lands_after_all(self, pick: int) -> None:
        """The world breaks A1: a call that was thought dropped takes effect, and its process says so."""
        process, call = self._pick(self._dropped(), pick)
        call.reported = True
        before = {row.action_id for row in self.view.actions}
        outcome = Outcome(call.seq, "DONE", '"late"', tries=call.tries)
        self.scene.lates.record_late(process.step, outcome, idempotent=False)
        twins = [row.action_id for row in self.look().actions if row.action_id not in before]
        landed = Call(twins[0] if twins else call.action_id, call.seq, call.tries)
        self.world.land(landed)
        self.world.undone.discard(landed.action_id)

    def time_passes(self, lands: bool) -> None:
        """A1 is over for every call that is on the wire; living processes kept their lease meanwhile."""
        for call in self.world.on_the_wire():
            if lands:
                self.world.land(call)
            else:
                call.landed = False
        self.scene.time_passes(A1_SECONDS)
        for process in self.world.living():
            self.scene.steps.heartbeat_if_held(process.step, 15)
