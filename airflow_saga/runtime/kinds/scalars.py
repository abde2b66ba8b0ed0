"""Text, numbers, bytes, tuples and sets, and the built-in values that are best written as their text."""

from __future__ import annotations

import ipaddress
import json
import math
import pathlib
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

from airflow_saga.core.secret import Secret
from airflow_saga.runtime.kinds.tree import (
    TAG,
    Key,
    Payload,
    Read,
    Tree,
    Write,
    Writer,
    base64_of,
    raw_of,
    text_of,
)

# Whoever reads may have the lowest limit on the digits of an int that Python allows (640), whatever the writer had.
PLAIN_INT_BITS = 2048

# A pair of lone surrogates and the character they would form have the same JSON text.
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")

_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
_ADDRESSES = (
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Interface,
    ipaddress.IPv6Interface,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
)


def write_str(writer: Writer, value: str) -> Tree:
    if value.isascii() or not _SURROGATE_PAIR.search(value):
        return writer.leaf(value, value)
    return writer.leaf({TAG: "str", "v": base64_of(value.encode("utf-8", "surrogatepass"))}, value)


def write_int(writer: Writer, value: int) -> Tree:
    if value.bit_length() < PLAIN_INT_BITS:
        return writer.number(value, str(value))
    return {TAG: "int", "v": hex(value)}


def write_float(writer: Writer, value: float) -> Tree:
    if math.isfinite(value):
        return writer.number(value, repr(value))
    if math.isnan(value):
        writer.compare_by_parts()
    return {TAG: "float", "v": repr(value)}


def _write_complex(writer: Writer, value: complex) -> Tree:
    return {TAG: "complex", "v": [write_float(writer, value.real), write_float(writer, value.imag)]}


def _write_bytes(writer: Writer, value: bytes | bytearray) -> Tree:
    return writer.leaf({TAG: type(value).__name__, "v": base64_of(value)}, bytes(value))


def _write_decimal(writer: Writer, value: Decimal) -> Tree:
    if value.is_nan():
        writer.compare_by_parts()
    text = str(value)
    return writer.number({TAG: "decimal", "v": text}, text)


def _write_fraction(writer: Writer, value: Fraction) -> Tree:
    return {TAG: "fraction", "v": [write_int(writer, value.numerator), write_int(writer, value.denominator)]}


def _write_uuid(writer: Writer, value: UUID) -> Tree:
    text = str(value)
    return writer.leaf({TAG: "uuid", "v": text}, text)


def _write_path(writer: Writer, value: pathlib.PurePath) -> Tree:
    text = str(value)
    # Names of files that are not UTF-8 have lone surrogates, which may be pairs.
    kept = text if text.isascii() else {TAG: "str", "v": base64_of(text.encode("utf-8", "surrogatepass"))}
    return writer.leaf({TAG: "path", "c": type(value).__name__, "v": kept}, text)


def _write_address(writer: Writer, value: object) -> Tree:
    text = str(value)
    return writer.leaf({TAG: "ip", "c": type(value).__name__, "v": text}, text)


def _write_range(writer: Writer, value: range) -> Tree:
    return {TAG: "range", "v": [write_int(writer, part) for part in (value.start, value.stop, value.step)]}


def _write_tuple(writer: Writer, value: tuple[Any, ...]) -> Tree:
    return {TAG: "tuple", "v": [writer.inside(item, index) for index, item in enumerate(value)]}


def _write_set(writer: Writer, value: set[Any] | frozenset[Any]) -> Tree:
    # A set has no order of its own; the same set must have the same text.
    return {
        TAG: type(value).__name__,
        "v": sorted((writer.inside(item, Key(item)) for item in value), key=json.dumps),
    }


def _one_of(classes: tuple[type[Any], ...]) -> Read:
    by_name = {cls.__name__: cls for cls in classes}

    def read(tree: Payload) -> object:
        return by_name[text_of(tree, "c")](text_of(tree))

    return read


SCALAR_WRITERS: dict[type, Write] = {
    type(None): lambda writer, value: None,
    bool: lambda writer, value: value,
    str: write_str,
    int: write_int,
    float: write_float,
    complex: _write_complex,
    bytes: _write_bytes,
    bytearray: _write_bytes,
    Decimal: _write_decimal,
    Fraction: _write_fraction,
    UUID: _write_uuid,
    range: _write_range,
    # Its place is no secret, even where it has the same name as one.
    Secret: lambda writer, value: {TAG: "secret", "c": value.conn_id, "v": value.field},
    **dict.fromkeys(_PATHS, _write_path),
    **dict.fromkeys(_ADDRESSES, _write_address),
}

CONTAINER_WRITERS: dict[type, Write] = {tuple: _write_tuple, set: _write_set, frozenset: _write_set}

SCALAR_READERS: dict[str, Read] = {
    "str": lambda tree: raw_of(tree).decode("utf-8", "surrogatepass"),
    "int": lambda tree: int(text_of(tree), 16),
    "float": lambda tree: float(text_of(tree)),
    "complex": lambda tree: complex(*tree["v"]),
    "bytes": raw_of,
    "bytearray": lambda tree: bytearray(raw_of(tree)),
    "decimal": lambda tree: Decimal(text_of(tree)),
    "fraction": lambda tree: Fraction(*tree["v"]),
    "uuid": lambda tree: UUID(text_of(tree)),
    "range": lambda tree: range(*tree["v"]),
    "secret": lambda tree: Secret(text_of(tree, "c"), text_of(tree)),
    "path": _one_of(_PATHS),
    "ip": _one_of(_ADDRESSES),
    "tuple": lambda tree: tuple(tree["v"]),
    "set": lambda tree: set(tree["v"]),
    "frozenset": lambda tree: frozenset(tree["v"]),
    "dict": lambda tree: dict(tree["v"]),
}
