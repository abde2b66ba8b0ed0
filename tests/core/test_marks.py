"""What the ends of its tasks say about a run that failed."""

from __future__ import annotations

import pytest

from airflow_saga.core.marks import TaskEnd, runs_set_failed, tasks_show_mark

DONE = TaskEnd("success", 3.2)
SKIPPED_BY_MARK = TaskEnd("skipped", 0.0)


@pytest.mark.parametrize(
    ("what", "tasks", "shown"),
    [
        ("marked between two tasks", [DONE, SKIPPED_BY_MARK, SKIPPED_BY_MARK], True),
        ("marked before its first task", [SKIPPED_BY_MARK], True),
        ("a task failed", [DONE, TaskEnd("failed", 1.0), TaskEnd("upstream_failed", 0.0)], False),
        ("a task failed, and one was skipped by a rule", [TaskEnd("failed", 1.0), SKIPPED_BY_MARK], False),
        ("its dagrun_timeout was over", [DONE, TaskEnd("skipped", None)], False),
        ("its dagrun_timeout was over while a second try ran", [TaskEnd("skipped", 4.0)], False),
        ("a branch was not taken", [DONE, TaskEnd("skipped", None), SKIPPED_BY_MARK], False),
        ("no task could run any more", [DONE, SKIPPED_BY_MARK, TaskEnd(None, None)], False),
        ("all went well, and then it was marked", [DONE], False),
        ("nothing is known", [], False),
    ],
)
def test_only_what_nothing_but_a_mark_leaves_shows_a_mark(
    what: str, tasks: list[TaskEnd], shown: bool
) -> None:
    assert tasks_show_mark(tasks) is shown, what


@pytest.mark.parametrize(
    ("extra", "runs"),
    [
        ({"state": "failed", "method": "PATCH"}, [("trip", "r1")]),
        ({"state": "success"}, []),
        ({"note": "failed"}, []),
        (
            {
                "actions": [
                    {"action": "update", "entities": [{"dag_run_id": "r2", "state": "failed"}, {"note": "x"}]}
                ]
            },
            [("trip", "r2")],
        ),
        (
            {"actions": [{"entities": [{"dag_id": "other", "dag_run_id": "r3", "state": "failed"}]}, "r4"]},
            [("other", "r3")],
        ),
        ({"actions": "***"}, []),
    ],
)
def test_a_request_in_the_audit_log_is_read_for_the_runs_it_failed(
    extra: dict[str, object], runs: list[tuple[str, str]]
) -> None:
    assert runs_set_failed(extra, "trip", "r1") == runs
