"""The kinds whose objects are known by their class: enums, named tuples, dataclasses, pydantic models.

An object is its class and its state. It is put together attribute by attribute, and its own code is not called.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from types import MemberDescriptorType
from typing import Any

from airflow_saga.runtime.kinds.classes import (
    class_reference,
    in_class,
    is_dataclass,
    is_enum,
    is_namedtuple,
    is_pydantic,
    read_class,
)
from airflow_saga.runtime.kinds.scalars import write_int
from airflow_saga.runtime.kinds.tree import (
    TAG,
    Attribute,
    Payload,
    Read,
    Refused,
    Tree,
    Write,
    Writer,
    class_name,
    text_of,
)


def object_writer(cls: type) -> Write | None:
    """How objects of a class are written, or None where it is of no kind kept here."""
    if is_enum(cls):
        return _write_enum
    if is_pydantic(cls):
        return _write_pydantic
    if is_pydantic_url(cls):
        return _write_url
    if is_namedtuple(cls):
        return _write_namedtuple
    if is_dataclass(cls):
        return _write_dataclass
    return None


# -- enums and named tuples -------------------------------------------------------------------------------------------


def _write_enum(writer: Writer, value: enum.Enum) -> Tree:
    cls = type(value)
    reference = class_reference(cls)
    name = value._name_
    if name is not None and cls._member_map_.get(name) is value:
        return writer.leaf({TAG: "enum", "c": reference, "v": name}, name)
    if isinstance(value, enum.Flag):
        return {TAG: "enum", "c": reference, "v": write_int(writer, value._value_)}
    raise Refused(f"it is not a member of its class {class_name(cls)}")


def _read_enum(tree: Payload) -> object:
    cls = read_class(tree, is_enum, "an enum")
    name = tree["v"]
    if isinstance(name, str):
        if name not in cls._member_map_:
            raise LookupError(f"{tree['c']} has no member {name} (any more)")
        return cls._member_map_[name]
    if not issubclass(cls, enum.Flag) or type(name) is not int:
        raise LookupError(f"{tree['c']} is not an enum of flags (any more)")
    known = cls._value2member_map_.get(name)
    # Composed by the standard library's own code, not by what the class may have put in its place.
    return enum.Flag._missing_.__func__(cls, name) if known is None else known  # type: ignore[attr-defined]


def _write_namedtuple(writer: Writer, value: tuple[Any, ...]) -> Tree:
    cls: Any = type(value)
    if getattr(value, "__dict__", None):
        raise Refused(f"its class {class_name(cls)} gave it attributes besides the fields of the named tuple")
    if len(cls._fields) != len(value):
        raise Refused(f"it has {len(value)} items, its class {class_name(cls)} has {len(cls._fields)} fields")
    state = dict(zip(cls._fields, value, strict=True))
    return {TAG: "namedtuple", "c": class_reference(cls), "v": _state_tree(writer, state)}


def _read_namedtuple(tree: Payload) -> object:
    cls = read_class(tree, is_namedtuple, "a named tuple")
    state = _state(tree["v"])
    if tuple(state) != cls._fields:
        raise LookupError(
            f"{tree['c']} had the fields {', '.join(state)}, now it has {', '.join(cls._fields)}"
        )
    return tuple.__new__(cls, state.values())


# -- dataclasses ------------------------------------------------------------------------------------------------------


def _write_dataclass(writer: Writer, value: object) -> Tree:
    cls: Any = type(value)
    reference = class_reference(cls)
    if cls.__eq__ is object.__eq__:
        raise Refused(
            f"its class {class_name(cls)} compares by identity (eq=False): no copy of it can be equal"
        )
    state = _attributes(value)
    tree: Payload = {TAG: "dataclass", "c": reference, "v": _state_tree(writer, state)}
    unset = sorted(field.name for field in dataclasses.fields(cls) if field.name not in state)
    if unset:
        writer.compare_by_parts()
        tree["u"] = unset
    return tree


def _read_dataclass(tree: Payload) -> object:
    cls: Any = read_class(tree, is_dataclass, "a dataclass")
    state = _state(tree["v"])
    unset = tree.get("u", ())
    fields = {field.name: field.default for field in dataclasses.fields(cls) if field.name not in unset}
    _add_new_fields(tree, state, fields, dataclasses.MISSING)
    value = object.__new__(cls)
    slots = _slots(cls)
    own = getattr(value, "__dict__", None)
    for name, item in state.items():
        if name in slots:
            slots[name].__set__(value, item)
        elif isinstance(own, dict):
            own[name] = item
        else:
            raise LookupError(f"{tree['c']} has no field {name} (any more)")
    return value


def _attributes(value: object) -> dict[str, Any]:
    cls = type(value)
    state: dict[str, Any] = {}
    for name, slot in _slots(cls).items():
        try:
            state[name] = slot.__get__(value, cls)
        except AttributeError:
            continue
    for name, item in getattr(value, "__dict__", {}).items():
        # What Python itself notes down on an object is no part of the value.
        if name != "__orig_class__" and not isinstance(in_class(cls, name), functools.cached_property):
            state[name] = item
    return state


def _slots(cls: type) -> dict[str, MemberDescriptorType]:
    return {
        name: member
        for base in reversed(cls.__mro__)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    }


# -- pydantic ---------------------------------------------------------------------------------------------------------


def _write_pydantic(writer: Writer, value: Any) -> Tree:
    from pydantic import BaseModel

    cls = type(value)
    tree: Payload = {TAG: "pydantic", "c": class_reference(cls)}
    state = BaseModel.__getstate__(value)
    own = {
        name: item
        for name, item in state["__dict__"].items()
        if not isinstance(in_class(cls, name), functools.cached_property)
    }
    tree["v"] = _state_tree(writer, own)
    tree["s"] = sorted(state["__pydantic_fields_set__"])
    for member, part in (("x", state["__pydantic_extra__"]), ("p", state["__pydantic_private__"])):
        if part is not None:
            tree[member] = _state_tree(writer, part)
    return tree


def _read_pydantic(tree: Payload) -> object:
    from pydantic import BaseModel
    from pydantic_core import PydanticUndefined

    cls = read_class(tree, is_pydantic, "a pydantic model")
    state = _state(tree["v"])
    fields = {
        name: PydanticUndefined if field.default_factory is not None else field.default
        for name, field in cls.__pydantic_fields__.items()
    }
    _add_new_fields(tree, state, fields, PydanticUndefined)
    value = object.__new__(cls)
    BaseModel.__setstate__(
        value,
        {
            "__dict__": state,
            "__pydantic_fields_set__": set(tree["s"]),
            "__pydantic_extra__": _state(tree["x"]) if "x" in tree else None,
            "__pydantic_private__": _state(tree["p"]) if "p" in tree else None,
        },
    )
    return value


def is_pydantic_url(cls: type) -> bool:
    """Whether a class is one of pydantic's own URL types (HttpUrl …), which models give to their fields."""
    networks = sys.modules.get("pydantic.networks")
    bases = (vars(networks).get("_BaseUrl"), vars(networks).get("_BaseMultiHostUrl")) if networks else ()
    return cls.__module__ == "pydantic.networks" and any(base in cls.__mro__ for base in bases)


def _write_url(writer: Writer, value: Any) -> Tree:
    text = str(value)
    return writer.leaf({TAG: "url", "c": class_reference(type(value)), "v": text}, text)


def _read_url(tree: Payload) -> object:
    import pydantic_core

    cls = read_class(tree, is_pydantic_url, "a URL type of pydantic")
    is_one_host = any(base.__name__ == "_BaseUrl" for base in cls.__mro__)
    value = object.__new__(cls)
    value._url = (pydantic_core.Url if is_one_host else pydantic_core.MultiHostUrl)(text_of(tree))
    return value


# -- state ------------------------------------------------------------------------------------------------------------


def _state_tree(writer: Writer, state: dict[str, Any]) -> Tree:
    # Pairs, not an object: a name must not pass for a tag.
    return [[str(name), writer.inside(item, Attribute(name))] for name, item in state.items()]


def _state(pairs: Any) -> dict[str, Any]:
    state = dict(pairs)
    if not all(type(name) is str for name in state):
        raise ValueError("the names of fields are not text")
    return state


def _add_new_fields(tree: Payload, state: dict[str, Any], fields: dict[str, Any], missing: object) -> None:
    """Give a stored state the defaults of fields that its class has got since; ``fields`` are all, with defaults."""
    new = [name for name in fields if name not in state]
    gone = [name for name in state if name not in fields]
    if new and gone:
        # A default in the place of a renamed field would be another value: a refund of 0, say.
        raise LookupError(
            f"{tree['c']} had {', '.join(gone)}, now it has {', '.join(new)}; was a field renamed?"
        )
    for name in new:
        if fields[name] is missing:
            raise LookupError(f"{tree['c']} has a new field {name} without a default")
        state[name] = fields[name]


OBJECT_READERS: dict[str, Read] = {
    "enum": _read_enum,
    "namedtuple": _read_namedtuple,
    "dataclass": _read_dataclass,
    "pydantic": _read_pydantic,
    "url": _read_url,
}
