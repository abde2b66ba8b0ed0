"""A secret as the log knows it: by where it stands, never by its value.

The log keeps parameters for the undo, for months, and in dumps; a password must not be among them. A ``Secret`` is a
reference into an Airflow connection. It is stored and fingerprinted as that reference, and the value is read at each
``reveal()``: nothing is kept between two of them, so a secret that was rotated between the call and its undo works.

This module asks no one itself: the Airflow layer registers how a reference is resolved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from airflow_saga.core.errors import SecretNotResolvedError

SECRET_FIELDS = ("password", "login", "host", "schema", "port", "extra")

SecretResolver = Callable[[str, str], "str | None"]
_resolver: SecretResolver | None = None


def set_secret_resolver(resolver: SecretResolver | None) -> None:
    """Register how a reference becomes a value; the Airflow layer does it once per process, the last one counts.

    :param resolver: called as ``resolver(conn_id, field)`` at each ``reveal()``, with one of ``SECRET_FIELDS`` or
        ``extra.<key>``; gives None where the connection has no such field. It should make the value known to
        Airflow's masker. None takes the registration back.
    """
    global _resolver
    _resolver = resolver


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """One field of an Airflow connection, passed to an action instead of its value.

    Hand it over as a parameter and call ``.reveal()`` inside the action and inside its compensation.

    :param conn_id: the connection.
    :param field: ``password`` (default), ``login``, ``host``, ``schema``, ``port``, ``extra`` (the whole JSON text), or
        one key of the extra, written ``extra.<key>`` or ``extra__<key>``.
    :raises ValueError: another field, or an empty name.
    """

    conn_id: str
    field: str = "password"

    def __post_init__(self) -> None:
        if not isinstance(self.conn_id, str) or not isinstance(self.field, str):
            raise TypeError("Secret(conn_id, field): both are names, that is, str")
        if not self.conn_id:
            raise ValueError("Secret(''): name the connection whose field is meant")
        if self.field.startswith("extra__"):
            # Two spellings of one place must not look like two parameters when a step is resumed.
            object.__setattr__(self, "field", "extra." + self.field.removeprefix("extra__"))
        if self.field not in SECRET_FIELDS and not (
            self.field.startswith("extra.") and self.field != "extra."
        ):
            raise ValueError(
                f"{self!r}: a connection has the fields {', '.join(SECRET_FIELDS)} and 'extra.<key>' for a key "
                f"of its extra"
            )

    def reveal(self) -> str:
        """Read the value now.

        :raises SecretNotResolvedError: the connection or the field is missing, or nothing resolves secrets in this
            process; an Airflow retry asks again.
        """
        if _resolver is None:
            raise SecretNotResolvedError(
                f"{self!r} cannot be read here: nothing in this process resolves secrets. It is read inside an "
                f"action or compensation run by Airflow; in a test, call set_secret_resolver first."
            )
        value = _resolver(self.conn_id, self.field)
        if value is None:
            raise SecretNotResolvedError(
                f"{self!r}: the connection {self.conn_id!r} has no {self.field}; set it in Airflow and retry."
            )
        return str(value)

    def __repr__(self) -> str:
        return f"Secret({self.conn_id!r}, field={self.field!r})"
