"""What a decision about a saga came to, for whoever made it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from airflow_saga.core.records import RequestRow, SagaRow


class Verdict(StrEnum):
    """What a request to stop or undo came to."""

    CANCELLING = "cancelling"
    KEEPING = "stopping, effects are kept"
    REWINDING = "going back to a save-point"
    QUEUED = "queued behind the undo under way"
    ALREADY = "already asked for"
    NOTHING = "cancelled, nothing to undo"
    CANCELLED = "already cancelled"
    FINISHED = "already finished"
    ASKING = "the verify probes are asked"
    IGNORED = "ignored"


@dataclass(frozen=True)
class Decision:
    """:ivar message: one sentence for a person: what was decided, by whom, and what to do next."""

    verdict: Verdict
    message: str
    saga: SagaRow | None = None
    request: RequestRow | None = None

    @property
    def undoes(self) -> bool:
        return self.request is not None and self.verdict in (
            Verdict.CANCELLING,
            Verdict.REWINDING,
            Verdict.QUEUED,
            Verdict.ALREADY,
        )
