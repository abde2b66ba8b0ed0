"""Dates and times, with zone and fold; pendulum's ``DateTime`` too, since Airflow hands it out as ``logical_date``."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from airflow_saga.runtime.kinds.tree import (
    TAG,
    Payload,
    Read,
    Refused,
    Tree,
    Write,
    Writer,
    class_name,
    text_of,
)


def _write_date(writer: Writer, value: date) -> Tree:
    return {TAG: "date", "v": value.isoformat()}


def _write_timedelta(writer: Writer, value: timedelta) -> Tree:
    return {TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}


def _write_time(tag: str) -> Write:
    def write(writer: Writer, value: datetime | time) -> Tree:
        tree: Payload = {TAG: tag, "v": value.replace(tzinfo=None).isoformat()}
        if value.tzinfo is not None:
            tree["z"] = _zone_tree(value.tzinfo)
        if value.fold:
            tree["f"] = 1
        return tree

    return write


def _zone_tree(zone: Any) -> Tree:
    kind = type(zone)
    if kind is timezone:
        offset, *name = zone.__getinitargs__()
        return ["fixed", _offset(offset), *name]
    if kind is ZoneInfo and zone.key:
        return ["zone", zone.key]
    if kind.__module__ == "pydantic_core._pydantic_core" and kind.__name__ == "TzInfo":
        return ["pydantic", _offset(zone.utcoffset(None))]
    if kind.__module__ == "pendulum.tz.timezone":
        if kind.__name__ == "Timezone" and zone.key:
            return ["pendulum", zone.key]
        if kind.__name__ == "FixedTimezone":
            return ["pendulum", round(zone.utcoffset(None).total_seconds()), zone.name]
    raise Refused(
        f"its time zone is a {class_name(kind)}, whose rules the log cannot keep; use zoneinfo.ZoneInfo('<name>') or "
        f"datetime.timezone"
    )


def _offset(offset: timedelta) -> list[int]:
    return [offset.days, offset.seconds, offset.microseconds]


def _read_zone(tree: Any) -> tzinfo | None:
    if tree is None:
        return None
    family, *rest = tree
    if family == "fixed":
        return timezone(timedelta(*rest[0]), *rest[1:])
    if family == "zone":
        return ZoneInfo(*rest)
    if family == "pydantic":
        from pydantic_core import TzInfo

        return TzInfo(timedelta(*rest[0]).total_seconds())
    if family == "pendulum":
        from pendulum.tz.timezone import FixedTimezone, Timezone

        return Timezone(*rest) if isinstance(rest[0], str) else FixedTimezone(*rest)
    raise ValueError(f"unknown kind of time zone {family!r}")


def _read_datetime(tree: Payload) -> datetime:
    naive = datetime.fromisoformat(text_of(tree))
    return naive.replace(tzinfo=_read_zone(tree.get("z")), fold=tree.get("f", 0))


def _read_time(tree: Payload) -> time:
    return time.fromisoformat(text_of(tree)).replace(tzinfo=_read_zone(tree.get("z")), fold=tree.get("f", 0))


def _read_pendulum(tree: Payload) -> datetime:
    from pendulum import DateTime

    of = _read_datetime(tree)
    return DateTime(
        of.year,
        of.month,
        of.day,
        of.hour,
        of.minute,
        of.second,
        of.microsecond,
        tzinfo=of.tzinfo,
        fold=of.fold,
    )


def is_pendulum(cls: type) -> bool:
    """Whether a class is pendulum's DateTime; pendulum is not imported for it."""
    return cls.__module__ == "pendulum.datetime" and cls.__name__ == "DateTime"


write_pendulum = _write_time("pendulum")

TIME_WRITERS: dict[type, Write] = {
    datetime: _write_time("datetime"),
    time: _write_time("time"),
    date: _write_date,
    timedelta: _write_timedelta,
}

TIME_READERS: dict[str, Read] = {
    "datetime": _read_datetime,
    "time": _read_time,
    "pendulum": _read_pendulum,
    "date": lambda tree: date.fromisoformat(text_of(tree)),
    "timedelta": lambda tree: timedelta(*tree["v"]),
}
