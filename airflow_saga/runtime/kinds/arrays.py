"""numpy scalars and arrays: dtype, shape, and the bytes in C order."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

from airflow_saga.runtime.kinds.tree import (
    TAG,
    Payload,
    Read,
    Refused,
    Tree,
    Writer,
    base64_of,
    raw_of,
    text_of,
)

# Numbers, text, bytes and times of one size; no objects, no records.
_DTYPE = re.compile(r"[<>|=][biufcSUmM]\d+(\[[^\]]{1,20}\])?")


def is_numpy(cls: type) -> bool:
    """Whether a class is numpy's array or one of its scalars; numpy is not imported for it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and (
        cls is numpy.ndarray or (cls.__module__ == "numpy" and numpy.generic in cls.__mro__)
    )


def write_numpy(writer: Writer, value: Any) -> Tree:
    writer.compare_by_parts()
    dtype = value.dtype
    if not _DTYPE.fullmatch(dtype.str) or dtype.metadata:
        raise Refused(f"arrays of {dtype} are not kept; pass .tolist()")
    raw = value.tobytes()
    tree: Payload = {TAG: "numpy", "t": dtype.str, "v": base64_of(raw)}
    if type(value).__name__ == "ndarray":
        tree["s"] = list(value.shape)
    return writer.leaf(tree, "\n".join(value.ravel().tolist()) if dtype.kind == "U" else raw)


def _read_numpy(tree: Payload) -> object:
    import numpy

    dtype, shape, raw = text_of(tree, "t"), tree.get("s", []), raw_of(tree)
    if not _DTYPE.fullmatch(dtype) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"no array of {dtype!r} and shape {shape!r} is ever stored")
    kind = numpy.dtype(dtype)
    if len(raw) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{len(raw)} bytes are no array of {dtype!r} and shape {shape!r}")
    array = (
        numpy.ndarray(tuple(shape), dtype=kind, buffer=bytearray(raw))
        if raw
        else numpy.zeros(shape, dtype=kind)
    )
    return array if "s" in tree else array[()]


ARRAY_READERS: dict[str, Read] = {"numpy": _read_numpy}
