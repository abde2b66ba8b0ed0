"""Values for the codec tests: strategies for everything the log keeps, and what *equal* means, said a second time."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import pathlib
import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy
import pendulum
import pydantic
from hypothesis import strategies as st

from airflow_saga.core.secret import Secret
from tests.runtime.kept_classes import (
    Cabin,
    Customer,
    Extras,
    Leg,
    Money,
    Passenger,
    Rights,
    Seat,
    Status,
    Trip,
    Weekday,
)

ZONES = [
    None,
    UTC,
    timezone(timedelta(hours=-3, minutes=-30)),
    timezone(timedelta(hours=1), "CET"),
    ZoneInfo("Europe/Paris"),
    ZoneInfo("America/St_Johns"),
]

# NUL, both halves of surrogate pairs side by side, the tag, and characters beyond the first plane.
texts = st.one_of(
    st.text(max_size=8),
    st.text(st.sampled_from('a!"\\\x00é€😀\ud83d\ude00\udcff'), max_size=6),
)
times_of_day = st.times(timezones=st.sampled_from(ZONES))
datetimes = st.builds(
    lambda naive, zone, fold: naive.replace(tzinfo=zone, fold=fold),
    st.one_of(st.datetimes(), st.just(datetime(2026, 10, 25, 2, 30)), st.just(datetime(2026, 3, 29, 2, 30))),  # noqa: DTZ001
    st.sampled_from(ZONES),
    st.integers(0, 1),
)
integers = st.one_of(st.integers(), st.integers(-(10**700), 10**700), st.sampled_from([2**2048, -(2**5000)]))

hashable_leaves = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    st.floats(),
    texts,
    st.binary(max_size=8),
    st.decimals(),
    st.fractions(),
    st.complex_numbers(),
    st.uuids(),
    datetimes,
    times_of_day,
    st.dates(),
    st.timedeltas(),
    st.ip_addresses(),
    st.builds(range, st.integers(-5, 5), st.integers(), st.integers(1, 3)),
    st.sampled_from(
        [*Weekday, *Status, Cabin.ECONOMY, Extras.MEAL | Extras.SEAT, Extras(0), Rights(6), Rights(9)]
    ),
    st.builds(pathlib.PurePosixPath, texts.filter(lambda text: "\0" not in text)),
    st.builds(pathlib.PureWindowsPath, st.just(r"C:\a\b")),
    st.builds(Seat, st.integers(), st.text(max_size=1)),
    st.builds(Money, st.decimals(allow_nan=False)),
    st.builds(Secret, st.text(min_size=1, max_size=5), st.sampled_from(["password", "extra.key"])),
).filter(lambda value: not (isinstance(value, Decimal) and value.is_snan()))
leaves = st.one_of(
    hashable_leaves,
    st.decimals(),
    st.builds(bytearray, st.binary(max_size=8)),
    st.sampled_from([ipaddress.ip_interface("10.0.0.1/8"), ipaddress.ip_network("::/64"), Cabin.BUSINESS]),
)
keys: st.SearchStrategy[Any] = st.deferred(
    lambda: st.recursive(
        hashable_leaves,
        lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
        max_leaves=4,
    )
)


def _inside(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        st.builds(Leg, inner, inner, inner),
        st.builds(_passenger, inner, inner),
        st.builds(lambda a, b: Trip([a], b, {}), inner, inner),
        st.builds(_customer, inner, inner),
    )


def _passenger(name: object, seen: object) -> Passenger:
    passenger = Passenger("x", 1, [seen])
    passenger.name = name  # type: ignore[assignment]
    return passenger


def _customer(name: object, extra: object) -> Customer:
    return Customer.model_construct(name=name, address=None, nickname=extra)


# Deferred: a strategy of this size should not be spelled out in messages.
values: st.SearchStrategy[Any] = st.deferred(lambda: st.recursive(leaves, _inside, max_leaves=12))

# What could be taken for a tag: dicts with its key, and the texts of real tags as plain data.
tag_like = st.recursive(
    st.sampled_from(["tuple", "bytes", "dict", "secret", "AAAA", "os:system", 1, None]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["!", "v", "c", "u", "s", "x"]), inner, max_size=4)
        | st.lists(inner, max_size=2).map(tuple)
    ),
    max_leaves=10,
)


def same(one: Any, other: Any) -> bool:
    """Same type and ``==``, or both NaN, at every depth; sign of zero, zone, fold and order of dicts included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, Decimal):
        return str(one) == str(other)
    if isinstance(one, datetime | time):
        return (
            one.replace(tzinfo=None) == other.replace(tzinfo=None)
            and one.fold == other.fold
            and type(one.tzinfo) is type(other.tzinfo)
            and str(one.tzinfo) == str(other.tzinfo)
        )
    if isinstance(one, numpy.ndarray | numpy.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(pair, other_pair) for pair, other_pair in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and all(any(same(item, item2) for item2 in other) for item in one)
    if isinstance(one, pydantic.BaseModel):
        return same(one.__getstate__(), other.__getstate__())
    if dataclasses.is_dataclass(one) and not hasattr(one, "__slots__"):
        return same(*({**vars(each), "__orig_class__": None} for each in (one, other)))
    if dataclasses.is_dataclass(one):
        return all(
            same(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)
        )
    return bool(one == other)


# The second half past two of that night.
PARIS = datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Paris"))

EXAMPLES: list[Any] = [
    {Status.BOOKED: 1},
    {"a": {Status.BOOKED: [Weekday.MONDAY]}, Weekday.TUESDAY: 2},
    pathlib.PurePosixPath("/\ud83d\ude00/\udcff"),
    {"t": "a\x00b", "s": "\ud800", "b": b"\xff\x00"},
    Decimal("12345678901234567.89"),
    Decimal("sNaN7"),
    PARIS,
    pendulum.datetime(2026, 10, 25, 2, 30, tz="Europe/Paris"),
    pendulum.DateTime(2026, 1, 2, tzinfo=ZoneInfo("Asia/Tokyo")),
    pendulum.DateTime(2026, 1, 2, tzinfo=pendulum.FixedTimezone(5400)),
    pendulum.naive(2026, 1, 2),
    uuid.UUID("6b1e7c9e-4d4c-4d0b-9f7b-2b1a8d3e5f60"),
    2**70,
    float("nan"),
    float("-inf"),
    -0.0,
    date(2026, 11, 30),
    numpy.float32(1.5),
    numpy.int64(-3),
    numpy.bool_(True),
    numpy.str_("a\x00b"),
    numpy.datetime64("NaT"),
    numpy.datetime64("2026-11-30T01:02", "ms"),
    numpy.array([[1.5, float("nan")], [float("inf"), -0.0]]),
    numpy.array(7),
    numpy.array([], dtype=">i2"),
    numpy.zeros((0, 3)),
    numpy.asfortranarray(numpy.arange(6).reshape(2, 3)),
    numpy.array(["ab", "c"]),
    numpy.array([b"ab", b"c"]),
    numpy.array([True, False]),
    numpy.arange(4, dtype="complex64"),
    numpy.arange(8)[::2],
]
