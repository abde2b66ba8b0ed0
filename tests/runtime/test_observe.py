"""What the runtime tells whoever measures: each call once by how it ended, how long a cancel took, what is open."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from airflow_saga.core import measures
from airflow_saga.core.errors import ActionTimedOut, NotApplied, SagaCancelledError
from airflow_saga.runtime import accounts, observe
from tests.runtime import deeds
from tests.runtime.lab import Lab, wait_until


@dataclass
class Ear:
    """Keeps what it hears."""

    counts: Counter[str] = field(default_factory=Counter)
    timings: dict[str, list[float]] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    spans: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def count(self, name: str, tags: Mapping[str, str]) -> None:
        self.counts[name.removeprefix("saga.")] += 1
        self.tags[name] = dict(tags)

    def timing(self, name: str, seconds: float, tags: Mapping[str, str]) -> None:
        self.timings.setdefault(name.removeprefix("saga."), []).append(seconds)
        self.tags[name] = dict(tags)

    def gauge(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        self.gauges[name.removeprefix("saga.")] = value
        self.tags[name] = dict(tags)

    @contextmanager
    def span(self, name: str, attributes: Mapping[str, str | int]) -> Iterator[None]:
        self.spans.append((name, dict(attributes)))
        yield

    def mark(self, key: str, value: str) -> None:
        self.spans[-1][1][key] = value

    def forget(self) -> None:
        self.counts.clear()
        self.timings.clear()
        self.spans.clear()


@pytest.fixture
def ear() -> Iterator[Ear]:
    made = Ear()
    observe.observe_with(made, made)
    yield made
    observe.observe_with(None, None)
    documented = {each.name: set(each.tags) for each in measures.MEASURES}
    for name, tags in made.tags.items():
        assert set(tags) == documented[name], f"{name} was told under other tags than the documented ones"


class Broken:
    """Raises whatever it is told."""

    told = 0

    def count(self, name: str, tags: Mapping[str, str]) -> None:
        self.told += 1
        raise OSError("nobody is there")

    def timing(self, name: str, seconds: float, tags: Mapping[str, str]) -> None:
        raise AssertionError("it had failed before")

    def gauge(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        raise AssertionError("it had failed before")

    def span(self, name: str, attributes: Mapping[str, str | int]) -> AbstractContextManager[object]:
        self.told += 1
        raise OSError("nobody is there")

    def mark(self, key: str, value: str) -> None:
        raise AssertionError("it had failed before")


# -- the seam -------------------------------------------------------------------------------------------------------


def test_without_anybody_who_listens_nothing_is_asked_for() -> None:
    def never() -> dict[str, str | int]:
        raise AssertionError("nobody wants to know")

    assert not observe.is_measured()
    observe.count(measures.ACTION_BEGUN, dag_id="d", effect="READ_ONLY")
    observe.timing(measures.CANCEL_SEEN, 1.0, dag_id="d")
    observe.gauge(measures.OPEN_RESIDUALS, 1)
    observe.mark("key", "value")
    with observe.span("name", never):
        pass


def test_a_time_is_never_negative(ear: Ear) -> None:
    observe.timing(measures.CANCEL_SEEN, -0.001, dag_id="d")
    assert ear.timings == {"cancel.seen": [0.0]}


def test_what_listens_and_fails_is_logged_once_and_hurts_no_action(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    meter, tracer = Broken(), Broken()
    observe.observe_with(meter, tracer)
    try:
        with caplog.at_level(logging.ERROR, logger=observe.__name__):
            lab.step(lambda saga: [deeds.book("flights"), deeds.book("hotels")])
    finally:
        observe.observe_with(None, None)
    assert (meter.told, tracer.told) == (1, 1)
    assert len(caplog.records) == 2
    assert lab.states() == [("book", "DONE"), ("book", "DONE")]
    assert lab.undo().saga.state == "CANCELLED"


def test_a_span_lets_through_what_its_block_raises(ear: Ear) -> None:
    with pytest.raises(KeyError), observe.span("name", dict):
        raise KeyError


# -- calls ----------------------------------------------------------------------------------------------------------


def test_each_call_is_counted_once_when_it_begins_and_once_as_it_ended(lab: Lab, ear: Ear) -> None:
    lab.world.tell("refuse", "hotels", times=1)

    def body(saga: Any) -> None:
        deeds.book("flights")
        deeds.book("hotels")  # refused once, and tried again
        asyncio.run(deeds.book_async("cars"))
        deeds.search("flights")

    lab.step(body)
    assert ear.counts == {"action.begun": 5, "action.done": 4, "action.failed": 1}
    assert ear.tags["saga.action.done"] == {"dag_id": lab.dag_id, "effect": "READ_ONLY"}


def test_a_call_that_the_log_answers_is_not_counted(lab: Lab, ear: Ear) -> None:
    class DiedError(Exception):
        pass

    def dies(saga: Any) -> None:
        deeds.book("flights")
        raise DiedError

    lab.fails(dies, DiedError)
    ear.forget()
    lab.step(lambda saga: deeds.book("flights"), try_number=2)
    assert ear.counts == {}
    assert ear.spans == []


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_call_without_an_answer_is_in_doubt_and_what_is_found_then_is_no_other_call(
    lab: Lab, ear: Ear, way: str
) -> None:
    lab.world.tell("apply_and_drop", "flights")

    def body(saga: Any) -> None:
        if way == "sync":
            deeds.book("flights")
        else:
            asyncio.run(deeds.book_async("flights"))

    lab.step(body)
    assert lab.states()[0][1] == "DONE"
    assert ear.counts == {"action.begun": 1, "action.in_doubt": 1}
    assert ear.spans[0][1][accounts.STATE] == "DONE"


def test_a_call_past_its_deadline_is_in_doubt(lab: Lab, ear: Ear) -> None:
    lab.world.tell("hold", "flights")
    lab.fails(lambda saga: deeds.book_quickly_blind("flights"), ActionTimedOut)
    assert ear.counts == {"action.begun": 1, "action.in_doubt": 1}
    assert ear.spans[0][1][accounts.STATE] == "IN_DOUBT"


def test_a_span_says_which_action_it_was_and_nothing_that_went_in_or_came_out(lab: Lab, ear: Ear) -> None:
    lab.step(lambda saga: deeds.book("flights", "a window seat"))
    view = lab.view()
    assert ear.spans == [
        (
            "saga.action book",
            {
                "saga.id": str(view.saga.saga_uuid),
                "saga.step.id": view.steps[0].step_id,
                "saga.step.generation": 1,
                "airflow.dag_id": lab.dag_id,
                "airflow.task_id": "t",
                "saga.action.seq": 1,
                "saga.action.effect": "COMPENSABLE",
                accounts.STATE: "DONE",
            },
        )
    ]


# -- cancel and undo ------------------------------------------------------------------------------------------------


def test_a_cancel_is_timed_from_its_request_until_it_is_seen_and_from_there_until_it_stopped(
    lab: Lab, ear: Ear
) -> None:
    def body(saga: Any) -> None:
        deeds.book("flights")
        lab.cancel()
        wait_until(lambda: saga.cancelled, "it is seen")
        deeds.book("hotels")

    lab.fails(body, SagaCancelledError)
    (seen,), (stopped,) = ear.timings["cancel.seen"], ear.timings["cancel.stopped"]
    assert 0 < seen < 2
    assert 0 < stopped < 2
    assert ear.counts["action.begun"] == 1


def test_a_step_that_nobody_stopped_is_not_timed(lab: Lab, ear: Ear) -> None:
    lab.step(lambda saga: deeds.book("flights"))
    assert ear.timings == {}


def test_an_undo_is_counted_by_its_compensations_and_timed_by_the_clock_of_the_store(
    lab: Lab, ear: Ear
) -> None:
    def body(saga: Any) -> None:
        deeds.book("flights")
        deeds.book("hotels")
        deeds.tell("ann", "booked")

    lab.step(body)
    ear.forget()
    settled = lab.undo()
    accounts.tell_settled(settled)
    assert ear.counts == {"compensation.begun": 2, "compensation.done": 2, "undo.standing": 1}
    assert ear.tags["saga.undo.duration"] == {"dag_id": lab.dag_id, "cause": "user"}
    request = lab.view().requests[0]
    assert request.ended_at is not None
    assert request.frozen_at is not None
    assert ear.timings == {
        "cancel.settled": [(request.ended_at - request.asked_at).total_seconds()],
        "undo.duration": [(request.ended_at - request.frozen_at).total_seconds()],
    }
    assert [name for name, _ in ear.spans] == ["saga.undo book", "saga.undo book"]
    assert ear.spans[0][1][accounts.STATE] == "COMPENSATED"
    assert ear.spans[0][1]["saga.action.id"] == lab.actions()[1].action_id


def test_a_settled_undo_that_is_settled_again_is_not_timed_again(lab: Lab, ear: Ear) -> None:
    lab.step(lambda saga: deeds.book("flights"))
    settled = lab.undo()
    again = lab.settles.settle_if_all_settled(settled.request.request_uuid, "undo1")
    assert again is not None
    accounts.tell_settled(again)
    assert ear.timings == {}


def test_a_compensation_that_is_done_later_is_told_as_such(lab: Lab, ear: Ear) -> None:
    lab.step(lambda saga: deeds.charge("10"))
    ear.forget()
    lab.world.tell("later", "payments", verb="undo")
    assert lab.undo().saga.state == "PARTIALLY_CANCELLED"
    assert ear.counts == {"compensation.begun": 1, "compensation.later": 1}


def test_a_compensation_that_fails_for_good_leaves_something_standing(lab: Lab, ear: Ear) -> None:
    lab.step(lambda saga: deeds.book("flights"))
    ear.forget()
    lab.world.tell("refuse", "flights", verb="undo")
    assert lab.undo().saga.state == "PARTIALLY_CANCELLED"
    assert ear.counts == {"compensation.begun": 1, "compensation.failed": 1, "undo.standing": 1}


def test_a_call_that_is_refused_is_tried_again_and_each_try_has_failed(lab: Lab, ear: Ear) -> None:
    lab.world.tell("refuse", "flights")
    lab.fails(lambda saga: deeds.book("flights"), NotApplied)
    assert ear.counts == {"action.begun": 3, "action.failed": 3}


# -- what is open ---------------------------------------------------------------------------------------------------


def test_the_reconciler_tells_what_is_open_and_since_when(own_lab: Lab, ear: Ear) -> None:
    lab = own_lab
    lab.step(lambda saga: deeds.tell("ann", "booked"))
    assert lab.undo().saga.state == "PARTIALLY_CANCELLED"
    lab.connection.execute("UPDATE airflow_saga.saga SET changed_at = changed_at - interval '1 hour'")
    lab.step(lambda saga: deeds.book("flights"), run="other")
    lab.ask_undo("other")
    lab.connection.execute("UPDATE airflow_saga.undo_request SET asked_at = asked_at - interval '1 minute'")
    lab.reconcile()
    told = ear.gauges
    assert (told["open.residuals"], told["open.needs_person"], told["open.undo_requests"]) == (2, 1, 1)
    assert 3600 <= told["open.needs_person_age"] < 3660
    assert 60 <= told["open.undo_request_age"] < 120


def test_a_store_in_which_nothing_is_open_tells_zeros(own_lab: Lab, ear: Ear) -> None:
    own_lab.reconcile()
    assert set(ear.gauges.values()) == {0}
    assert len(ear.gauges) == 5


def test_an_undo_past_its_deadline_is_counted(own_lab: Lab, ear: Ear) -> None:
    lab = own_lab
    lab.step(lambda saga: deeds.book("flights"))
    lab.ask_undo()
    lab.connection.execute("UPDATE airflow_saga.saga SET deadline_at = clock_timestamp()")
    assert lab.reconcile().expired == 1
    assert ear.counts["undo.expired"] == 1
