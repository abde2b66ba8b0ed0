"""Events in a calendar: nothing that somebody has edited is deleted."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import httpx
import pytest

from airflow_saga.capsules.calendar import event_text
from airflow_saga.core.errors import CompensationRejected, NotApplied, Unavailable
from airflow_saga.core.records import Applied
from tests.capsules import trials
from tests.capsules.conftest import SetConnection, record_of
from tests.capsules.trials import START, Trial, block_room
from tests.runtime.lab import Lab
from tests.support.ports import free_port
from tests.support.services import Server

LOGIN = ("ann", "ann")


@pytest.fixture
def room(request: pytest.FixtureRequest) -> Trial:
    return trials.room(request)


class Item:
    """One event, as somebody with a calendar program sees it."""

    def __init__(self, server: Server, key: str) -> None:
        self.url = f"{server.url}/ann/room/{key}.ics"

    @property
    def text(self) -> str | None:
        answer = httpx.get(self.url, auth=LOGIN)
        return answer.text if answer.is_success else None

    def edit(self, old: str, new: str) -> None:
        text = self.text
        assert text is not None
        assert old in text
        httpx.put(self.url, content=text.replace(old, new), auth=LOGIN).raise_for_status()


def undo(key: str, args: dict[str, Any], result: Any) -> None:
    assert block_room.compensation is not None
    block_room.compensation(record_of("block_room", block_room.bind((), args), key, result=result))


def find(key: str, args: dict[str, Any]) -> Any:
    assert block_room.verify is not None
    return block_room.verify(record_of("block_room", block_room.bind((), args), key, in_doubt=True))


def test_an_event_that_was_edited_since_is_left_to_a_person(lab: Lab, room: Trial, calendars: Server) -> None:
    lab.step(lambda saga: block_room(**room.args))
    (row,) = lab.actions()
    item = Item(calendars, row.key)
    item.edit("Interview", "Interview moved by Bob")
    assert lab.undo().saga.state == "PARTIALLY_CANCELLED"
    assert "Interview moved by Bob" in str(item.text)
    (row,) = lab.actions()
    assert (row.state, row.undo_failures) == ("COMPENSATION_FAILED", 1)
    assert "edited by somebody since" in str(row.error)


def test_an_event_in_doubt_that_was_edited_before_anybody_looked_is_left_to_a_person(
    room: Trial, calendars: Server
) -> None:
    block_room.fn(**room.args, key=room.key)
    Item(calendars, room.key).edit("Interview", "Interview with Carl")
    found = find(room.key, room.args)
    assert isinstance(found, Applied)
    assert found.result["etag"] is None
    with pytest.raises(CompensationRejected):
        undo(room.key, room.args, found.result)
    assert Item(calendars, room.key).text is not None


def test_an_event_that_got_one_more_guest_counts_as_edited(room: Trial, calendars: Server) -> None:
    block_room.fn(**room.args, key=room.key)
    Item(calendars, room.key).edit("END:VEVENT", "ATTENDEE:mailto:bob@example.org\r\nEND:VEVENT")
    found = find(room.key, room.args)
    assert isinstance(found, Applied)
    assert found.result["etag"] is None


def test_an_event_that_was_edited_and_put_again_is_not_overwritten(room: Trial, calendars: Server) -> None:
    block_room.fn(**room.args, key=room.key)
    item = Item(calendars, room.key)
    item.edit("Interview", "Interview with Carl")
    assert block_room.fn(**room.args, key=room.key)["etag"] is None
    assert "with Carl" in str(item.text)


def test_an_event_that_somebody_has_deleted_is_undone(room: Trial, calendars: Server) -> None:
    result = block_room.fn(**room.args, key=room.key)
    httpx.delete(Item(calendars, room.key).url, auth=LOGIN).raise_for_status()
    undo(room.key, room.args, result)


def test_a_time_without_a_zone_is_refused(room: Trial) -> None:
    before = room.standing()
    naive = START.replace(tzinfo=None)
    with pytest.raises(NotApplied, match="no time zone"):
        block_room.fn("x", naive, naive + timedelta(hours=1), key=room.key)
    assert room.standing() == before


def test_a_calendar_that_is_not_there_takes_nothing(set_connection: SetConnection, room: Trial) -> None:
    result = block_room.fn(**room.args, key=room.key)
    set_connection("calendars", "http", host="127.0.0.1", port=free_port())
    with pytest.raises(NotApplied, match="nothing was sent"):
        block_room.fn(**room.args, key="other")
    with pytest.raises(Unavailable):
        undo(room.key, room.args, result)


def test_long_and_odd_texts_come_back_as_they_went_in(room: Trial, calendars: Server) -> None:
    args = {**room.args, "summary": "Żółw; a, b \\ c\nsecond line " * 9, "description": "ü" * 200}
    block_room.fn(**args, key=room.key)
    text = event_text(room.key, block_room.bind((), args))
    assert max(len(line.encode()) for line in text.split("\r\n")) <= 75
    found = find(room.key, args)
    assert isinstance(found, Applied)
    assert found.result["etag"] is not None
