"""What Airflow knows and the product needs: the options of ``[saga]``, where the store is, which values are secret.

Importing this module reads nothing and connects nowhere; each function asks Airflow when it is called, so it works in a
task, the API server, the triggerer, the scheduler and the command line alike. Two of them hide a trap:

* In a task the supervisor is asked for a connection. Anywhere else Airflow reads its own database with the *thread's*
  session, and on the scheduler's thread that ends the session the scheduler is working with. So outside of a task a
  thread of our own asks.
* Airflow 3.3 holds two secrets maskers, one of its core and one of its task SDK, and either may learn a secret alone.
"""

from __future__ import annotations

import contextvars
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_saga.core.errors import (
    SecretNotResolvedError,
    StoreError,
    StoreNotConfiguredError,
    StoreUnavailableError,
)
from airflow_saga.get_provider_info import get_provider_info

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from airflow_saga.runtime.ports import Limits
    from airflow_saga.runtime.secrecy import KnownSecrets
    from airflow_saga.store.connect import Address

R = TypeVar("R")

SECTION = "saga"
ADDRESS_LIFETIME_SECONDS = 300.0
"""How long a long-lived process keeps an address before it asks Airflow again: passwords and IAM tokens change."""
CONNECT_TIMEOUT_SECONDS = 5
LOOK_UP_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Settings:
    """The options of ``[saga]``; what each means is said in the provider info and by ``airflow config list``."""

    conn_id: str
    lease_seconds: float
    heartbeat_seconds: float
    flush_ms: int
    checkpoint_every: int
    stop_grace_seconds: float
    wait_in_process_seconds: float
    cancel_deadline_seconds: float
    store_outage_seconds: float
    mass_undo_threshold: int
    max_value_bytes: int
    retention_days: int
    undo_deadline_seconds: float
    start_alert_seconds: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "conn_id" and not value:
                raise _bad_option("conn_id", "names no connection; the default is saga_default")
            if field.name != "conn_id" and value <= 0:
                raise _bad_option(field.name, f"is {value}; it has to be more than 0")
        if self.heartbeat_seconds * 2 > self.lease_seconds:
            raise _bad_option(
                "heartbeat_seconds",
                f"is {self.heartbeat_seconds:g} with lease_seconds {self.lease_seconds:g}: a lease has to outlive at "
                f"least one missed heartbeat, so make it twice as long or longer",
            )

    def limits(self) -> Limits:
        """The same, as the runtime wants it: without Airflow, all in seconds."""
        from airflow_saga.runtime.ports import Limits

        return Limits(
            lease_seconds=self.lease_seconds,
            heartbeat_seconds=self.heartbeat_seconds,
            flush_seconds=self.flush_ms / 1000,
            checkpoint_every=self.checkpoint_every,
            stop_grace_seconds=self.stop_grace_seconds,
            wait_in_process_seconds=self.wait_in_process_seconds,
            store_outage_seconds=self.store_outage_seconds,
            max_value_bytes=self.max_value_bytes,
            mass_undo_threshold=self.mass_undo_threshold,
            start_alert_seconds=self.start_alert_seconds,
        )

    @classmethod
    def load(cls) -> Settings:
        """Read the options as Airflow has them now: environment, airflow.cfg, or the defaults.

        :raises AirflowConfigException: an option cannot be read or makes no sense; names it.
        """
        from airflow.configuration import conf

        defaults = get_provider_info()["config"][SECTION]["options"]
        read: dict[str, Callable[..., Any]] = {"str": conf.get, "int": conf.getint, "float": conf.getfloat}
        # With a fallback of its own: a process that has not found its providers yet knows no defaults of theirs.
        return cls(
            **{
                field.name: read[str(field.type)](
                    SECTION, field.name, fallback=_typed(field.type, defaults[field.name])
                )
                for field in fields(cls)
            }
        )


def _typed(kind: Any, option: dict[str, Any]) -> Any:
    return {"str": str, "int": int, "float": float}[str(kind)](option["default"])


def _bad_option(name: str, problem: str) -> Exception:
    from airflow.exceptions import AirflowConfigException

    return AirflowConfigException(f"[{SECTION}] {name} {problem}.")


# -- the store --------------------------------------------------------------------------------------------------------

_addresses: dict[tuple[int, str], tuple[float, Address]] = {}
_asking = threading.Lock()


def _new_lock() -> None:
    global _asking
    _asking = threading.Lock()


# A task may be forked from the scheduler while a thread there holds the lock.
os.register_at_fork(after_in_child=_new_lock)


def store_address(conn_id: str | None = None) -> Address:
    """Where the saga store is, as the connection of ``[saga] conn_id`` says; the first call in a process opens it once.

    May be called on any thread of any Airflow process, the scheduler's too.

    :param conn_id: another connection than the configured one.
    :raises StoreNotConfiguredError: Airflow has no such connection, or it is not one to Postgres; says how to make it.
    :raises StoreUnavailableError: Postgres does not answer there. Nothing was called, an Airflow retry tries again.
    """
    wanted = conn_id or Settings.load().conn_id
    key = (os.getpid(), wanted)  # a forked task asks anew: its parent's answer may be hours old
    with _asking:
        kept = _addresses.get(key)
        if kept is None or time.monotonic() - kept[0] > ADDRESS_LIFETIME_SECONDS:
            kept = (time.monotonic(), _resolve(wanted))
            _addresses[key] = kept
        return kept[1]


def forget_addresses() -> None:
    """Ask Airflow anew at the next call, as after a change of the connection."""
    _addresses.clear()


def _resolve(conn_id: str) -> Address:
    from airflow_saga.store.connect import Address, first_line

    connection = connection_of(conn_id)
    if connection is None:
        raise StoreNotConfiguredError(_how_to_connect(conn_id))
    if connection.conn_type not in ("postgres", "postgresql"):
        raise StoreNotConfiguredError(
            f"the connection {conn_id!r}, which [{SECTION}] conn_id names, is of type {connection.conn_type!r}; sagas "
            f"are kept in Postgres only. Make it a postgres connection, or name another one in [{SECTION}] conn_id."
        )
    import psycopg

    try:
        opened = on_a_session_of_its_own(lambda: _open(connection))
    except psycopg.OperationalError as problem:
        said = _without_password(first_line(problem), connection)
        raise StoreUnavailableError(
            f"the saga store does not answer (connection {conn_id!r}): {said}"
        ) from None
    except psycopg.Error as problem:
        said = _without_password(first_line(problem), connection)
        raise StoreNotConfiguredError(
            f"the connection {conn_id!r} cannot be used for the saga store: {said}. Each key of its extra has to be a "
            f"connection parameter of Postgres, as sslmode is."
        ) from None
    try:
        if not isinstance(opened, psycopg.Connection):
            raise StoreNotConfiguredError(
                "the installed apache-airflow-providers-postgres opens connections with psycopg2; the saga store needs "
                "psycopg 3. Run: pip install -U apache-airflow-providers-postgres 'psycopg[binary]' 'sqlalchemy>=2'"
            )
        return Address.of(opened)
    finally:
        opened.close()


def _open(connection: Connection) -> Any:
    from airflow.providers.postgres.hooks.postgres import PostgresHook

    return PostgresHook(connection=for_hook(connection)).get_conn()


def for_hook(connection: Any) -> Connection:
    """A copy in the form of the task SDK, with a limit to how long a silent host is waited for."""
    from airflow.sdk import Connection

    # A cursor factory is for those who read rows through the hook, and the hook refuses some that psycopg 3 lacks.
    extra = {name: value for name, value in connection.extra_dejson.items() if name != "cursor"}
    return Connection(
        conn_id=connection.conn_id,
        conn_type=connection.conn_type,
        host=connection.host,
        schema=connection.schema,
        login=connection.login,
        password=connection.password,
        port=connection.port,
        extra=json.dumps({"connect_timeout": CONNECT_TIMEOUT_SECONDS, **extra}),
    )


def _without_password(text: str, connection: Any) -> str:
    return text.replace(connection.password, "***") if connection.password else text


def _how_to_connect(conn_id: str) -> str:
    uri = "postgres://USER:PASSWORD@HOST:5432/DATABASE"
    return (
        f"Airflow knows no connection {conn_id!r}, which [{SECTION}] conn_id names, so there is no saga store. Set "
        f"it either in the environment of every component:\n"
        f"  export AIRFLOW_CONN_{conn_id.upper()}='{uri}'\n"
        f"or put it into Airflow's metadata:\n"
        f"  airflow connections add {conn_id} --conn-uri '{uri}'\n"
        f"Then run: airflow saga db migrate\n"
        f"(Is it there? Then Airflow could not read it in this process; its log at level DEBUG says why.)"
    )


# -- connections ------------------------------------------------------------------------------------------------------


def in_task_process() -> bool:
    """Whether a supervisor answers this process: a task, a trigger, the parsing of a DAG file."""
    runner = sys.modules.get("airflow.sdk.execution_time.task_runner")
    return getattr(runner, "SUPERVISOR_COMMS", None) is not None


def connection_of(conn_id: str) -> Any:
    """An Airflow connection, wherever this process may read it from; None if there is none.

    :raises StoreUnavailableError: Airflow itself could not be asked.
    """
    from airflow.exceptions import AirflowNotFoundException

    try:
        return on_a_session_of_its_own(lambda: _look_up(conn_id))
    except AirflowNotFoundException:
        return None
    except StoreError:
        raise
    except Exception as problem:
        raise StoreUnavailableError(
            f"Airflow could not be asked for the connection {conn_id!r} ({type(problem).__name__}); try again"
        ) from problem


def _look_up(conn_id: str) -> Any:
    if in_task_process():
        from airflow.sdk import BaseHook

        return BaseHook.get_connection(conn_id)
    from airflow.models.connection import Connection

    return Connection.get_connection_from_secrets(conn_id)


def on_a_session_of_its_own(ask: Callable[[], R]) -> R:
    """Call on a thread of its own, since Airflow's sessions are one per thread; in a task, which has none, call here.

    What Airflow reads on a thread may commit and close that thread's session, and on the scheduler's thread that is the
    one it schedules with.

    :raises StoreUnavailableError: it took more than ``LOOK_UP_TIMEOUT_SECONDS``.
    """
    if in_task_process():
        return ask()
    answers: list[R] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as problem:  # noqa: BLE001 - raised again below, on the thread that asked
            problems.append(problem)

    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(run,), name="saga-ask", daemon=True
    )
    thread.start()
    thread.join(LOOK_UP_TIMEOUT_SECONDS)
    if problems:
        raise problems[0]
    if not answers:
        raise StoreUnavailableError(
            f"Airflow, or the saga store, did not answer within {LOOK_UP_TIMEOUT_SECONDS:.0f} s; try again"
        )
    return answers[0]


# -- secrets ----------------------------------------------------------------------------------------------------------


def masked_patterns() -> tuple[str, ...]:
    """What Airflow's maskers hide in this process, escaped for a regular expression as they keep it; cheap."""
    from airflow._shared.secrets_masker import _secrets_masker as masker_of_core
    from airflow.sdk._shared.secrets_masker import _secrets_masker as masker_of_sdk

    return tuple(masker_of_core().patterns) + tuple(masker_of_sdk().patterns)


def known_secrets() -> Iterable[str]:
    """The values, in plain text, that Airflow's maskers hide in this process right now."""
    return {re.sub(r"\\(.)", r"\1", pattern, flags=re.DOTALL) for pattern in masked_patterns()}


def secrets_of_this_process() -> KnownSecrets:
    """The same values, ready to be searched for in what is stored and to be scrubbed from what is shown."""
    from airflow_saga.runtime.secrecy import KnownSecrets

    masker = _sdk_masker()
    return KnownSecrets(masked_patterns, escaped=True, min_length=masker.min_length_to_mask)


def sensitive_names() -> frozenset[str]:
    """Parts of key names whose values Airflow does not show (``[core] sensitive_var_conn_names`` and its own list)."""
    from airflow_saga.runtime.secrecy import SENSITIVE_NAMES

    return frozenset(_sdk_masker().sensitive_variables_fields) or SENSITIVE_NAMES


def resolve_secret(conn_id: str, field: str) -> str | None:
    """The value that ``Secret(conn_id, field)`` stands for, read now; the resolver for ``set_secret_resolver``.

    What Airflow treats as secret in a connection, its password and its extra, is made known to the maskers; host, port,
    schema and login are not: their values are words that other texts may hold.

    :raises SecretNotResolvedError: there is no such connection.
    """
    connection = connection_of(conn_id)
    if connection is None:
        raise SecretNotResolvedError(
            f"Secret({conn_id!r}, field={field!r}): Airflow knows no connection {conn_id!r}; add it and retry."
        )
    if field.startswith("extra."):
        value = connection.extra_dejson.get(field.removeprefix("extra."))
    else:
        value = getattr(connection, field)
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    if field == "password" or field.startswith("extra"):
        from airflow.sdk.log import mask_secret

        mask_secret(text)
    return text


def _sdk_masker() -> Any:
    from airflow.sdk._shared.secrets_masker import _secrets_masker

    return _secrets_masker()
