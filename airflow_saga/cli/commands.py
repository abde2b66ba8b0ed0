"""Commands about one saga, and the list of them: read the store or call one verb of it, then say what came of it."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from typing import Any

import psycopg

from airflow_saga.cli.printing import complain, data_text, table_text
from airflow_saga.cli.show import Shown
from airflow_saga.cli.verb import REFUSED, Answer, actor, display, say, store, usage, verb
from airflow_saga.core.states import ActionState
from airflow_saga.settings import Settings
from airflow_saga.store.decision import Verdict
from airflow_saga.store.overview import Overview
from airflow_saga.store.reader import Reader
from airflow_saga.telling import lists
from airflow_saga.verbs import Answer as Decided
from airflow_saga.verbs import Verbs

# -- looking ----------------------------------------------------------------------------------------------------------


@verb(writes=False)
def list_sagas(args: Namespace) -> Answer:
    with store() as connection:
        listed = lists.list_sagas(
            connection,
            display(),
            start_alert_seconds=Settings.load().start_alert_seconds,
            dag_ids=[args.dag_id] if args.dag_id else None,
            states=args.state,
            limit=args.limit,
        )
    if args.output == "table":
        return Answer(table_text(listed, "no sagas" + (" in this state" if args.state else "")))
    return Answer(data_text(listed, args.output))


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
        planned = Reader(connection).plan(args.dag_id, args.run_id, args.from_action)
    digest, rows = planned.digest, lists.planned(planned, display())
    part = f" --from {args.from_action}" if args.from_action else ""
    command = f"airflow saga undo {shlex.quote(args.dag_id)} {shlex.quote(args.run_id)}{part} --plan {digest}"
    if args.output != "table":
        return Answer(data_text({"hash": digest, "command": command, "actions": rows}, args.output))
    columns = ["order", "step", "action", "name", "state", "expected"]
    if any(row["probe"] for row in rows):
        columns.append("probe")
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
        return _tell(args, _verbs(args, connection).cancel(reason=args.reason, keep=args.keep, now=args.now))


@verb(writes=True)
def undo(args: Namespace) -> Answer:
    if args.from_action and args.now:
        usage("--from and --now exclude each other: nothing runs in a saga that is at rest")
    with store() as connection:
        answer = _verbs(args, connection).undo(
            reason=args.reason, now=args.now, plan_hash=args.plan, from_action=args.from_action
        )
        return _tell(args, answer)


@verb(writes=True)
def retry(args: Namespace) -> Answer:
    with store() as connection:
        return _tell(args, _verbs(args, connection).retry(args.action, reason=args.reason))


@verb(writes=True)
def rewind(args: Namespace) -> Answer:
    with store() as connection:
        return _tell(args, _verbs(args, connection).rewind(args.to, reason=args.reason))


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
    has_result = isinstance(args.happened, str)
    result = _result(args.happened) if has_result else None
    with store() as connection:
        answer = _verbs(args, connection).resolve(
            args.action, to=given[0], note=args.note, result=result, has_result=has_result
        )
        return _tell(args, answer)


def _result(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as problem:
        usage(f"--happened takes the result as JSON ({problem}); it is not JSON: {text!r}")


@verb(writes=True)
def probe(args: Namespace) -> Answer:
    with store() as connection:
        return _tell(args, _verbs(args, connection).probe())


@verb(writes=True)
def release(args: Namespace) -> Answer:
    with store() as connection:
        return _tell(args, _verbs(args, connection).release())


def _verbs(args: Namespace, connection: psycopg.Connection) -> Verbs:
    return Verbs(connection, args.dag_id, args.run_id, actor=actor(), triggered_by="cli", warn=complain)


def _tell(args: Namespace, decided: Decided) -> Answer:
    data = decided.as_data(display())
    message = str(data["message"])
    if not decided.is_done:
        complain(message)
        return Answer("", REFUSED)
    lines = [message, *([decided.started["message"]] if decided.started else [])]
    if decided.decision.undoes or decided.decision.verdict is Verdict.KEEPING:
        lines.append(f"follow it: airflow saga show {shlex.quote(args.dag_id)} {shlex.quote(args.run_id)}")
    return say(args, "\n".join(lines), data)
