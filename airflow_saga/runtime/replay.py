"""Which recorded action a call of this attempt is: the one at its place, or none.

A call is recognised by (name, fingerprint, n-th occurrence). Effectful calls that were made one after the other must
also come in the order in which they are recorded; a call made while another is under way may come in any order, and so
may a READ_ONLY one: it changes nothing, and one that failed is made again wherever the body asks for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from airflow_saga.core.errors import InDoubtError, SagaDivergedError
from airflow_saga.core.records import RecordedCall
from airflow_saga.core.states import ActionState, Effect


class Replay:
    """The recorded actions of this generation, handed out as the body asks for them."""

    def __init__(self, recorded: Sequence[RecordedCall], label: str) -> None:
        self._lock = threading.Lock()
        self._label = label
        self._by_call: dict[tuple[str, str], list[RecordedCall]] = {}
        """The newest first, so that the oldest is the cheap one to take."""
        self._in_order: deque[RecordedCall] = deque()
        self._failed_readings: dict[tuple[str, str], list[RecordedCall]] = {}
        self._doubtful: dict[tuple[str, str], int] = {}
        self._taken: set[int] = set()
        self.asked = False
        """The body of this attempt has asked for an action."""
        self._recorded = recorded
        self._unasked = deque(
            row.seq
            for row in recorded
            if row.effect != Effect.READ_ONLY and row.state != ActionState.FAILED and row.twin_of is None
        )
        """Seqs of effects that the body has not asked for yet in this attempt."""
        self._next_seq = 1
        for row in reversed(recorded):
            self._next_seq = max(self._next_seq, row.seq + 1)
            reads = row.effect == Effect.READ_ONLY
            if row.twin_of is not None:
                continue
            if reads and row.state == ActionState.FAILED:
                self._failed_readings.setdefault((row.name, row.fingerprint), []).append(row)
                continue
            self._by_call.setdefault((row.name, row.fingerprint), []).append(row)
            if not row.parallel and not reads:
                self._in_order.appendleft(row)

    @property
    def empty(self) -> bool:
        """Nothing was recorded by an earlier attempt."""
        return not self._recorded

    def position(self, under_way: Iterable[int] = ()) -> int:
        """The seq of the first action after this place in the body.

        :param under_way: seqs of the calls that have begun and not ended: they come after it as well.
        """
        with self._lock:
            unasked = self._first_unasked()
            following = self._next_seq if unasked is None else unasked
        return min([following, *under_way])

    def _first_unasked(self) -> int | None:
        while self._unasked and self._unasked[0] in self._taken:
            self._unasked.popleft()
        return self._unasked[0] if self._unasked else None

    def next_of(self, name: str) -> RecordedCall | None:
        """The first recorded call of an action that this attempt has not asked for and that did not fail."""
        with self._lock:
            return next(
                (
                    row
                    for row in self._recorded
                    if row.name == name and row.seq not in self._taken and row.state != ActionState.FAILED
                ),
                None,
            )

    def done_with(self, name: str, is_this: Callable[[RecordedCall], bool]) -> RecordedCall | None:
        """The newest recorded call of an action that is done, asked for or not."""
        done = (row for row in reversed(self._recorded) if row.name == name and row.state == ActionState.DONE)
        return next((row for row in done if is_this(row)), None)

    def failed_readings(self, name: str, fingerprint: str) -> list[RecordedCall]:
        """READ_ONLY calls of this kind that failed in earlier attempts."""
        return self._failed_readings.get((name, fingerprint), [])

    def skip_before(self, seq: int) -> None:
        """The body goes on from a place that lies behind it: recorded actions before that are not asked for again."""
        with self._lock:
            while self._in_order and self._in_order[0].seq < seq:
                self._in_order.popleft()
            while self._unasked and self._unasked[0] < seq:
                self._unasked.popleft()
            for call, rows in self._by_call.items():
                self._by_call[call] = [row for row in rows if row.seq >= seq]

    def claim_expected(
        self, name: str, version: int, is_this: Callable[[RecordedCall], bool]
    ) -> RecordedCall | None:
        """The next recorded sequential call, if this is it and it is done: the quick way through a long log.

        None where :meth:`match` has to look closer.
        """
        with self._lock:
            self.asked = True
            row = self._expected()
            if row is None or row.name != name or row.version != version or row.state != ActionState.DONE:
                return None
            rows = self._by_call[name, row.fingerprint]
            if rows[-1] is not row or self._doubtful or not is_this(row):
                return None
            rows.pop()
            self._in_order.popleft()
            self._taken.add(row.seq)
            return row

    def fingerprint_of(self, name: str, version: int, params: str) -> str | None:
        """The fingerprint of a recorded call with this very text; None if there is none."""
        return self._fingerprints.get((name, version, params))

    @cached_property
    def _fingerprints(self) -> dict[tuple[str, int, str], str]:
        return {(row.name, row.version, row.params): row.fingerprint for row in self._recorded}

    def match(
        self,
        name: str,
        fingerprint: str,
        *,
        alone: bool,
        read_only: bool = False,
        steers: bool = False,
    ) -> tuple[RecordedCall | None, int]:
        """The recorded action this call is, and its seq; a new seq if it is a new one.

        :param alone: no other call of the step is under way, so the recorded order is expected.
        :param read_only: a recorded one may come anywhere; only a new one tells that the body has changed.
        :param steers: what it says decides what comes next, so a new one may not stand before any recorded effect.
        :raises SagaDivergedError: the log holds another action at this place.
        :raises InDoubtError: the same call is in doubt already in this attempt.
        """
        with self._lock:
            self.asked = True
            doubtful = self._doubtful.get((name, fingerprint))
            if doubtful is not None:
                raise InDoubtError(
                    f"{self._label}: {name} with the same arguments is in doubt already (action {doubtful} of this "
                    f"step), so it is not called again; nobody knows whether it took effect"
                )
            expected = self._expected()
            rows = self._by_call.get((name, fingerprint))
            row = rows.pop() if rows else None
            again = row is None and (name, fingerprint) in self._failed_readings
            if steers and row is None and not again and (unasked := self._first_unasked()) is not None:
                raise SagaDivergedError(
                    f"{self._label}: {name} is asked anew, while the log holds effects that followed another answer "
                    f"(from action {unasked} on). Undo the saga and run it again, or bring back what was changed "
                    f"and clear the task.",
                    unasked,
                )
            if alone and expected is not None and not again and self._out_of_order(row, expected, read_only):
                asked = f"{name} (fingerprint {fingerprint[:12]})"
                raise SagaDivergedError(
                    f"{self._label}: the log holds {expected.name} (fingerprint {expected.fingerprint[:12]}) as action "
                    f"{expected.seq}, the step now asks for {asked}. Its code or its inputs have changed since. "
                    f"Undo the saga and run it again, or bring the old code back and clear the task.",
                    expected.seq,
                )
            if row is not None:
                self._taken.add(row.seq)
                return row, row.seq
            seq = self._next_seq
            self._next_seq += 1
            return None, seq

    @staticmethod
    def _out_of_order(row: RecordedCall | None, expected: RecordedCall, read_only: bool) -> bool:
        if row is None:
            return True
        refused = row.state == ActionState.FAILED and row.seq < expected.seq
        return not (row.parallel or read_only or refused) and row.seq != expected.seq

    def _expected(self) -> RecordedCall | None:
        """The next recorded sequential action; one that proved to have no effect may be left out by the body."""
        while self._in_order:
            row = self._in_order[0]
            if row.seq in self._taken or row.state == ActionState.FAILED:
                self._in_order.popleft()
                continue
            return row
        return None

    def remember_doubt(self, name: str, fingerprint: str, seq: int) -> None:
        with self._lock:
            self._doubtful[name, fingerprint] = seq

    def forget_doubt(self, name: str, fingerprint: str) -> None:
        with self._lock:
            self._doubtful.pop((name, fingerprint), None)
