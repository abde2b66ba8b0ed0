"""The kinds of values that the log keeps, beyond plain JSON: how each is written down, and how it is read back.

A value of such a kind becomes one JSON object with the member ``"!"``, its *tag*; a dict that has a key ``"!"`` of its
own, or keys that are not text, is written as a tagged list of pairs, so nothing a user stores can pass for a tag.

Reading is safe against whatever stands in the database:

* A tag is looked up in ``READERS``; there is no pickle, no ``__reduce__``, no call by name.
* Classes are found by module and qualified name, through ``vars`` alone (a module's ``__getattr__`` is not asked), and
  are accepted only as what the tag says: a dataclass, a pydantic model, an enum, a named tuple.
* Their objects are put together attribute by attribute. ``__init__``, ``__new__``, ``__post_init__``, validators,
  properties and ``_missing_`` do not run: the object was valid when it was written, and making it had its effects
  then. What Python itself calls still runs: ``__hash__`` and ``__eq__`` of an object in a set or as a dict key.
* A module that is not loaded is imported, since the undo may read what a body imported late; never a ``__main__``, and
  never one of the standard library, where some act when imported.

Subclasses of the built-in types are refused rather than flattened: an ``OrderedDict`` that came back as a ``dict``, or
a ``pandas.Timestamp`` as a ``datetime``, would be another value.
"""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType

from airflow_saga.core.secret import Secret
from airflow_saga.runtime.kinds.arrays import ARRAY_READERS, is_numpy, write_numpy
from airflow_saga.runtime.kinds.objects import OBJECT_READERS, object_writer
from airflow_saga.runtime.kinds.scalars import CONTAINER_WRITERS, SCALAR_READERS, SCALAR_WRITERS
from airflow_saga.runtime.kinds.times import TIME_READERS, TIME_WRITERS, is_pendulum, write_pendulum
from airflow_saga.runtime.kinds.tree import Read, Refused, Write, class_name

LEAF_WRITERS: dict[type, Write] = SCALAR_WRITERS | TIME_WRITERS
READERS: dict[str, Read] = SCALAR_READERS | TIME_READERS | OBJECT_READERS | ARRAY_READERS

_CALL_IT_FIRST = "a function is not a value; name what it should do, or call it first"
_ADVICE: dict[type, str] = {
    FunctionType: _CALL_IT_FIRST,
    BuiltinFunctionType: _CALL_IT_FIRST,
    MethodType: _CALL_IT_FIRST,
    functools.partial: _CALL_IT_FIRST,
    GeneratorType: "a generator can be read only once; pass a list",
    ModuleType: "a module is not a value",
    memoryview: "a memoryview belongs to another object; pass bytes(...)",
    type: "a class is not a value; pass its name",
}


def class_writer(cls: type) -> Write:
    """How an object is written whose class is none of the built-in leaves, ``dict`` or ``list``.

    :raises Refused: it is not kept; says why, and what to pass instead.
    """
    write = CONTAINER_WRITERS.get(cls) or object_writer(cls)
    if write is None and is_numpy(cls):
        write = write_numpy
    if write is None and is_pendulum(cls):
        write = write_pendulum
    if write is None:
        raise Refused(_why_not(cls))
    return write


def _why_not(cls: type) -> str:
    for kind, advice in _ADVICE.items():
        if kind in cls.__mro__:
            return advice
    name = class_name(cls)
    if hasattr(cls, "read") and hasattr(cls, "close"):
        return f"it is an open file or stream ({name}); pass its path or its content"
    if hasattr(cls, "__await__"):
        return f"it is a {name} that was not awaited"
    if hasattr(cls, "get_secret_value"):
        return f"it is a {name}; pass Secret('<conn_id>') and read it with .reveal() inside the action"
    for base in (*LEAF_WRITERS, *CONTAINER_WRITERS, dict, list):
        if base is not Secret and base in cls.__mro__:
            return f"it is a {name}, which would come back as a {base.__name__}; pass a plain {base.__name__}"
    if hasattr(cls, "__next__"):
        return f"it is an iterator ({name}), which can be read only once; pass a list"
    return f"the log does not keep objects of {name}; pass a dict, a dataclass or a pydantic model instead"
