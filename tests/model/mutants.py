"""Where each guard is needed: a configuration in which the protocol without it breaks a promise, and which one."""

from __future__ import annotations

FORGOTTEN = "forgotten effect: it stands, the log says"
NO_END = "no way to an end without a person"
HIDDEN = "SUSPENDED over what an undo has left"
NOBODY_KEPT = "SUSPENDED though nobody kept anything"
NOTHING_NAMED = "PARTIALLY_CANCELLED with nothing named"

KILLED: dict[str, tuple[str, str]] = {
    # Forward
    "begin_saga": ("crash", "forward effect begins after the cancel committed"),
    "begin_fence": ("crash", "a fenced process begins a call"),
    "retry_saga": ("crash", "forward effect begins after the cancel committed"),
    "done_skip": ("crash", "DONE action called again"),
    "retry_idempotent": ("crash", "two live effects of one action in one generation"),
    "sweep": ("undone again", f"{FORGOTTEN} COMPENSATED"),
    "wait": ("crash", f"{FORGOTTEN} FAILED"),
    "wait_done": ("idempotent, proves nothing happened", f"{FORGOTTEN} COMPENSATED"),
    "reject_alone": ("idempotent, proves nothing happened", f"{FORGOTTEN} FAILED"),
    "mark_fence": ("task marked failed", "forward effect begins after the step was stopped"),
    # Attach
    "wait_undo": (
        "chain: marked failed, clear",
        "forward effect begins while an undo of the whole run is open",
    ),
    "clear_stamp": ("crash", "a late start or retry revives a cancelled saga, nobody cleared it"),
    "stale": ("chain: plain task cleared", "stale-upstream step runs"),
    "partly_refuse": ("pair: on_failure=keep", "a new generation begins over an unresolved rest"),
    "cleared_itself": ("chain: plain task cleared", "spurious undo of a finished, uncleared step"),
    "redo_later": ("chain of three: clear", "stale-upstream step runs"),
    "redo_scope": ("pair: clear", "a step nobody cleared is stopped by another step's redo"),
    # End of the run
    "reconciler": ("crash", NO_END),
    "complete_open": ("chain: clear", "COMPLETED while an undo is open or a step is undone"),
    "hint_recheck": ("chain: marked failed, clear", "automatic undo of a saga that was resumed"),
    "held": ("chain: mass outage", "a held hint is carried out, and nobody released it"),
    "fresh_reading": ("slow listener", "a mark older than the newest attach undoes a run that goes on"),
    "keep_rank": ("chain: keep, marked failed, clear", "automatic undo of what a user kept"),
    "mark_completed": (
        "chain: task marked failed, run too",
        "a run was marked failed, the listener heard it, and nothing follows",
    ),
    # Undo requests
    "plan_from_row": ("deadline, redo", NO_END),
    "widen": ("crash", NO_END),
    "queue": ("no probe, asked a person", NO_END),
    "queue_keeps_cancelling": ("chain: marked failed, clear", NOBODY_KEPT),
    # Undo
    "order_log": ("chain: mass outage", "a is undone before a later b"),
    "undo_fence": ("undo zombie", "a zombie undo overwrites a newer verdict"),
    "read_only_is_no_residual": ("reads, crash", NOTHING_NAMED),
    "unavailable_is_free": ("unavailable", "an outage of a service uses up the tries"),
    "due": ("later", NO_END),
    "tries_anew": ("undone again", "a new undo cannot undo what an earlier one left"),
    "expire_fence": ("deadline", NOTHING_NAMED),
    "rest_is_named": ("chain: undone from a step", HIDDEN),
    # Late answers
    "late_reopen": ("crash", "a late answer is lost: CANCELLED with an open action"),
    "late_step": ("deadline, undo zombie", NOBODY_KEPT),
    "late_scope": ("chain of three: clear", NOBODY_KEPT),
    "late_doubt": ("crash", "a late answer turns an undone action into DONE though nothing stands"),
    "late_no": ("no probe", NOTHING_NAMED),
    # Persons
    "resolve_done": ("halt", "PARTIALLY_CANCELLED that no person can close"),
    "resolve_wait": ("deadline", "CANCELLED with a standing or possible effect"),
    "answer_wait": ("no probe", f"{FORGOTTEN} FAILED"),
}
"""Guard → configuration, and the promise that is broken there."""
