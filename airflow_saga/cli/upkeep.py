"""Commands that keep the house: the store's tables, what is old, what was missed, and whether all is alive."""

from __future__ import annotations

import sys
from argparse import Namespace

import psycopg

from airflow_saga import upkeep
from airflow_saga.capsules.databases import make_table
from airflow_saga.cli.printing import complain, data_text
from airflow_saga.cli.verb import DONE, REFUSED, Answer, say, store, usage, verb
from airflow_saga.doctor import all_well, examine
from airflow_saga.settings import store_address
from airflow_saga.store.migrate import HEAD, check, revision_of, upgrade

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
    def agreed(what: str) -> bool:
        return args.yes or _agreed(f"Delete {what}, for good?")

    with store() as connection:
        done = upkeep.prune(connection, args.retention_days, agreed=agreed, how_to_agree="--yes")
    return say(args, done.message, done.data)


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        return False
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


@verb(writes=True)
def reconcile(args: Namespace) -> Answer:
    with store() as connection:
        done = upkeep.reconcile(connection, triggered_by="cli")
    if done.problem:
        complain(done.problem)
    return say(args, done.message, done.data, REFUSED if done.problem else DONE)


@verb(writes=False)
def doctor(args: Namespace) -> Answer:
    findings = list(examine())
    code = DONE if all_well(findings) else REFUSED
    if args.output == "table":
        return Answer("\n".join(finding.line() for finding in findings), code)
    return Answer(data_text([finding.data() for finding in findings], args.output), code)
