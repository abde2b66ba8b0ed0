"""How often something is tried again, and how long between."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

DEFAULT_TIMEOUT = timedelta(seconds=10)
DEFAULT_UNDO_DEADLINE = timedelta(hours=24)


@dataclass(frozen=True)
class Retry:
    """Tries of one action or one compensation, with a doubling pause between them.

    :param first: pause after the first failed try.
    :param factor: each further pause is this many times the one before.
    :param ceiling: no pause is longer.
    :param tries: calls in all, the first one included.
    """

    first: timedelta = timedelta(seconds=1)
    factor: float = 2.0
    ceiling: timedelta = timedelta(seconds=30)
    tries: int = 3

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ValueError(f"Retry(tries={self.tries}): at least 1, the first call counts")
        if self.first < timedelta(0) or self.ceiling < timedelta(0) or self.factor < 1:
            raise ValueError(f"{self}: pauses must not be negative nor shrink")

    def pause_seconds(self, failed_tries: int) -> float:
        """Seconds to wait after this many failed tries (1 or more)."""
        ceiling = self.ceiling.total_seconds()
        pause = self.first.total_seconds()
        for _ in range(min(failed_tries - 1, 64)):
            pause = min(pause * self.factor, ceiling)
        return min(pause, ceiling)


NO_RETRY = Retry(tries=1)
