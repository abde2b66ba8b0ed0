"""How values are kept in the log: as JSON text that comes back equal, or not at all.

*Equal* means the same type and ``==`` (or both NaN) at every depth; aware times keep zone and fold. A value that would
come back changed is refused before it is written, with its path and the reason. That is not believed but proved at
each write of a value that is not plain JSON: the text is read back, written again (types and state must give the same
text), and compared.

The text is pure ASCII, so NUL and lone surrogates, which Postgres refuses in ``text`` and ``jsonb``, are ordinary
escapes. ``kinds`` says what becomes of each kind of value. Plain JSON, nearly all there is, takes a short way through
C code: one walk that looks at exact types, then ``json``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import marshal
from typing import Any, NamedTuple

from airflow_saga.core.errors import SecretInParamsError, ValueNotKeptError, ValueNotReadableError
from airflow_saga.runtime.kinds import READERS
from airflow_saga.runtime.kinds.compact import dumps, dumps_sorted
from airflow_saga.runtime.kinds.readings import canonical, for_people
from airflow_saga.runtime.kinds.tree import TAG, Payload
from airflow_saga.runtime.kinds.walk import NOT_PLAIN, Walk, not_kept, plain_items, too_large, too_many
from airflow_saga.runtime.secrecy import MASK, SecretPattern

MAX_VALUE_BYTES = 8 * 1024 * 1024

_WITHOUT_REFERENCES = 2
"""The version of ``marshal`` whose bytes tell values of exact types apart, and do not show which parts are shared."""
_HAS_TAG = f'"{TAG}"'
_quoted = functools.lru_cache(maxsize=256)(dumps)
_read = json.JSONDecoder().raw_decode


def encode(
    value: object,
    *,
    secrets: SecretPattern | None = None,
    where: str = "params",
    max_bytes: int = MAX_VALUE_BYTES,
) -> str:
    """The text of a value, for parameters: kept exactly and without a secret, or refused before the call.

    :param secrets: the values that must not be stored.
    :param where: what the value is, for messages; a path begins with it.
    :param max_bytes: of the text.
    :raises ParamsNotKeptError: the value would come back changed, or is too large (``ValueNotKeptError`` and
        ``ValueTooLargeError`` where ``where`` is not ``params``). An Airflow retry is refused again.
    :raises SecretInParamsError: a known secret is inside; names its path. An Airflow retry is refused again.
    """
    text, opaque = _proved(value, where, max_bytes, secrets)
    if secrets and secrets.may_be_in(text, opaque):
        paths = _masked(value, where, max_bytes, secrets)[1]
        if paths:
            raise SecretInParamsError(paths[0])
    return text


def encode_masked(
    value: object, secrets: SecretPattern | None, *, where: str = "result", max_bytes: int = MAX_VALUE_BYTES
) -> tuple[str, list[str]]:
    """The text of a value, for results and outputs: each leaf that holds a secret is stored as ``***``.

    :returns: the text, and the paths of the masked leaves (empty: the value comes back equal).
    :raises ValueNotKeptError: the value would come back changed in another way.
    :raises ValueTooLargeError: the text has more than ``max_bytes``.
    """
    text, opaque = _proved(value, where, max_bytes, secrets)
    if secrets and secrets.may_be_in(text, opaque):
        masked, paths = _masked(value, where, max_bytes, secrets)
        if paths:
            return masked, paths
    return text, []


def plain_text(value: object, max_bytes: int = MAX_VALUE_BYTES) -> str | None:
    """The text of a value that is plain JSON as it stands, or None: what :func:`encode` would give, unless it refused.

    None too for what may be a pair of lone surrogates. Not searched for secrets: compare it with what is stored, do
    not store it.
    """
    items = plain_items(value, max_bytes)
    if items == NOT_PLAIN or items > max_bytes:
        return None
    text = dumps(value)
    return None if "\\ud" in text else text


def is_plainly(text: str, value: Any) -> bool:
    """Whether a stored text says exactly this value: the same types, the same order.

    Quicker than writing the value anew. False may also mean that it takes a closer look, as for all that is not plain
    JSON.
    """
    if _HAS_TAG in text:
        return False
    try:
        return marshal.dumps(value, _WITHOUT_REFERENCES) == marshal.dumps(_loads(text), _WITHOUT_REFERENCES)
    except ValueError:  # something in it is no plain value
        return False


def decode(text: str) -> Any:
    """The value of a text.

    :raises ValueNotReadableError: a class it needs is gone or of another kind now, or the text was not written by
        ``encode``; nothing of the stored text is executed. An Airflow retry fails alike.
    """
    try:
        if _HAS_TAG not in text:
            return _loads(text)
        return json.loads(text, object_hook=_untagged)
    except (ValueError, RecursionError) as error:
        raise ValueNotReadableError(f"a stored value is damaged and cannot be read: {error}") from error


def fingerprint(name: str, version: int, encoded_params: str, params: object = None) -> str:
    """What a call is recognised by when a step is resumed: equal calls have equal fingerprints, in every process.

    The order of dicts and sets plays no part, nor does the writing of equal numbers (``-0.0``, ``Decimal('1.50')``);
    the types do.

    :param params: what the text was made of, where it is at hand: it need not be read again.
    :returns: 32 hexadecimal digits.
    """
    call = f"{_quoted(name)}:{version}:{_canonical_text(encoded_params, params)}"
    return hashlib.sha256(call.encode("ascii")).hexdigest()[:32]


def readable(text: str) -> Any:
    """A stored value for people, as plain JSON: no class is looked up, so it can be shown where they are not at hand.

    Masks nothing; what is shown to people goes through ``mask_for_display`` afterwards.

    :raises ValueNotReadableError: the text was not written by ``encode``.
    """
    try:
        return json.loads(text, object_hook=for_people)
    except Exception as error:
        raise ValueNotReadableError(f"a stored value is damaged and cannot be shown: {error!r}") from error


# -- writing ----------------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    text: str
    opaque: list[str | bytes]


_NOTHING_OPAQUE: list[str | bytes] = []


def _proved(value: object, where: str, max_bytes: int, secrets: SecretPattern | None) -> _Kept:
    walk = None
    try:
        text = _plain_text(value, where, max_bytes)
        if text is not None:
            return _Kept(text, _NOTHING_OPAQUE)
        walk = Walk(where, max_bytes, secrets)
        text = walk.text(value)
        _prove(value, text, walk, secrets)
        return _Kept(text, walk.opaque)
    except ValueNotKeptError:
        raise
    except Exception as error:
        # Whatever an object does when it is looked at, or another thread to it meanwhile: nothing is half written.
        path = walk.path() if walk else where
        raise not_kept(path, f"it cannot be written: {_told(error, secrets)}", where) from error


def _plain_text(value: object, where: str, max_bytes: int) -> str | None:
    """The text of plain JSON, or None for any other value."""
    items = plain_items(value, max_bytes)
    if items == NOT_PLAIN:
        return None
    if items > max_bytes:
        raise too_many(value, where, items, max_bytes)
    text = dumps(value)
    if "\\ud" in text and _loads(text) != value:
        # A pair of lone surrogates, which JSON reads as one character.
        return None
    if len(text) > max_bytes:
        raise too_large(where, len(text), max_bytes)
    return text


def _prove(value: object, text: str, walk: Walk, secrets: SecretPattern | None) -> None:
    where = walk.where
    try:
        back = decode(text)
    except ValueNotReadableError as error:
        raise not_kept(where, f"it could be written, but not be read back: {error}", where) from error
    if Walk(where, walk.max_bytes, secrets).text(back) != text:
        raise not_kept(where, "it comes back changed from the log", where)
    if walk.has_unequal_parts:
        return
    try:
        is_equal = (back == value) is True
    except Exception as error:
        raise not_kept(
            where, f"it cannot be compared with what comes back: {_told(error, secrets)}", where
        ) from error
    if not is_equal:
        reason = "it comes back the same in each part, but the == of a class in it says that it is not equal"
        raise not_kept(where, reason, where)


def _told(error: Exception, secrets: SecretPattern | None) -> str:
    text = f"{type(error).__name__}: {error}"
    return (secrets.scrub(text) if secrets else text)[:200]


def _masked(value: object, where: str, max_bytes: int, secrets: SecretPattern) -> tuple[str, list[str]]:
    walk = Walk(where, max_bytes, secrets, is_masking=True)
    text = walk.text(value)
    try:
        decode(text)
    except ValueNotReadableError:
        # A class that cannot live with a masked part (its hash, in a set): nothing of the value is kept.
        return dumps(MASK), walk.masked
    return text, walk.masked


# -- reading ----------------------------------------------------------------------------------------------------------


def _loads(text: str) -> Any:
    """``json.loads`` of a text that has no blanks around it, without looking for them."""
    value, end = _read(text)
    if end != len(text):
        raise ValueError(f"something stands behind its end, at {end}")
    return value


def _untagged(node: Payload) -> Any:
    if TAG not in node:
        return node
    try:
        return READERS[node[TAG]](node)
    except ValueNotReadableError:
        raise
    except Exception as error:
        kept = node.get("c") if isinstance(node.get("c"), str) else node[TAG]
        reason = error if isinstance(error, LookupError) and not isinstance(error, KeyError) else repr(error)
        raise ValueNotReadableError(f"a stored {kept} cannot be read: {reason}") from error


def _canonical_text(encoded: str, value: object = None) -> str:
    if _HAS_TAG in encoded or "-0.0" in encoded:
        return dumps_sorted(canonical(json.loads(encoded)))
    return dumps_sorted(_loads(encoded) if value is None else value)
