"""Commands that keep the house: the store's tables, what is old, what was missed, and whether all is alive."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import asdict

import psycopg

from airflow_saga import metadata
from airflow_saga.capsules.databases import make_table
from airflow_saga.cli.doctor import Level, examine
from airflow_saga.cli.printing import complain, data_text
from airflow_saga.cli.verb import DONE, REFUSED, Answer, say, store, usage, verb
from airflow_saga.core.errors import VerbRefusedError
from airflow_saga.runtime.reconcile import Reconciler
from airflow_saga.settings import Settings, store_address
from airflow_saga.store.migrate import HEAD, check, revision_of, upgrade
from airflow_saga.store.overview import Overview
from airflow_saga.store.sweep import SweepVerbs
from airflow_saga.telling.display import plural

# -- the tables -------------------------------------------------------------------------------------------------------


@verb(writes=True)
def db_migrate(args: Namespace) -> Answer:
    if args.receipts or args.conn_id:
        return _make_receipts(args)
    with store_address().open() as connection:
        before = revision_of(connection)
        upgrade(connection)
        after = revision_of(connection)
        where = _database(connection)
    done = f"was at {after} already" if before == after else f"is at {after} now, was {before or 'empty'}"
    return say(args, f"the saga store {where} {done}", {"database": where, "before": before, "after": after})


def _make_receipts(args: Namespace) -> Answer:
    if not (args.receipts and args.conn_id):
        usage("--receipts and --conn-id CONN go together: which database is the table of receipts for?")
    made = make_table(args.conn_id)
    done = (
        "has the table airflow_saga_receipts now" if made else "had the table airflow_saga_receipts already"
    )
    return say(
        args,
        f"the database of connection {args.conn_id!r} {done}",
        {"conn_id": args.conn_id, "made": made},
    )


@verb(writes=False)
def db_check(args: Namespace) -> Answer:
    with store_address().open() as connection:
        check(connection)
        where = _database(connection)
    return say(
        args, f"the saga store {where} is at {HEAD}, as this version needs", {"database": where, "at": HEAD}
    )


def _database(connection: psycopg.Connection) -> str:
    info = connection.info
    return f"{info.dbname} on {info.host or 'a socket'}:{info.port}"


# -- keeping house ----------------------------------------------------------------------------------------------------


@verb(writes=True)
def prune(args: Namespace) -> Answer:
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
    if not actions:
        message = f"nothing to delete: no settled saga has been at rest for more than {plural(days, 'day')}"
    return say(args, message, {"retention_days": days, "sagas": sagas, "deleted_actions": deleted})


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        return False
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


@verb(writes=True)
def reconcile(args: Namespace) -> Answer:
    platform = metadata.MetadataPlatform(triggered_by="cli")
    with store() as connection:
        report = Reconciler(connection, platform, Settings.load().limits()).run_once()
    done = {field: count for field, count in asdict(report).items() if field != "errors"}
    if report.errors:
        complain(f"{plural(report.errors, 'saga')} could not be moved, see above; the next pass tries again")
    return say(
        args,
        f"looked at everything that is open: {report}",
        {"moved": done, "errors": report.errors},
        REFUSED if report.errors else DONE,
    )


@verb(writes=False)
def doctor(args: Namespace) -> Answer:
    findings = examine()
    code = REFUSED if any(finding.level is Level.FAIL for finding in findings) else DONE
    if args.output == "table":
        return Answer("\n".join(finding.line() for finding in findings), code)
    return Answer(data_text([finding.data() for finding in findings], args.output), code)
