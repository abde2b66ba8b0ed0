"""What the kinds share: the JSON tree, its tag, and what a kind needs of the one that walks a value."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Protocol

TAG = "!"

Tree = Any
Payload = dict[str, Any]
Read = Callable[[Payload], object]


class Refused(Exception):
    """A value of this kind is not kept, says why, and what to pass instead; the walk adds the path."""


class Writer(Protocol):
    """The one that walks a value, as the kinds see it."""

    def inside(self, value: object, segment: object) -> Tree:
        """The tree of a part of the value, at ``segment`` below the present path."""
        ...

    def leaf(self, tree: Tree, text: str | bytes) -> Tree:
        """The tree of a leaf, or a mask where ``text``, which is what the tree says in other words, holds a secret."""
        ...

    def number(self, tree: Tree, text: str) -> Tree:
        """The tree of a number, or a mask where its text is a secret."""
        ...

    def compare_by_parts(self) -> None:
        """Say that ``==`` of the whole value cannot be true or cannot be asked: a NaN or an array is inside."""
        ...


Write = Callable[[Writer, Any], Tree]


class Attribute(str):
    """A path segment written ``.name``."""

    __slots__ = ()


class Key:
    """A path segment written ``['key']``."""

    __slots__ = ("key",)

    def __init__(self, key: object) -> None:
        self.key = key


def text_of(tree: Payload, member: str = "v") -> str:
    """A member that has to be text, whatever stands in the database."""
    text = tree[member]
    if type(text) is not str:
        raise ValueError(f"its {member!r} is not text")
    return text


def raw_of(tree: Payload) -> bytes:
    """The bytes of a base64 member."""
    return base64.b64decode(text_of(tree), validate=True)


def base64_of(raw: bytes | bytearray) -> str:
    """Bytes as the text of a member."""
    return base64.b64encode(raw).decode("ascii")


def class_name(cls: type) -> str:
    """A class as people know it, for messages."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
