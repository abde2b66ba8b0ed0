"""An outage of the store as one process meets it: said once, and waited out in pauses that grow."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS = 15.0
UNUSABLE_PAUSE_SECONDS = 60.0
"""A store that answers and cannot be used (not migrated, no rights) waits for a person."""


class Outage:
    """Whether the store is away, since when, and until when it is left alone.

    :param patience_seconds: how long an event is kept meanwhile, for what is said of it.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self.since: float | None = None
        self.until = 0.0
        self._pause = 0.0
        self._said: type[BaseException] | None = None

    def goes_on(self, problem: BaseException, *, unusable: bool) -> None:
        now = time.monotonic()
        self.since = self.since or now
        self._pause = (
            UNUSABLE_PAUSE_SECONDS if unusable else min(self._pause * 2 or 0.2, LONGEST_PAUSE_SECONDS)
        )
        self.until = now + self._pause
        if self._said is not type(problem):
            self._said = type(problem)
            log.warning(
                "%s. What Airflow's hooks see meanwhile is kept for %d minutes; later the reconciler finds it",
                str(problem).strip() or type(problem).__name__,
                self._patience_seconds // 60,
            )
