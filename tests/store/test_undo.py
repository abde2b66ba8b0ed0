"""An attempt to undo a step: attach, then compensation by compensation (PROTOCOL 5, 6)."""

from __future__ import annotations

import pytest

from airflow_saga.core.errors import UndoFencedError, UndoOutOfOrderError
from airflow_saga.store.undo import EndedTry
from tests.store.scene import UNDO_RUN, Scene

# -- one step -------------------------------------------------------------------------------------------------------


def test_an_undo_attempt_takes_its_step_with_a_new_fence_and_a_lease(each_scene: Scene) -> None:
    each_scene.stopped("flight", 1, 2)
    request = each_scene.freeze(each_scene.cancel())
    first = each_scene.undo_of()
    assert [row.seq for row in first.open_actions] == [2, 1]
    assert (first.step.fence, first.step.state, first.step.host, first.step.pid) == (
        3,
        "UNDOING",
        "worker-2",
        99,
    )
    assert first.step.lease_until is not None
    second = each_scene.undo_of()
    assert second.step.fence == 4
    row = each_scene.action(2)
    with pytest.raises(UndoFencedError, match=r"fence 4, ours 3"):
        each_scene.undos.write_undo(first, None, each_scene.next_try(row))
    assert not each_scene.undos.settle_action_if_held(first, row, "COMPENSATION_FAILED", error="x")
    assert each_scene.action(2) == row
    other = each_scene.undos.attach_undo_if_in_order(
        request.request_uuid, "unknown", -1, UNDO_RUN, lease_seconds=15, host="h", pid=1
    )
    assert other is None


def test_c40_a_step_is_undone_only_after_every_later_one(each_scene: Scene) -> None:
    each_scene.ran("flight", 1)
    each_scene.ran("hotel", 1, after=["flight"])
    each_scene.ran("car", 1)
    each_scene.freeze(each_scene.ask())
    before = each_scene.tables()
    with pytest.raises(UndoOutOfOrderError, match=r"only after: book of hotel\. Nothing was called"):
        each_scene.undo_of("flight")
    assert each_scene.tables() == before
    each_scene.undo_step("car")
    each_scene.undo_step("hotel")
    each_scene.undo_step("flight")
    assert each_scene.settle() is not None
    assert each_scene.saga.state == "CANCELLED"


def test_mapped_steps_are_ordered_by_index_only_inside_one_mapped_group(scene: Scene) -> None:
    for index in (0, 1):
        inside = {"map_index": index, "mapped_group": "trip"}
        scene.finish(scene.act(scene.attach("pay", **inside), 1))
        scene.finish(scene.act(scene.attach("book", after=["pay"], **inside), 1))
    request = scene.freeze(scene.ask())

    def take(task_id: str, index: int):  # type: ignore[no-untyped-def]
        return scene.undos.attach_undo_if_in_order(
            request.request_uuid, task_id, index, UNDO_RUN, lease_seconds=15, host="h", pid=1
        )

    attached = take("book", 1)
    scene.compensate(attached, attached.open_actions[0])
    assert take("pay", 1) is not None, "its own index is settled"
    with pytest.raises(UndoOutOfOrderError):
        take("pay", 0)
    assert scene.reader.indexes_to_undo(request, "pay") == [0, 1]
    assert scene.reader.indexes_to_undo(request, "book") == [0]


# -- one compensation -----------------------------------------------------------------------------------------------


def test_the_intent_of_a_compensation_is_written_before_it_and_its_end_with_the_next(
    each_scene: Scene,
) -> None:
    each_scene.frozen_undo()
    attached = each_scene.undo_of()
    second, first = attached.open_actions
    begin = each_scene.next_try(second, undo_deadline_seconds=60.0)
    assert each_scene.undos.write_undo(attached, None, begin) == (False, 1)
    row = each_scene.action(2)
    assert (row.state, row.undo_tries, row.undo_key) == ("COMPENSATING", 1, begin.undo_key)
    assert row.undo_begun_at is not None
    assert row.undo_deadline_at is not None
    assert not row.settled
    ended = EndedTry(second.action_id, "COMPENSATED")
    assert each_scene.undos.write_undo(attached, ended, each_scene.next_try(first)) == (True, 1)
    assert each_scene.states() == {1: "COMPENSATING", 2: "COMPENSATED"}
    assert each_scene.action(2).undo_finished_at is not None
    assert each_scene.undos.write_undo(attached, ended, None) == (False, None), "confirmed once"
    with_nothing = each_scene.undos.write_undo(attached, None, each_scene.next_try(second))
    assert with_nothing == (False, None), "what was confirmed is never begun again"


def test_inside_a_step_compensations_go_by_falling_seq_across_generations(scene: Scene) -> None:
    scene.ran("flight", 1, 2)
    scene.freeze(scene.redo(scene.step()))
    attached = scene.undo_of()
    scene.compensate(attached, scene.action(2))
    scene.compensate(attached, scene.action(1), "COMPENSATION_FAILED", failed=True)
    scene.settle()
    scene.sql("UPDATE airflow_saga.step SET state = 'UNDONE'")  # as if a person had let it run again
    scene.stopped("flight", 1, max_tries=1, try_number=2, clear_number=1)
    scene.freeze(scene.ask())
    attached = scene.undo_of()
    assert [(row.generation, row.seq) for row in attached.open_actions] == [(2, 1), (1, 1)]
    newer, older = attached.open_actions
    assert scene.undos.write_undo(attached, None, scene.next_try(older)) == (False, None)
    scene.compensate(attached, newer)
    scene.compensate(attached, older)


def test_a_compensation_that_failed_is_not_over_so_the_one_before_it_may_not_begin(each_scene: Scene) -> None:
    each_scene.frozen_undo()
    attached = each_scene.undo_of()
    second, first = attached.open_actions
    assert each_scene.undos.write_undo(attached, None, each_scene.next_try(second))[1] == 1
    failed = EndedTry(second.action_id, "COMPENSATING", error="503", failed=True)
    assert each_scene.undos.write_undo(attached, failed, each_scene.next_try(first)) == (True, None)
    assert each_scene.states() == {1: "DONE", 2: "COMPENSATING"}
    assert (each_scene.action(2).undo_failures, each_scene.action(2).error) == (1, "503")


def test_the_next_try_of_the_same_action_may_ride_with_the_end_of_the_last(each_scene: Scene) -> None:
    each_scene.frozen_undo(1)
    attached = each_scene.undo_of()
    (row,) = attached.open_actions
    assert each_scene.undos.write_undo(attached, None, each_scene.next_try(row))[1] == 1
    failed = EndedTry(row.action_id, "COMPENSATING", error="503", failed=True)
    assert each_scene.undos.write_undo(attached, failed, each_scene.next_try(row)) == (True, 2)
    row = each_scene.action()
    assert (row.state, row.undo_tries, row.undo_failures, row.error) == ("COMPENSATING", 2, 1, None)


def test_an_undo_ends_only_compensations_of_its_own_step(scene: Scene) -> None:
    scene.stopped("flight", 1)
    scene.stopped("car", 1)
    scene.freeze(scene.cancel())
    flight, car = scene.undo_of("flight"), scene.undo_of("car")
    row = scene.action(1, "car")
    assert scene.undos.write_undo(car, None, scene.next_try(row))[1] == 1
    assert scene.undos.write_undo(flight, EndedTry(row.action_id, "COMPENSATED"), None) == (False, None)
    assert scene.undos.write_undo(flight, None, scene.next_try(row)) == (False, None)
    assert scene.action(1, "car").state == "COMPENSATING"


@pytest.mark.parametrize("state", ["DONE", "IN_DOUBT"])
def test_c35_no_compensation_begins_while_the_call_may_still_land(each_scene: Scene, state: str) -> None:
    step = each_scene.attach()
    assert each_scene.begin(step, 1)
    each_scene.freeze(each_scene.cancel(stop_now=True))
    if state == "DONE":
        each_scene.sql(
            "UPDATE airflow_saga.action SET state = 'DONE'"
        )  # known by other means than its own answer
    attached = each_scene.undo_of()
    begin = each_scene.next_try(each_scene.action())
    assert each_scene.undos.write_undo(attached, None, begin) == (False, None)
    assert not each_scene.undos.settle_action_if_held(attached, each_scene.action(), "IN_DOUBT", probed=True)
    each_scene.time_passes(12)
    assert each_scene.undos.write_undo(attached, None, begin) == (False, 1)
    assert each_scene.action().in_doubt is (state == "IN_DOUBT") or state == "DONE"


def test_read_only_actions_are_never_undone(scene: Scene) -> None:
    step = scene.attach()
    scene.read(step, 1)
    scene.act(step, 2)
    assert scene.steps.stop_if_held(step)
    scene.freeze(scene.cancel())
    attached = scene.undo_of()
    assert [row.seq for row in attached.open_actions] == [2]
    assert scene.undos.write_undo(attached, None, scene.next_try(scene.action(1))) == (False, None)


@pytest.mark.parametrize("declared", ["NON_COMPENSABLE", "missing", "in doubt"])
def test_moves_of_the_undo_that_call_nothing(each_scene: Scene, declared: str) -> None:
    effect = "NON_COMPENSABLE" if declared == "NON_COMPENSABLE" else "COMPENSABLE"
    step = each_scene.attach()
    assert each_scene.begin(step, 1, effect=effect)
    assert each_scene.end(step, 1, "IN_DOUBT" if declared == "in doubt" else "DONE")
    assert each_scene.steps.stop_if_held(step)
    each_scene.freeze(each_scene.cancel())
    attached = each_scene.undo_of()
    state, probed = {
        "NON_COMPENSABLE": ("NON_COMPENSABLE", False),
        "missing": ("COMPENSATION_FAILED", False),
        "in doubt": ("IN_DOUBT", True),
    }[declared]
    row = each_scene.action()
    say = {"probed": probed, "error": "because"}
    assert each_scene.undos.settle_action_if_held(attached, row, state, **say)  # type: ignore[arg-type]
    row = each_scene.action()
    assert (row.state, row.settled, row.residual, row.error) == (state, True, True, "because")
    settled = each_scene.settle()
    assert settled is not None
    assert (settled.saga.state, [action.seq for action in settled.residual]) == ("PARTIALLY_CANCELLED", [1])
    assert each_scene.step().state == "PARTLY_UNDONE"


def test_the_fresh_row_comes_with_the_clock_of_the_database(scene: Scene) -> None:
    scene.frozen_undo(1)
    row, now = scene.undos.read_action(scene.action().action_id)
    assert row == scene.action()
    assert abs((now - scene.request.frozen_at).total_seconds()) < 60  # type: ignore[operator]


@pytest.mark.slow
def test_a_thousand_indexes_are_undone_one_by_one(scene: Scene) -> None:
    for index in range(1000):
        scene.finish(scene.act(scene.attach("flight", map_index=index), 1))
    request = scene.freeze(scene.ask())
    assert scene.reader.indexes_to_undo(request, "flight") == list(range(1000))
    for index in range(1000):
        attached = scene.undos.attach_undo_if_in_order(
            request.request_uuid, "flight", index, UNDO_RUN, lease_seconds=15, host="h", pid=1
        )
        assert attached is not None
        (row,) = attached.open_actions
        scene.compensate(attached, row)
    settled = scene.settle()
    assert settled is not None
    assert (settled.saga.state, settled.residual) == ("CANCELLED", ())
