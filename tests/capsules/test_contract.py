"""What every capsule keeps, against a real service whose own books are asked: once done, found, undone, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_saga.core.errors import NotApplied, SagaError
from airflow_saga.core.records import Applied
from tests.capsules.conftest import record_of
from tests.capsules.trials import TRIALS, Trial
from tests.runtime.lab import Lab

every_capsule = pytest.mark.parametrize("trial", list(TRIALS), indirect=True)


def in_doubt(trial: Trial) -> Any:
    return record_of(trial.action.name, _params(trial), trial.key, in_doubt=True)


def done(trial: Trial, result: Any) -> Any:
    return record_of(trial.action.name, _params(trial), trial.key, result=result)


def _params(trial: Trial) -> dict[str, Any]:
    return trial.action.bind((), trial.args)


@every_capsule
def test_what_is_done_is_found_undone_and_undone_no_more(trial: Trial) -> None:
    act, verify, undo = trial.action.fn, trial.action.verify, trial.action.compensation
    assert verify is not None
    assert undo is not None
    before = trial.standing()
    assert isinstance(verify(in_doubt(trial)), NotApplied)

    result = act(**trial.args, key=trial.key)
    assert trial.standing() != before
    assert verify(in_doubt(trial)) == Applied(result)

    undo(done(trial, result))
    assert trial.standing() == before
    assert isinstance(verify(in_doubt(trial)), NotApplied)
    undo(done(trial, result))
    assert trial.standing() == before


@every_capsule
def test_the_same_key_is_one_effect_with_one_result(trial: Trial) -> None:
    first = trial.action.fn(**trial.args, key=trial.key)
    standing = trial.standing()
    assert trial.action.fn(**trial.args, key=trial.key) == first
    assert trial.standing() == standing
    assert trial.effects() == 1


@every_capsule
def test_what_a_probe_found_is_enough_to_undo_it(trial: Trial) -> None:
    assert trial.action.verify is not None
    assert trial.action.compensation is not None
    before = trial.standing()
    trial.action.fn(**trial.args, key=trial.key)
    found = trial.action.verify(in_doubt(trial))
    assert isinstance(found, Applied)
    trial.action.compensation(done(trial, found.result))
    assert trial.standing() == before


@every_capsule
def test_an_effect_whose_result_was_lost_is_undone_by_its_key(trial: Trial) -> None:
    assert trial.action.compensation is not None
    before = trial.standing()
    trial.action.fn(**trial.args, key=trial.key)
    trial.action.compensation(done(trial, None))
    assert trial.standing() == before


@every_capsule
def test_a_step_calls_it_and_its_run_is_undone(trial: Trial, lab: Lab) -> None:
    before = trial.standing()
    lab.step(lambda saga: trial.action(**trial.args))
    assert (trial.effects(), lab.states()) == (1, [(trial.action.name, "DONE")])
    assert lab.undo().saga.state == "CANCELLED", [row.error for row in lab.actions()]
    assert trial.standing() == before


@every_capsule
def test_a_step_that_fails_after_it_keeps_one_effect_when_it_is_resumed(trial: Trial, lab: Lab) -> None:
    def body(saga: Any) -> None:
        trial.action(**trial.args)
        raise ValueError("not this time")

    for number in (1, 2):
        lab.fails(body, ValueError, try_number=number)
    assert trial.effects() == 1


@every_capsule
def test_no_secret_of_a_connection_is_in_the_log(
    trial: Trial, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.step(lambda saga: trial.action(**trial.args))
    lab.undo()
    logged = repr(lab.actions()) + repr(lab.view().events)
    for secret in ("planted", "mail-password"):
        assert secret not in logged


@every_capsule
def test_without_its_connection_nothing_is_done(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    before = trial.standing()
    for conn_id in ("SHOP", "AGENCY", "CALENDARS", "OBJECTS", "STRIPE", "SMTP", "MAILBOX"):
        monkeypatch.delenv(f"AIRFLOW_CONN_{conn_id}", raising=False)
    with pytest.raises((NotApplied, SagaError), match="no connection"):
        trial.action.fn(**trial.args, key=trial.key)
    assert trial.standing() == before
