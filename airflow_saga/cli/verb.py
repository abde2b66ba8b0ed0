"""What every command has around it: the store opened and checked, refusals told in one line, codes that mean something.

Codes: 0 done, 1 refused or failed (why is on standard error, without a traceback unless ``--verbose``), 2 wrong usage.
"""

from __future__ import annotations

import functools
import logging
import os
import pwd
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, NoReturn

import psycopg
from airflow.exceptions import AirflowConfigException
from airflow.utils.cli import action_cli

from airflow_saga.cli.printing import complain, data_text
from airflow_saga.core.errors import SagaError
from airflow_saga.metadata import MetadataUnreadableError
from airflow_saga.settings import secrets_of_this_process, sensitive_names, store_address
from airflow_saga.store.connect import first_line
from airflow_saga.store.migrate import check
from airflow_saga.telling.display import Display

DONE, REFUSED, USAGE = 0, 1, 2


@dataclass(frozen=True)
class Answer:
    """What a command has to say on standard output, and the code it ends with."""

    text: str
    code: int = DONE


Command = Callable[[Namespace], Answer]


def verb(*, writes: bool) -> Callable[[Command], Callable[[Namespace], None]]:
    """Make a command of a function.

    :param writes: it changes something, so Airflow's audit log keeps that it was called, by whom and with what.
    """

    def wrap(command: Command) -> Callable[[Namespace], None]:
        called = action_cli(check_db=False)(command) if writes else command

        @functools.wraps(command)
        def run(args: Namespace) -> None:
            # As Airflow's own commands do it: connections may then come from its metadata, also through the SDK.
            os.environ.setdefault("_AIRFLOW_PROCESS_CONTEXT", "server")
            with _only_answers_on_stdout(args.verbose):
                answer = _answer_of(called, args)
            if answer.text:
                print(answer.text)
                sys.stdout.flush()
            if answer.code != DONE:
                sys.exit(answer.code)

        return run

    return wrap


@contextmanager
def _only_answers_on_stdout(verbose: bool) -> Iterator[None]:
    """Airflow logs to standard output, also past ``sys.stdout``; what a program reads there must be ours alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            if not verbose:
                warnings.simplefilter("ignore")
                logging.disable(logging.INFO)
            yield
    finally:
        logging.disable(logging.NOTSET)
        os.dup2(kept, 1)
        os.close(kept)


def _answer_of(command: Command, args: Namespace) -> Answer:
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
    return Answer("", REFUSED)


def say(args: Namespace, message: str, data: Mapping[str, Any], code: int = DONE) -> Answer:
    """The message for people; for programs the same message among the data."""
    text = message if args.output == "table" else data_text({"message": message, **data}, args.output)
    return Answer(text, code)


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
