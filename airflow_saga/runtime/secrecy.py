"""Known secrets never reach the log, and sensitive names are not shown.

Two rules that must not be mixed up:

* What is *stored* is searched for the values that Airflow's masker knows, in text and bytes, at every depth, in dict
  keys too, and in the disguises a value takes on its way (JSON-escaped, URL-quoted, base64 as in a Basic header).
  A key's name plays no part: ``{"token": 3}`` is kept as it is, or the undo would get another value than the call.
* What is *shown* (log, XCom, tab, CLI) is masked by key name as well, as Airflow does it; nothing shown is read back.

Which values are secret is asked for anew each time, since a task learns secrets while it runs; the compiled pattern
is built again only when the set has changed.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import quote, quote_plus

from airflow_saga.core.secret import Secret

MASK = "***"

# Airflow's own rules, see SecretsMasker.add_mask: [logging] min_length_masked_secret, SECRETS_TO_SKIP_MASKING.
MIN_SECRET_LENGTH = 5
_NEVER_SECRET = frozenset({"airflow"})

# As Airflow's DEFAULT_SENSITIVE_FIELDS; the Airflow layer passes its configured list instead.
SENSITIVE_NAMES = frozenset(
    {
        "access_key",
        "access_token",
        "api_key",
        "apikey",
        "auth_header",
        "authorization",
        "bearer",
        "connection_string",
        "dsn",
        "keyfile_dict",
        "passphrase",
        "passwd",
        "password",
        "private_key",
        "proxy",
        "proxies",
        "secret",
        "service_account",
        "service_key",
        "token",
        "webhook_url",
    }
)

_DISPLAY_DEPTH = 100
_BASE64_RUN = re.compile("[A-Za-z0-9+/_=-]{6,}")
# What a terminal obeys, what UTF-8 has no bytes for, and NUL, which Postgres refuses.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

SecretSource = Callable[[], Iterable[str]]


class SecretPattern:
    """The known secrets, ready to be searched for.

    :param values: the secrets in plain text; those shorter than ``min_length`` characters, and the word ``airflow``,
        are left out, as Airflow leaves them out.
    :param min_length: in characters.
    """

    def __init__(self, values: Iterable[str], *, min_length: int = MIN_SECRET_LENGTH) -> None:
        self._min_length = max(min_length, 1)
        self._values = frozenset(secret for value in values for secret in self._worth_hiding(value))
        encoded = {form for value in self._values for form in _base64_forms(value)}
        text_forms = {form for value in self._values for form in _text_forms(value)}
        self._encoded_forms = tuple(sorted(encoded - text_forms))
        self._text_forms = tuple(sorted(text_forms | encoded))
        self._byte_forms = tuple(form.encode("utf-8", "surrogatepass") for form in self._text_forms)
        self._json_forms = tuple(sorted({json.dumps(form)[1:-1] for form in self._text_forms}))
        # A secret that is itself a JSON document (a connection's extra) may come back as the dict it stands for.
        self._structures = tuple(sorted({form for value in self._values for form in _json_structures(value)}))
        self._shortest = min(map(len, (*self._json_forms, *self._structures)), default=0)

    def __bool__(self) -> bool:
        return bool(self._values)

    def __repr__(self) -> str:
        return f"<SecretPattern of {len(self._values)} values>"

    def may_be_in(self, encoded: str, opaque: Iterable[str | bytes] = ()) -> bool:
        """Whether an encoded value may hold a secret: cheap, never wrong when it says no.

        :param encoded: ASCII JSON text.
        :param opaque: those parts of the value that the text holds in another writing.
        """
        if len(encoded) >= self._shortest:
            for form in self._json_forms:
                if form in encoded:
                    return True
            for structure in self._structures:
                if structure in encoded:
                    return True
        return any(self.is_in(part) for part in opaque)

    def is_in(self, part: str | bytes) -> bool:
        """Whether a text or bytes holds a secret."""
        if isinstance(part, str):
            return any(form in part for form in self._text_forms)
        return any(form in part for form in self._byte_forms)

    def equals(self, text: str) -> bool:
        """Whether a secret is exactly this text: the rule for numbers, where a part of the digits means nothing."""
        return text in self._values

    def is_structure_in(self, encoded: str) -> bool:
        """Whether compact JSON text holds the document that a secret stands for."""
        return any(structure in encoded for structure in self._structures)

    def find(self, value: object, where: str = "value") -> str | None:
        """The path of the first secret inside a value of any kind, or None; the path never shows the secret."""
        if not self:
            return None
        for path, part in _parts(value, where, self, 0, set()):
            if self.equals(part) if isinstance(part, _Digits) else self.is_in(part):
                return path
        return None

    def scrub(self, text: str) -> str:
        """The text with each known secret replaced by ``***``; do it before a text is cut, or a part may stay."""
        if not self or not self.is_in(text):
            return text
        # Base64 of a longer text: the characters next to the match hold bits of the secret too.
        text = _BASE64_RUN.sub(
            lambda run: MASK if any(form in run[0] for form in self._encoded_forms) else run[0], text
        )
        return self._replacer.sub(MASK, text)

    @cached_property
    def _replacer(self) -> re.Pattern[str]:
        return re.compile(
            "|".join(re.escape(form) for form in sorted(self._text_forms, key=len, reverse=True))
        )

    def _worth_hiding(self, value: str) -> Iterator[str]:
        if len(value) >= self._min_length and value.lower() not in _NEVER_SECRET:
            yield value
            for inner in _sensitive_leaves(value):
                if len(inner) >= self._min_length and inner.lower() not in _NEVER_SECRET:
                    yield inner


class KnownSecrets:
    """The pattern of the secrets known right now.

    :param source: gives the secrets; asked at each ``pattern()``, so it should be cheap.
    :param escaped: the source gives them escaped for a regular expression, as Airflow's masker holds them.
    :param min_length: in characters, as in Airflow's ``[logging] min_length_masked_secret``.
    """

    def __init__(
        self, source: SecretSource, *, escaped: bool = False, min_length: int = MIN_SECRET_LENGTH
    ) -> None:
        self._source = source
        self._escaped = escaped
        self._min_length = min_length
        self._known: frozenset[str] = frozenset()
        self._pattern = SecretPattern(())

    def pattern(self) -> SecretPattern:
        """The pattern, built again only when the set of secrets has changed since the last time."""
        known = frozenset(self._source())
        if known != self._known:
            values = (re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL) for value in known)
            self._pattern = SecretPattern(values if self._escaped else known, min_length=self._min_length)
            self._known = known
        return self._pattern

    def scrub(self, text: str) -> str:
        """An error text as it may be stored and shown: each secret known right now is ``***``.

        What Postgres or a terminal would choke on (NUL, lone surrogates, control characters) becomes an escape.
        """
        return printable(self.pattern().scrub(text))


def key_segment(key: object, secrets: SecretPattern | None = None) -> str:
    """How a dict key is written in a path; never shows a secret, and never much of anything else."""
    if isinstance(key, str):
        shown = secrets.scrub(key) if secrets else key
        return f"[{shown[:37] + '...' if len(shown) > 40 else shown!r}]"
    return (
        f"[{key}]"
        if type(key) in (int, bool, type(None)) and len(str(key)) < 40
        else f"[{type(key).__name__}]"
    )


def is_sensitive_name(name: object, names: Iterable[str] = SENSITIVE_NAMES) -> bool:
    """Whether a key's name says that its value is not to be shown; Airflow's rule."""
    if not isinstance(name, str):
        return False
    normal = re.sub(r"\W+", "_", name.strip().lower())
    return any(sensitive in normal for sensitive in names)


def mask_for_display(
    value: object, names: Iterable[str] = SENSITIVE_NAMES, secrets: SecretPattern | None = None
) -> object:
    """A value as it may be shown (log, XCom, tab, CLI); never to be stored in its place.

    Text and bytes under a sensitive key, at any depth below it, become ``***``; numbers stay, as Airflow does it (else
    ``total_tokens`` would be gone). Known secrets are masked wherever they stand. Objects are shown as their fields,
    control characters and lone surrogates as escapes.

    :param names: parts of key names, in lower case.
    """
    return _display(value, frozenset(names), secrets, False, 0)


def _display(
    value: object, names: frozenset[str], secrets: SecretPattern | None, hidden: bool, depth: int
) -> object:
    if depth > _DISPLAY_DEPTH:
        return MASK
    if isinstance(value, str):
        return MASK if hidden else printable(secrets.scrub(value) if secrets else value)
    if isinstance(value, Secret):
        return repr(value)
    if isinstance(value, bytes | bytearray):
        return MASK if hidden or (secrets and secrets.is_in(bytes(value))) else value
    fields = _fields(value)
    if fields is not None:
        return {
            _display(key, names, secrets, False, depth + 1): _display(
                item, names, secrets, hidden or is_sensitive_name(key, names), depth + 1
            )
            for key, item in fields.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        shown = [_display(item, names, secrets, hidden, depth + 1) for item in value]
        return tuple(shown) if isinstance(value, tuple) else shown
    if secrets and secrets.is_in(str(value)):
        return MASK
    return value


def printable(text: str) -> str:
    """Text that Postgres takes, UTF-8 can write and no terminal obeys: control characters become escapes."""
    if text.isprintable():
        return text
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


class _Digits(str):
    """The text of a number: compared as a whole, not searched."""


def _parts(
    value: object, path: str, secrets: SecretPattern, depth: int, above: set[int]
) -> Iterator[tuple[str, str | bytes]]:
    """Every leaf of a value with its path; stops at a value that contains itself."""
    if isinstance(value, str | bytes):
        yield path, value
        return
    if isinstance(value, bytearray | memoryview):
        yield path, bytes(value)
        return
    if isinstance(value, bool | None | Secret):
        return
    if isinstance(value, int | float):
        yield path, _Digits(value) if not isinstance(value, int) or value.bit_length() < 2048 else _Digits()
        return
    if id(value) in above or depth > _DISPLAY_DEPTH:
        return
    above.add(id(value))
    fields = _fields(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            segment = path + key_segment(key, secrets)
            yield from _parts(key, segment, secrets, depth + 1, above)
            yield from _parts(item, segment, secrets, depth + 1, above)
    elif fields is not None:
        for name, item in fields.items():
            yield from _parts(item, f"{path}.{name}", secrets, depth + 1, above)
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            yield from _parts(item, f"{path}[{index}]", secrets, depth + 1, above)
    elif type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        yield path, value.tobytes() if hasattr(value, "tobytes") else str(value)
        yield from _parts(value.tolist(), path, secrets, depth + 1, above)
    else:
        yield path, str(value)
    above.discard(id(value))


def _fields(value: object) -> Mapping[Any, Any] | None:
    """What a value shows as name and value: a dict's entries, an object's fields; None where it is something else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        }
    if hasattr(type(value), "__pydantic_fields__") and isinstance(getattr(value, "__dict__", None), dict):
        return {**vars(value), **(getattr(value, "__pydantic_extra__", None) or {})}
    return None


def _text_forms(secret: str) -> Iterator[str]:
    """A secret as it looks in text: plain, JSON-escaped, URL-quoted."""
    yield secret
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    raw = secret.encode("utf-8", "surrogatepass")
    for quoted in (quote(raw, safe=""), quote(raw), quote_plus(raw)):
        yield quoted
        yield re.sub(r"%[0-9A-F]{2}", lambda match: match[0].lower(), quoted)


def _base64_forms(secret: str) -> Iterator[str]:
    """The characters of base64 that a secret determines, wherever it begins inside a longer text (``user:secret``)."""
    raw = secret.encode("utf-8", "surrogatepass")
    for shift, unsure in ((0, 0), (1, 2), (2, 3)):
        whole_characters = (shift + len(raw)) * 8 // 6
        form = base64.b64encode(b"\0" * shift + raw)[unsure:whole_characters].decode()
        yield form
        yield form.replace("+", "-").replace("/", "_")


def _json_document(secret: str) -> object:
    if secret[:1] not in ("{", "[") or len(secret) < 8:
        return None
    try:
        return json.loads(secret)
    except (ValueError, RecursionError):
        return None


def _json_structures(secret: str) -> Iterator[str]:
    document = _json_document(secret)
    if document:
        yield json.dumps(document, separators=(",", ":"))


def _sensitive_leaves(secret: str) -> Iterator[str]:
    """The texts under sensitive names in a secret that is a JSON document; Airflow learns them only when asked."""

    def leaves(node: object, hidden: bool) -> Iterator[str]:
        if isinstance(node, str) and hidden:
            yield node
        elif isinstance(node, dict):
            for key, item in node.items():
                yield from leaves(item, hidden or is_sensitive_name(key))
        elif isinstance(node, list):
            for item in node:
                yield from leaves(item, hidden)

    return leaves(_json_document(secret), False)
