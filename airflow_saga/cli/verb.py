"""What every command has around it: the store opened and checked, refusals told in one line, codes that mean something.

Codes: 0 done, 1 refused or failed (why is on standard error, without a traceback unless ``--verbose``), 2 wrong usage.
"""

from __future__ import annotations

import functools
import os
import pwd
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import psycopg
from airflow.exceptions import AirflowConfigException
from airflow.utils.cli import action_cli

from airflow_saga.cli.display import Display, complain
from airflow_saga.core.errors import SagaError
from airflow_saga.metadata import MetadataUnreadableError
from airflow_saga.settings import secrets_of_this_process, sensitive_names, store_address
from airflow_saga.store.connect import first_line
from airflow_saga.store.migrate import check

DONE, REFUSED, USAGE = 0, 1, 2

Command = Callable[[Namespace], int]


def verb(*, writes: bool) -> Callable[[Command], Callable[[Namespace], None]]:
    """A command: its result is the exit code.

    :param writes: it changes something, so Airflow's audit log keeps that it was called, by whom and with what.
    """

    def wrap(command: Command) -> Callable[[Namespace], None]:
        called = action_cli(check_db=False)(command) if writes else command

        @functools.wraps(command)
        def run(args: Namespace) -> None:
            # As Airflow's own commands do it: connections may then come from its metadata, also through the SDK.
            os.environ.setdefault("_AIRFLOW_PROCESS_CONTEXT", "server")
            warnings.simplefilter("default" if args.verbose else "ignore")
            code = _code_of(called, args)
            sys.stdout.flush()
            if code != DONE:
                sys.exit(code)

        return run

    return wrap


def _code_of(command: Command, args: Namespace) -> int:
    try:
        return command(args)
    except (SagaError, AirflowConfigException, MetadataUnreadableError) as problem:
        message = str(problem)
    except psycopg.Error as problem:
        message = (
            f"the saga store failed: {first_line(problem)}. Nothing more was done; look: airflow saga doctor"
        )
    if args.verbose:
        traceback.print_exc()
    complain(display().text(message) or "")
    return REFUSED


def usage(message: str) -> NoReturn:
    """Wrong usage that the parser cannot see."""
    complain(f"usage: {message}")
    sys.exit(USAGE)


@contextmanager
def store() -> Iterator[psycopg.Connection]:
    """The store, opened and of the right version.

    :raises StoreError: it is missing, does not answer, or is not migrated; says what to run.
    """
    with store_address().open() as connection:
        check(connection)
        yield connection


def display() -> Display:
    """What is shown here is masked by what Airflow knows in this process."""
    return Display(sensitive_names(), secrets_of_this_process().pattern())


def actor() -> str:
    """Who is calling: the user of the operating system, since a command cannot ask Airflow's auth manager."""
    try:
        return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"cli:{os.getuid()}"


def scrubbed(text: str | None) -> str | None:
    """What a person types is kept for long: without the secrets that Airflow knows."""
    return None if text is None else secrets_of_this_process().scrub(text)
