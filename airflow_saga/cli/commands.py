"""The commands themselves, one function each: read the store or call one verb of it, then say what came of it."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from dataclasses import asdict
from typing import Any

import psycopg

from airflow_saga import metadata
from airflow_saga.cli.display import complain, moment, plural, print_data, print_table
from airflow_saga.cli.show import Shown, request_data, saga_data
from airflow_saga.cli.verb import DONE, REFUSED, actor, display, scrubbed, store, usage, verb
from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.core.identity import compensation_dag_id, forward_dag_id, undo_run_id
from airflow_saga.core.states import ActionState, Mode, RequestState, SagaState
from airflow_saga.metadata import MetadataUnreadableError
from airflow_saga.runtime.codec import encode_masked
from airflow_saga.runtime.reconcile import Reconciler
from airflow_saga.settings import Settings, secrets_of_this_process, store_address
from airflow_saga.store.migrate import HEAD, check, revision_of, upgrade
from airflow_saga.store.overview import Overview
from airflow_saga.store.reader import Reader
from airflow_saga.store.requests import Decision, RequestVerbs, Verdict
from airflow_saga.store.sweep import SweepVerbs
from airflow_saga.trigger import trigger_undo

PLAN_PREFIX = 8

# -- the tables -------------------------------------------------------------------------------------------------------


@verb(writes=True)
def db_migrate(args: Namespace) -> int:
    with store_address().open() as connection:
        before = revision_of(connection)
        upgrade(connection)
        after = revision_of(connection)
        where = _database(connection)
    done = f"was at {after} already" if before == after else f"is at {after} now, was {before or 'empty'}"
    _say(args, f"the saga store {where} {done}", {"database": where, "before": before, "after": after})
    return DONE


@verb(writes=False)
def db_check(args: Namespace) -> int:
    with store_address().open() as connection:
        check(connection)
        where = _database(connection)
    _say(args, f"the saga store {where} is at {HEAD}, as this version needs", {"database": where, "at": HEAD})
    return DONE


def _database(connection: psycopg.Connection) -> str:
    info = connection.info
    return f"{info.dbname} on {info.host or 'a socket'}:{info.port}"


# -- looking ----------------------------------------------------------------------------------------------------------


@verb(writes=False)
def list_sagas(args: Namespace) -> int:
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
        print_table(listed, "no sagas" + (" in this state" if args.state else ""))
    else:
        print_data(listed, args.output)
    return DONE


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
def show(args: Namespace) -> int:
    with store() as connection:
        view = Reader(connection).view(args.dag_id, args.run_id)
        now = Overview(connection).now()
    alert = Settings.load().start_alert_seconds
    shown = Shown(view, display(), now, start_alert_seconds=alert)
    if args.output == "table":
        print(shown.text())
    else:
        print_data(shown.data(), args.output)
    return DONE


@verb(writes=False)
def plan(args: Namespace) -> int:
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
        print_data({"hash": digest, "command": command, "actions": rows}, args.output)
        return DONE
    columns = ("order", "step", "action", "name", "state", "expected")
    print_table(
        [{name: row[name] for name in columns} for row in rows], "nothing stands: an undo would call nothing"
    )
    if rows:
        print(f"plan {digest}\nto do exactly this, or nothing if it changes:\n  {command}")
    return DONE


# -- deciding ---------------------------------------------------------------------------------------------------------


@verb(writes=True)
def cancel(args: Namespace) -> int:
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
def undo(args: Namespace) -> int:
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


def _tell(args: Namespace, connection: psycopg.Connection, decision: Decision, *, is_done: bool) -> int:
    shown = display()
    message = shown.text(decision.message) or ""
    if not is_done:
        complain(message)
        return REFUSED
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
    _say(args, "\n".join(lines), data)
    return DONE


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
def resolve(args: Namespace) -> int:
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
        decision = RequestVerbs(connection).resolve(
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
def release(args: Namespace) -> int:
    with store() as connection:
        decision = RequestVerbs(connection).release(args.dag_id, args.run_id, actor=actor())
        return _tell(args, connection, decision, is_done=True)


# -- keeping house ----------------------------------------------------------------------------------------------------


@verb(writes=True)
def prune(args: Namespace) -> int:
    days = args.retention_days or Settings.load().retention_days
    with store() as connection:
        sagas, actions = Overview(connection).prunable(days)
        what = (
            f"{plural(actions, 'action')} of {plural(sagas, 'settled saga')} older than {plural(days, 'day')}"
        )
        if actions and not args.yes and not _agreed(f"Delete {what}, for good?"):
            raise VerbRefusedError(
                f"{what} would go; nothing was deleted. To delete without being asked: --yes"
            )
        deleted = SweepVerbs(connection).prune(retention_days=days) if actions else 0
    message = f"deleted {plural(deleted, 'action')}; each saga itself is kept, with its end"
    _say(
        args,
        message if actions else f"nothing to delete: no {what.partition(' of ')[2].removeprefix('0 ')}",
        {"retention_days": days, "sagas": sagas, "deleted_actions": deleted},
    )
    return DONE


def _agreed(question: str) -> bool:
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


@verb(writes=True)
def reconcile(args: Namespace) -> int:
    platform = metadata.MetadataPlatform(triggered_by="cli")
    with store() as connection:
        report = Reconciler(connection, platform, Settings.load().limits()).run_once()
    done = {field: count for field, count in asdict(report).items() if field != "errors"}
    _say(args, f"looked at everything that is open: {report}", {"moved": done, "errors": report.errors})
    if report.errors:
        complain(f"{plural(report.errors, 'saga')} could not be moved, see above; the next pass tries again")
    return REFUSED if report.errors else DONE


@verb(writes=False)
def doctor(args: Namespace) -> int:
    from airflow_saga.cli.doctor import Level, examine

    findings = examine()
    if args.output == "table":
        for finding in findings:
            print(finding.line())
    else:
        print_data([finding.data() for finding in findings], args.output)
    return REFUSED if any(finding.level is Level.FAIL for finding in findings) else DONE


def _say(args: Namespace, message: str, data: dict[str, Any]) -> None:
    if args.output == "table":
        print(message)
    else:
        print_data({"message": message, **data}, args.output)
