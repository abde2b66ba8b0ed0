"""The walk through one value that makes its JSON tree: where it is, how deep, how much, and what is masked."""

from __future__ import annotations

from typing import Any, Never

from airflow_saga.core.errors import ParamsNotKeptError, ValueNotKeptError, ValueTooLargeError
from airflow_saga.runtime.kinds import LEAF_WRITERS, class_writer
from airflow_saga.runtime.kinds.compact import dumps
from airflow_saga.runtime.kinds.scalars import PLAIN_INT_BITS
from airflow_saga.runtime.kinds.tree import TAG, Attribute, Key, Refused, Tree
from airflow_saga.runtime.secrecy import MASK, SecretPattern, key_segment

MAX_DEPTH = 100

_PLAIN_ATOMS = frozenset({str, bool, float, type(None)})
_PLAIN_INT = 1 << (PLAIN_INT_BITS - 1)
_INFINITY = float("inf")
NOT_PLAIN = -1
_NO_SECRETS = SecretPattern(())
_CONTAINERS = (dict, list, tuple, set, frozenset)


def plain_items(value: object, max_items: int, max_depth: int = MAX_DEPTH) -> int:
    """How many items a value has that is JSON as it stands; ``NOT_PLAIN`` for any other.

    Plain means: exact types, text keys, no tag, finite, not too deep. Counting ends above ``max_items``.
    """
    count = 1
    level: list[Any] = [(value,)]
    for _ in range(max_depth + 1):
        below: list[Any] = []
        for node in level:
            items: Any = node
            if type(node) is dict:
                if TAG in node:
                    return NOT_PLAIN
                for key in node:
                    if type(key) is not str:
                        return NOT_PLAIN
                items = node.values()
            for item in items:
                kind = type(item)
                if kind in _PLAIN_ATOMS:
                    if kind is float and not -_INFINITY < item < _INFINITY:
                        return NOT_PLAIN
                elif kind is dict or kind is list:
                    count += len(item)
                    below.append(item)
                elif kind is not int or not -_PLAIN_INT < item < _PLAIN_INT:
                    return NOT_PLAIN
            if count > max_items:
                return count
        if not below:
            return count
        level = below
    return NOT_PLAIN


def contains_itself(value: object) -> bool:
    """Whether a value of dicts and lists contains itself; each of them is looked into once, however often it stands."""
    done: set[int] = set()
    above: set[int] = set()
    to_see: list[tuple[object, bool]] = [(value, False)]
    while to_see:
        node, is_left = to_see.pop()
        if is_left:
            above.discard(id(node))
            done.add(id(node))
        elif id(node) in above:
            return True
        elif id(node) not in done and (type(node) is dict or type(node) is list):
            above.add(id(node))
            to_see.append((node, True))
            to_see.extend((item, False) for item in (node.values() if type(node) is dict else node))
    return False


class Walk:
    """Walks one value and gives its JSON tree; knows the path it is at.

    :param secrets: never shown in a path.
    :param is_masking: leaves that hold a secret become ``***``, and their paths are noted.
    """

    def __init__(
        self, where: str, max_bytes: int, secrets: SecretPattern | None, *, is_masking: bool = False
    ) -> None:
        self.where = where
        self.max_bytes = max_bytes
        self._secrets = secrets or _NO_SECRETS
        self._is_masking = is_masking
        self.masked: list[str] = []
        self.opaque: list[str | bytes] = []
        self.has_unequal_parts = False
        self._segments: list[object] = []
        self._above: set[int] = set()
        self._items = 0
        self._look_closely = is_masking

    def text(self, value: object) -> str:
        text = dumps(self._tree(value))
        if "\\ud" in text and not self._look_closely:
            # There is a character of two escapes somewhere: look at each text whether it is really one character.
            self._look_closely = True
            self.opaque.clear()
            self._items = 0
            text = dumps(self._tree(value))
        if len(text) > self.max_bytes:
            raise too_large(self.where, len(text), self.max_bytes)
        return text

    def inside(self, value: object, segment: object) -> Tree:
        self._segments.append(segment)
        tree = self._tree(value)
        self._segments.pop()
        return tree

    def leaf(self, tree: Tree, text: str | bytes) -> Tree:
        if self._is_masking:
            return self._mask() if self._secrets.is_in(text) else tree
        if tree is not text:
            self.opaque.append(text)
        return tree

    def number(self, tree: Tree, text: str) -> Tree:
        return self._mask() if self._is_masking and self._secrets.equals(text) else tree

    def compare_by_parts(self) -> None:
        self.has_unequal_parts = True

    def refuse(self, reason: str) -> Never:
        raise not_kept(self.path(), reason, self.where)

    def path(self) -> str:
        path = self.where
        for segment in self._segments:
            if isinstance(segment, Attribute):
                path += f".{segment}"
            elif isinstance(segment, Key):
                path += self._key(segment.key, is_parameter=path == "params")
            else:
                path += f"[{segment}]"
        return path

    def _key(self, key: object, is_parameter: bool) -> str:
        if is_parameter and isinstance(key, str) and key.isidentifier() and len(key) < 40:
            return f".{self._secrets.scrub(key)}"
        return key_segment(key, self._secrets)

    def _mask(self) -> str:
        self.masked.append(self.path())
        return MASK

    def _tree(self, value: object) -> Tree:
        kind = type(value)
        if kind is str and not self._look_closely:
            return value
        write = LEAF_WRITERS.get(kind)
        try:
            if write is not None:
                return write(self, value)
            if (kind is dict or kind is list) and not self._look_closely:
                items = plain_items(value, self.max_bytes, MAX_DEPTH - len(self._above))
                if items > self.max_bytes:
                    raise too_many(value, self.where, items, self.max_bytes)
                if items != NOT_PLAIN:
                    self._items += items
                    return value
            return self._container(value, kind)
        except Refused as refusal:
            self.refuse(str(refusal))

    def _container(self, value: Any, kind: type) -> Tree:
        if id(value) in self._above:
            self.refuse("it contains itself")
        if len(self._above) > MAX_DEPTH:
            self.refuse(f"it is nested deeper than {MAX_DEPTH} levels")
        self._items += len(value) if kind in _CONTAINERS else 1
        if self._items > self.max_bytes:
            raise too_many(value, self.where, self._items, self.max_bytes)
        self._above.add(id(value))
        masked_before = len(self.masked)
        if kind is dict:
            tree = self._dict(value)
        elif kind is list:
            tree = [self.inside(item, index) for index, item in enumerate(value)]
        else:
            tree = class_writer(kind)(self, value)
        self._above.discard(id(value))
        if (
            self._is_masking
            and len(self.masked) == masked_before
            and self._secrets.is_structure_in(dumps(tree))
        ):
            # A secret that is a document: none of its parts need be secret alone.
            return self._mask()
        return tree

    def _dict(self, value: dict[Any, Any]) -> Tree:
        pairs = []
        taken = {key for key in value if type(key) is str}
        for key, item in value.items():
            segment = Key(key)
            key_tree = key if type(key) is str and not self._look_closely else self.inside(key, segment)
            if self._is_masking and key_tree == MASK and key != MASK:
                key_tree = segment.key = _free_mask(taken)
                taken.add(key_tree)
            pairs.append([key_tree, self.inside(item, segment)])
        if all(type(key) is str and key != TAG for key, _ in pairs):
            return dict(pairs)
        return {TAG: "dict", "v": pairs}


def _free_mask(taken: set[str]) -> str:
    """A name for a masked key: two of them must not become one entry."""
    names = (MASK if number == 1 else f"{MASK}{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def not_kept(path: str, reason: str, where: str) -> ValueNotKeptError:
    """The error of a value that is not kept; parameters have their own."""
    return (ParamsNotKeptError if where == "params" else ValueNotKeptError)(path, reason)


def too_large(where: str, size_bytes: int, max_bytes: int) -> ValueNotKeptError:
    """The error of a value that is too large; parameters are refused like others that are not kept."""
    error = ValueTooLargeError(size_bytes, max_bytes, where)
    return ParamsNotKeptError(where, error.reason) if where == "params" else error


def too_many(value: object, where: str, items: int, max_bytes: int) -> ValueNotKeptError:
    """The error of a value with more items than it may have bytes; one that contains itself has endlessly many."""
    if contains_itself(value):
        return not_kept(where, "it contains itself", where)
    return too_large(where, items, max_bytes)
