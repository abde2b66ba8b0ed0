"""Reads over many sagas at once, for people: what needs one of them, what is open, what may go. And a self-test."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import Any

import psycopg

from airflow_saga.store.connect import Address
from airflow_saga.store.queries import Queries
from airflow_saga.store.rows import dicts, first

_Q = Queries(files("airflow_saga.store").joinpath("overview.sql").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class OpenWork:
    """What is open in the whole store. Ages are in seconds by the database's clock, 0 where there is nothing."""

    residuals: int
    needs_person: int
    needs_person_age_seconds: float
    undo_requests: int
    undo_request_age_seconds: float


class Overview:
    """Reads only; any thread's own connection will do."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    def now(self) -> datetime:
        """The database's clock, by which all ages are told."""
        row = first(self.connection, _Q.now, {})
        assert row is not None
        now: datetime = row["now"]
        return now

    def needs_person(
        self, *, start_alert_seconds: float, dag_ids: Sequence[str] | None = None, limit: int = 1000
    ) -> list[dict[str, Any]]:
        """Sagas that nothing will move by itself, longest waiting first.

        :param start_alert_seconds: an undo that nobody carries out for this long counts.
        :param dag_ids: only sagas of these; None: of all.
        """
        params = {
            "start_alert_seconds": start_alert_seconds,
            "dag_ids": None if dag_ids is None else list(dag_ids),
            "limit": limit,
        }
        return dicts(self.connection, _Q.needs_person, params)

    def open_work(self, *, start_alert_seconds: float) -> OpenWork:
        """:param start_alert_seconds: as in :meth:`needs_person`."""
        row = first(self.connection, _Q.open_work, {})
        assert row is not None
        waiting = self.needs_person(start_alert_seconds=start_alert_seconds)
        moment = row["moment"]
        return OpenWork(
            residuals=row["residuals"],
            needs_person=len(waiting),
            needs_person_age_seconds=max(
                [0.0, *((moment - saga["changed_at"]).total_seconds() for saga in waiting)]
            ),
            undo_requests=row["undo_requests"],
            undo_request_age_seconds=row["undo_request_age_seconds"],
        )

    def untold(self, *, start_alert_seconds: float, limit: int) -> list[dict[str, Any]]:
        """What no single undo can tell people, and nobody has told: a ``kind`` of notice per request, with its date.

        :param start_alert_seconds: an undo that nothing has moved for this long counts.
        """
        params = {"start_alert_seconds": start_alert_seconds, "limit": limit}
        return dicts(self.connection, _Q.untold, params)

    def standing_names(self, saga_id: int) -> list[dict[str, Any]]:
        """The effects of a saga that stand, or may, and are not kept on purpose; without any of their values."""
        return dicts(self.connection, _Q.standing_names, {"saga_id": saga_id})

    def standing_of(self, saga_ids: Sequence[int]) -> dict[int, int]:
        """How many effects of each saga stand, or may; sagas with none are left out."""
        rows = dicts(self.connection, _Q.standing_of, {"saga_ids": list(saga_ids)})
        return {row["saga_id"]: row["standing"] for row in rows}

    def oldest_open_request(self) -> dict[str, Any] | None:
        return first(self.connection, _Q.oldest_open_request, {})

    def newest_step(self) -> dict[str, Any] | None:
        """Where and when a step last began; None if none ever has."""
        return first(self.connection, _Q.newest_step, {})

    def dags_with_sagas(self) -> list[dict[str, Any]]:
        """Each DAG with its number of sagas that are not at a good end (``unsettled``) and when one last moved."""
        return dicts(self.connection, _Q.dags_with_sagas, {})

    def prunable(self, retention_days: int) -> tuple[int, int]:
        """How many sagas and actions ``prune`` would delete from now."""
        row = first(self.connection, _Q.prunable, {"retention_days": retention_days})
        assert row is not None
        return row["sagas"], row["actions"]


def notification_seconds(address: Address, timeout_seconds: float = 2.0) -> float | None:
    """How long a notification takes from one connection to another; None if it does not arrive.

    :raises StoreUnavailableError: a connection could not be opened.
    """
    word = uuid.uuid4().hex
    with address.open() as listening, address.open() as notifying:
        listening.execute(_Q.listen, prepare=False)
        began = time.monotonic()
        notifying.execute(_Q.notify, {"word": word}, prepare=False)
        for notification in listening.notifies(timeout=timeout_seconds):
            if notification.payload == word:
                return time.monotonic() - began
    return None
