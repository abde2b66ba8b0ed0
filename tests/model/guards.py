"""The guards of the protocol, by name. A mutant is the protocol without one of them, and must break a promise."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Guards:
    """All on: the protocol as it is."""

    # Forward
    begin_saga: bool = True  # an intent needs a RUNNING saga
    begin_fence: bool = True  # an intent needs the newest fence
    retry_saga: bool = True  # a retry is a begin
    done_skip: bool = True  # DONE is never called again
    retry_idempotent: bool = True  # in doubt is called again only where that is safe
    sweep: bool = True  # what a lost attempt left PENDING becomes IN_DOUBT
    wait: bool = True  # a probe, a retry and an undo of what is in doubt wait for A1
    wait_done: bool = True  # so does the undo of what is DONE: an earlier call of it may be on the wire
    reject_alone: bool = True  # "my call did nothing" says nothing about another attempt of the action
    mark_fence: bool = True  # marking a task failed fences its step
    # Attach
    wait_undo: bool = True  # a step does not attach to a CANCELLING saga
    clear_stamp: bool = True  # a stopped saga goes on only after a clear that came later
    stale: bool = True  # a step does not run on effects of an earlier step that were undone
    partly_refuse: bool = True  # nothing begins anew over an unresolved rest
    cleared_itself: bool = True  # a finished step is redone only if it was itself cleared
    redo_later: bool = True  # and only together with each later step that acted
    redo_scope: bool = True  # a redo leaves the saga's state alone
    # End of the run
    reconciler: bool = True  # somebody looks at each saga in the end
    complete_open: bool = True  # COMPLETED needs no open request, no stopped or undone step
    hint_recheck: bool = True  # a hint is void once a step attached
    held: bool = True  # a held hint waits for a person
    fresh_reading: bool = True  # a reading older than the newest attach is dropped
    keep_rank: bool = True  # what a person kept is not undone by policy or by a mark
    mark_completed: bool = True  # a mark undoes a COMPLETED saga too
    # Undo requests
    plan_from_row: bool = True  # a committed request is carried out whatever the run's state is now
    widen: bool = True  # before the freeze a wider request widens the one there is
    queue: bool = True  # after it a wider request waits
    queue_keeps_cancelling: bool = True  # and the saga stays CANCELLING for it
    # Undo
    order_log: bool = True  # nothing is compensated before what came later is settled
    undo_fence: bool = True  # every verb of the undo needs the newest fence
    read_only_is_no_residual: bool = True
    unavailable_is_free: bool = True  # a service that is away costs no try
    due: bool = True  # what was put off is asked for again
    tries_anew: bool = True  # a new request gives an action that was given up new tries
    expire_fence: bool = True  # the deadline fences every step and sweeps
    rest_is_named: bool = True  # what an undo could not take away closes the saga as partly cancelled
    # Late answers
    late_reopen: bool = True  # a late answer opens a request
    late_step: bool = True  # and its step counts as partly undone from then on
    late_scope: bool = True  # in an open saga the request covers that step only
    late_doubt: bool = True  # a late yes to what was compensated is a doubt
    late_no: bool = True  # a late no that takes the last residual takes step and saga with it
    # Persons
    resolve_done: bool = True  # a person can settle what no undo reached
    resolve_wait: bool = True  # only after A1
    answer_wait: bool = True  # only after A1 can a person say that it did not happen

    def without(self, name: str) -> Guards:
        return dataclasses.replace(self, **{name: False})


GUARDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Guards))
