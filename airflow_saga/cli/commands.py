"""Commands about one saga, and the list of them: read the store or call one verb of it, then say what came of it."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from typing import Any

import psycopg

from airflow_saga import metadata
from airflow_saga.cli.display import complain, data_text, moment, plural, table_text
from airflow_saga.cli.show import Shown, request_data, saga_data
from airflow_saga.cli.verb import REFUSED, Answer, actor, display, say, scrubbed, store, usage, verb
from airflow_saga.core.errors import UnknownSagaError
from airflow_saga.core.identity import compensation_dag_id, forward_dag_id, undo_run_id
from airflow_saga.core.records import StepRow
from airflow_saga.core.states import ActionState, Mode, RequestState, SagaState
from airflow_saga.metadata import MetadataUnreadableError
from airflow_saga.runtime.codec import encode_masked
from airflow_saga.settings import Settings, secrets_of_this_process
from airflow_saga.store.decision import Decision, Verdict
from airflow_saga.store.overview import Overview
from airflow_saga.store.reader import Reader
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.resolve import ResolveVerbs
from airflow_saga.store.rewind import RewindVerbs
from airflow_saga.trigger import clear_from, trigger_undo

PLAN_PREFIX = 8

# -- looking ----------------------------------------------------------------------------------------------------------


@verb(writes=False)
def list_sagas(args: Namespace) -> Answer:
    with store() as connection:
        overview = Overview(connection)
        waiting = overview.needs_person(
            start_alert_seconds=Settings.load().start_alert_seconds, dag_id=args.dag_id, limit=args.limit
        )
        found = Reader(connection).sagas(dag_id=args.dag_id, states=args.state, limit=args.limit)
        first = {row["saga_id"]: row for row in waiting if not args.state or row["state"] in args.state}
        rows = [*first.values(), *(row for row in found if row["saga_id"] not in first)][: args.limit]
        standing = overview.standing_of([row["saga_id"] for row in rows])
    listed = [_listed(row, standing.get(row["saga_id"], 0), first.get(row["saga_id"])) for row in rows]
    if args.output == "table":
        return Answer(table_text(listed, "no sagas" + (" in this state" if args.state else "")))
    return Answer(data_text(listed, args.output))


def _listed(row: dict[str, Any], standing: int, waiting: dict[str, Any] | None) -> dict[str, Any]:
    shown = display()
    stopped = row["state"] not in (SagaState.RUNNING, SagaState.COMPLETED, SagaState.PENDING)
    return {
        "dag_id": row["dag_id"],
        "run_id": row["run_id"],
        "state": row["state"],
        "since": moment(row["changed_at"]),
        "standing": standing if stopped else 0,
        "needs": _need(waiting) if waiting else None,
        "by": shown.text(row["actor"]),
        "reason": shown.text(row["reason"]) or row["cause"],
    }


def _need(row: dict[str, Any]) -> str:
    """Why a person is needed, in the order in which it matters."""
    if row["request_state"] == RequestState.HELD:
        return "undo is held: release it"
    if row["request_state"] is not None:
        return f"undo asked for at {moment(row['asked_at'])}, not carried out"
    if row["doubtful"]:
        return f"{plural(row['doubtful'], 'action')} in doubt: resolve"
    if row["state"] == SagaState.FAILED:
        return f"failed ({row['cause']}): clear or undo it"
    return f"{plural(row['standing'], 'effect')} to settle: resolve or undo"


@verb(writes=False)
def show(args: Namespace) -> Answer:
    with store() as connection:
        view = Reader(connection).view(args.dag_id, args.run_id)
        now = Overview(connection).now()
    alert = Settings.load().start_alert_seconds
    shown = Shown(view, display(), now, start_alert_seconds=alert)
    return Answer(shown.text() if args.output == "table" else data_text(shown.data(), args.output))


@verb(writes=False)
def plan(args: Namespace) -> Answer:
    with store() as connection:
        steps, digest = Reader(connection).plan(args.dag_id, args.run_id)
        actions = {
            action.action_id: action for action in Reader(connection).view(args.dag_id, args.run_id).actions
        }
    command = f"airflow saga undo {shlex.quote(args.dag_id)} {shlex.quote(args.run_id)} --plan {digest}"
    shown = display()
    rows = [
        {
            "order": 0,
            "step": step["task_id"] + (f"[{step['map_index']}]" if step["map_index"] >= 0 else ""),
            "action": planned["action_id"],
            "name": planned["name"],
            "version": planned["version"],
            "state": planned["state"],
            "expected": planned["expected"],
            "params": shown.value(actions[planned["action_id"]].params),
            "result": shown.value(actions[planned["action_id"]].result),
        }
        for step in steps["steps"]
        for planned in step["actions"]
    ]
    for order, row in enumerate(rows, 1):
        row["order"] = order
    if args.output != "table":
        return Answer(data_text({"hash": digest, "command": command, "actions": rows}, args.output))
    columns = ("order", "step", "action", "name", "state", "expected")
    table = table_text(
        [{name: row[name] for name in columns} for row in rows],
        "nothing stands: an undo would call nothing",
    )
    signed = f"\nplan {digest}\nto do exactly this, or nothing if it changes:\n  {command}" if rows else ""
    return Answer(table + signed)


# -- deciding ---------------------------------------------------------------------------------------------------------


@verb(writes=True)
def cancel(args: Namespace) -> Answer:
    if args.keep and args.now:
        usage("--keep and --now exclude each other: to keep the effects, the call under way is let to end")
    with store() as connection:
        run = _known_run(connection, args)
        decision = RequestVerbs(connection).cancel(
            args.dag_id,
            args.run_id,
            actor=actor(),
            reason=scrubbed(args.reason),
            clear_number=run.clear_number,
            keep=args.keep,
            stop_now=args.now,
            run_is_success=run.state == "success",
        )
        return _tell(args, connection, decision, is_done=_is_cancelled(decision, args.keep))


def _is_cancelled(decision: Decision, keep: bool) -> bool:
    if keep and decision.verdict is Verdict.ALREADY:
        return decision.saga is not None and decision.saga.mode == Mode.KEEP
    return decision.verdict not in (Verdict.FINISHED, Verdict.IGNORED)


@verb(writes=True)
def undo(args: Namespace) -> Answer:
    with store() as connection:
        run = _known_run(connection, args)
        signed = _whole_hash(connection, args) if args.plan else None
        decision = RequestVerbs(connection).undo(
            args.dag_id,
            args.run_id,
            actor=actor(),
            reason=scrubbed(args.reason),
            clear_number=run.clear_number,
            stop_now=args.now,
            plan_hash=signed,
        )
        return _tell(args, connection, decision, is_done=decision.verdict is not Verdict.IGNORED)


@verb(writes=True)
def rewind(args: Namespace) -> Answer:
    with store() as connection:
        run = _known_run(connection, args)
        asked = RewindVerbs(connection).rewind(
            args.dag_id,
            args.run_id,
            args.to,
            actor=actor(),
            reason=scrubbed(args.reason),
            clear_number=run.clear_number,
        )
        # Cleared tasks wait for the undo; were it to run first, the run could end in between.
        message = f"{args.dag_id} / {args.run_id} goes back to {args.to}; undone: {', '.join(asked.undone)}"
        message += f"; {_clear_from(args, asked.step)}"
        decision = Decision(Verdict.REWINDING, message, asked.saga, asked.request)
        return _tell(args, connection, decision, is_done=True)


def _clear_from(args: Namespace, step: StepRow) -> str:
    try:
        cleared = clear_from(args.dag_id, args.run_id, step.task_id, step.map_index)
    except Exception as problem:  # noqa: BLE001 - the undo is asked for, whatever hinders Airflow: say what is left to do
        why = (str(problem).splitlines() or [type(problem).__name__])[0]
        return f"Airflow could not clear {step.label} ({why}): clear it and what is downstream by hand"
    return f"{plural(cleared, 'task')} cleared, from {step.label} on"


def _whole_hash(connection: psycopg.Connection, args: Namespace) -> str:
    """The hash that a person began to type, if it is the one of now; the store checks it again when it decides."""
    _, digest = Reader(connection).plan(args.dag_id, args.run_id)
    is_begun = len(args.plan) >= PLAN_PREFIX and digest.startswith(args.plan)
    return digest if is_begun else str(args.plan)


def _known_run(connection: psycopg.Connection, args: Namespace) -> metadata.Run:
    """The run as Airflow sees it; where Airflow has forgotten it, as the store does.

    :raises UnknownSagaError: it is no run of a saga DAG; no row is made for it.
    """
    forward = forward_dag_id(args.dag_id)
    if forward is not None:
        raise UnknownSagaError(
            f"{args.dag_id} undoes runs of {forward}; name {forward} and the run that is undone: airflow saga list"
        )
    saga = Reader(connection).find(args.dag_id, args.run_id)
    try:
        run = metadata.run_of(args.dag_id, args.run_id)
        undo_dag = metadata.dags_of([compensation_dag_id(args.dag_id)])
    except MetadataUnreadableError as problem:
        if saga is None:
            raise
        complain(f"Airflow's own database cannot be read ({problem}); going by what the saga store knows")
        run, undo_dag = None, {}
    if saga is not None:
        newest = max(saga.clear_number, saga.stop_clear_number)
        return run or metadata.Run("unknown", newest)
    if run is None:
        raise UnknownSagaError(
            f"neither Airflow nor the saga store knows a run {args.run_id!r} of {args.dag_id!r}; nothing was done. "
            f"See: airflow saga list"
        )
    if not undo_dag:
        raise UnknownSagaError(
            f"{args.dag_id} / {args.run_id} is no saga: none of its steps is in the store, and Airflow knows no DAG "
            f"{compensation_dag_id(args.dag_id)}. Nothing was done."
        )
    return run


def _tell(args: Namespace, connection: psycopg.Connection, decision: Decision, *, is_done: bool) -> Answer:
    shown = display()
    message = shown.text(decision.message) or ""
    if not is_done:
        complain(message)
        return Answer("", REFUSED)
    started = _start_undo(args, connection, decision)
    saga = Reader(connection).find(args.dag_id, args.run_id)
    data = {
        "verdict": decision.verdict.name.lower(),
        "message": message,
        "saga": saga_data(saga, shown) if saga else None,
        "request": request_data(decision.request, shown) if decision.request else None,
        "undo_run": started,
    }
    lines = [message, *([started["message"]] if started else [])]
    if decision.undoes or decision.verdict is Verdict.KEEPING:
        lines.append(f"follow it: airflow saga show {shlex.quote(args.dag_id)} {shlex.quote(args.run_id)}")
    return say(args, "\n".join(lines), data)


def _start_undo(args: Namespace, connection: psycopg.Connection, decision: Decision) -> dict[str, Any] | None:
    """Start the undo run at once, where there is one to start; what fails here the reconciler does."""
    request = decision.request
    if request is None or not decision.undoes:
        return None
    dag_id, run_id = compensation_dag_id(args.dag_id), undo_run_id(request.request_uuid)
    told: dict[str, Any] = {"dag_id": dag_id, "run_id": request.owner_run_id or run_id, "triggered": False}
    if request.state == RequestState.QUEUED:
        return told | {"message": "it begins when the undo under way has ended"}
    if request.state != RequestState.REQUESTED:
        return told | {"message": f"{dag_id} / {told['run_id']} carries it out", "triggered": True}
    if not trigger_undo(request, args.dag_id, args.run_id, triggered_by="cli"):
        return told | {
            "message": f"{dag_id} could not be started now; the reconciler starts it within its minute"
        }
    RequestVerbs(connection).note_triggered(request.request_uuid)
    message = f"{dag_id} / {run_id} carries it out"
    try:
        if metadata.dags_of([dag_id])[dag_id].is_paused:
            message += f", but that DAG is paused; run: airflow dags unpause {shlex.quote(dag_id)}"
    except (MetadataUnreadableError, KeyError):
        message += ", if that DAG is not paused"
    return told | {"message": message, "triggered": True}


@verb(writes=True)
def resolve(args: Namespace) -> Answer:
    answers = {
        ActionState.COMPENSATED: args.undone,
        ActionState.ACCEPTED: args.accepted,
        ActionState.DONE: args.happened is not False,
        ActionState.FAILED: args.did_not_happen,
    }
    given = [state for state, is_given in answers.items() if is_given]
    if len(given) != 1:
        usage("give exactly one of --undone, --accepted, --happened [JSON], --did-not-happen")
    if not args.note.strip():
        usage("--note has to say how you know")
    result = _result(args.happened) if isinstance(args.happened, str) else None
    with store() as connection:
        decision = ResolveVerbs(connection).resolve(
            args.dag_id,
            args.run_id,
            args.action,
            to=given[0],
            actor=actor(),
            note_text=scrubbed(args.note) or "",
            result=result,
        )
        return _tell(args, connection, decision, is_done=True)


def _result(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError as problem:
        usage(f"--happened takes the result as JSON ({problem}); it is not JSON: {text!r}")
    pattern = secrets_of_this_process().pattern()
    encoded, masked = encode_masked(value, pattern, max_bytes=Settings.load().max_value_bytes)
    for path in masked:
        complain(f"{path} holds a known secret and is kept as ***")
    return encoded


@verb(writes=True)
def release(args: Namespace) -> Answer:
    with store() as connection:
        decision = RequestVerbs(connection).release(args.dag_id, args.run_id, actor=actor())
        return _tell(args, connection, decision, is_done=True)
