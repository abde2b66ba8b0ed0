"""What undo runs may do in the random play: freeze, take a step, compensate, be killed or fenced, settle."""

from __future__ import annotations

from airflow_saga.core.errors import UndoFencedError, UndoOutOfOrderError
from airflow_saga.core.records import ActionRow
from airflow_saga.store.freeze import Freeze
from airflow_saga.store.undo import EndedTry
from tests.store.stage import Stage
from tests.store.world import UndoProcess


class UndoMoves(Stage):
    """Moves of the undo runs, however many there are."""

    def freeze(self, owner: str, over: bool) -> None:
        request = self._open_request()
        assert request is not None
        before = self.view
        frozen = self.scene.freezes.freeze_if_quiet(request.request_uuid, owner, owner_is_over=over)
        if frozen.outcome is Freeze.FROZEN and request.state != "FROZEN":
            after = self.look()
            if request.whole_run:
                assert {step.state for step in after.steps} == {"UNDOING"}
            if request.state == "HINTED":
                assert before.saga.state == "FAILED", "an automatic undo of a saga that runs again"

    def attach_undo(self, task: str, owner: str) -> None:
        request = self._open_request()
        assert request is not None
        owner = request.owner_run_id or owner
        try:
            attached = self.scene.undos.attach_undo_if_in_order(
                request.request_uuid, task, -1, owner, lease_seconds=15, host="h", pid=1
            )
        except (UndoFencedError, UndoOutOfOrderError):
            return
        if attached is not None:
            self.world.undos.append(UndoProcess(attached))

    def undo_goes_on(self, pick: int, which: int | None, unknown: bool) -> None:
        """The next action in order, or any one at all: the log has to hold the order itself."""
        self._turn(
            self._pick([process for process in self.world.undos if process.trying is None], pick),
            which,
            unknown,
        )

    def an_undo_run_works(self, pick: int, which: int | None, unknown: bool, owner: str) -> None:
        """As its tasks would: freeze, take a seized step if nobody has it, one turn."""
        request = self._open_request()
        assert request is not None
        if request.state != "FROZEN":
            self.freeze(owner, False)
            self.look()
            return
        step = self._pick([step for step in self.view.steps if step.state == "UNDOING"], pick)
        if step is None:
            return
        if not [process for process in self.world.undos if process.attached.step.fence == step.fence]:
            self.attach_undo(step.task_id, owner)
            self.look()
        mine = [process for process in self.world.undos if process.attached.step.step_id == step.step_id]
        if mine and mine[-1].trying is None:
            self._turn(mine[-1], which, unknown)

    def _turn(self, process: UndoProcess, which: int | None, unknown: bool) -> None:
        step_id = process.attached.step.step_id
        rows = [row for row in self.view.actions if row.step_id == step_id]
        rows.sort(key=lambda row: (row.generation, row.seq), reverse=True)
        if which is None:
            rows = [row for row in rows if not row.settled][:1]
        row = self._pick(rows, which or 0)
        if row is None:
            return
        if row.state == "IN_DOUBT" and row.effect == "COMPENSABLE" and not row.probed and which is None:
            self._probe(process, row, unknown)
        elif row.effect == "NON_COMPENSABLE" and row.state in ("DONE", "IN_DOUBT"):
            self.scene.undos.settle_action_if_held(process.attached, row, "NON_COMPENSABLE")
        else:
            self._begin_compensation(process, row)

    def _probe(self, process: UndoProcess, row: ActionRow, unknown: bool) -> None:
        if unknown:
            self.scene.undos.settle_action_if_held(process.attached, row, "IN_DOUBT", probed=True)
            return
        state = "DONE" if self.world.stands(row.action_id) else "FAILED"
        taken = self.scene.steps.verified_if_held(process.attached.step, row.action_id, state, None, "probe")
        assert not taken or row.action_id not in self._wire(), "A1 was not over"

    def _begin_compensation(self, process: UndoProcess, row: ActionRow) -> None:
        try:
            _, tries = self.scene.undos.write_undo(process.attached, None, self.scene.next_try(row))
        except UndoFencedError:
            assert self._row(row.action_id) == row, "a fenced undo begins a compensation (P7)"
            self.world.undos.remove(process)
            return
        if tries is None:
            return
        assert row.state in ("DONE", "IN_DOUBT", "COMPENSATING", "COMPENSATION_FAILED")
        assert row.action_id not in self.world.undone, "a confirmed compensation runs again (P8)"
        assert row.action_id not in self._wire(), "A1 was not over"
        later_steps = set(process.attached.later_step_ids)
        later = [
            other
            for other in self.view.actions
            if not other.settled
            and (
                other.step_id in later_steps
                or (
                    other.step_id == row.step_id and (other.generation, other.seq) > (row.generation, row.seq)
                )
            )
        ]
        assert later == [], "undone before what came after it (P5)"
        process.trying = row

    def compensation_ends(self, pick: int, took: bool, end: str) -> None:
        process = self._pick([process for process in self.world.undos if process.trying], pick)
        row = process.trying
        process.trying = None
        if took or end == "confirm":
            self.world.compensate(row.action_id)
        if end == "crash":
            self.world.undos.remove(process)
            return
        state = {"confirm": "COMPENSATED", "give up": "COMPENSATION_FAILED"}.get(end, "COMPENSATING")
        ended = EndedTry(
            row.action_id,
            state,
            failed=end in ("fail", "give up"),
            reconcile_seconds=5.0 if end == "later" else None,
        )
        before = self._row(row.action_id)
        try:
            taken, _ = self.scene.undos.write_undo(process.attached, ended, None)
        except UndoFencedError:
            assert self._row(row.action_id) == before, "a fenced undo overwrites a newer verdict (P7)"
            self.world.undos.remove(process)
            return
        if taken and end == "confirm":
            self.world.undone.add(row.action_id)

    def settle(self, owner: str) -> None:
        request = self._open_request()
        assert request is not None
        try:
            settled = self.scene.settles.settle_if_all_settled(
                request.request_uuid, request.owner_run_id or owner
            )
        except UndoFencedError:
            return
        if settled is not None and request.whole_run:
            assert self.look().saga.state in ("CANCELLED", "PARTIALLY_CANCELLED")
