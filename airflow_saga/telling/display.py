"""How what is stored is shown: masked, free of control characters, in UTC; as a table for people or as data.

Nothing shown here is read back. Texts are printed as they are, never as markup: a run id may hold ``[red]``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

from airflow_saga.core.errors import ValueNotReadableError
from airflow_saga.runtime.codec import readable
from airflow_saga.runtime.secrecy import SENSITIVE_NAMES, SecretPattern, mask_for_display

VALUE_CHARACTERS = 200
_NO_SECRETS = SecretPattern(())


class Display:
    """What may be shown of stored texts and values.

    :param names: parts of key names whose values are hidden.
    :param secrets: values that are hidden wherever they stand.
    """

    def __init__(self, names: Iterable[str] = SENSITIVE_NAMES, secrets: SecretPattern = _NO_SECRETS) -> None:
        self._names = frozenset(names)
        self._secrets = secrets

    def text(self, stored: str | None) -> str | None:
        """A text of a person or of an error."""
        return None if stored is None else str(mask_for_display(stored, self._names, self._secrets))

    def value(self, stored: str | None) -> Any:
        """An encoded value as plain data; a value that cannot be read is said to be one."""
        if stored is None:
            return None
        try:
            return mask_for_display(readable(stored), self._names, self._secrets)
        except ValueNotReadableError as problem:
            return f"<{self.text(str(problem))}>"


# -- small parts ------------------------------------------------------------------------------------------------------


def moment(at: datetime | None) -> str | None:
    """``2026-11-30 02:14:05.123+00:00``: in UTC, and saying so."""
    return None if at is None else at.astimezone(UTC).isoformat(" ", "milliseconds")


def second(at: datetime) -> str:
    """The same for a sentence, to the second."""
    return at.astimezone(UTC).isoformat(" ", "seconds")


def seconds_between(begun: datetime | None, ended: datetime | None) -> float | None:
    if begun is None or ended is None:
        return None
    return round((ended - begun).total_seconds(), 3)


def span(seconds: float) -> str:
    """A length of time as a person says it: ``0.412 s``, ``3 min 5 s``, ``2 d 4 h``."""
    if seconds < 60:
        return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.0f} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    left, parts = round(seconds), list[tuple[int, str]]()
    for name, size in units:
        if left >= size or parts:
            parts.append((left // size, name))
            left %= size
    return " ".join(f"{count} {name}" for count, name in parts[:2] if count)


def age(span_of_time: timedelta) -> str:
    return span(max(0, round(span_of_time.total_seconds())))


def short(value: Any, characters: int = VALUE_CHARACTERS) -> str:
    """A value on one line, cut where it is long."""
    text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= characters else text[: characters - 1] + "…"


def plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def plain(value: Any) -> Any:
    """Only what JSON and YAML know: times in UTC, ids and states as text."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, UUID | bytes):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
