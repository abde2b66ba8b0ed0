from __future__ import annotations

import base64
import json
import os
import pathlib
import re
import subprocess
import sys
import uuid
from decimal import Decimal
from typing import Any
from urllib.parse import quote, quote_plus

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_saga.core.errors import ParamsNotKeptError, SecretInParamsError, ValueNotKeptError
from airflow_saga.core.secret import Secret
from airflow_saga.runtime.codec import decode, encode, encode_masked
from airflow_saga.runtime.secrecy import (
    MASK,
    SENSITIVE_NAMES,
    KnownSecrets,
    SecretPattern,
    is_sensitive_name,
    mask_for_display,
)
from tests.runtime import kept_classes as kept
from tests.runtime.values import values

PLANTED = "S3cr3t-XYZ/+\"ü'"
PATTERN = SecretPattern([PLANTED])


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


# -- finding ----------------------------------------------------------------------------------------------------------

DISGUISES: list[Any] = [
    PLANTED,
    f"postgres://me:{PLANTED}@host/db",
    json.dumps({"password": PLANTED}),
    json.dumps({"password": PLANTED}, ensure_ascii=False),
    f"postgres://me:{quote(PLANTED, safe='')}@host/db",
    f"https://host/?p={quote_plus(PLANTED)}&x=1",
    quote(PLANTED).lower().replace("s3cr3t-xyz", "S3cr3t-XYZ"),
    b64(PLANTED),
    *(f"Basic {b64(user + ':' + PLANTED + rest)}" for user in ("a", "ab", "abc") for rest in ("", "!", "!!")),
    base64.urlsafe_b64encode(f"x{PLANTED}".encode()).decode(),
    PLANTED.encode(),
    b"\x00\xff" + PLANTED.encode() + b"\x00",
    b64(PLANTED).encode(),
    quote(PLANTED).encode(),
    bytearray(PLANTED.encode()),
    pathlib.PurePosixPath("/run") / PLANTED.replace("/", "_").replace("_", "/"),
    numpy.array(["x", PLANTED]),
    numpy.array([PLANTED.encode()]),
    numpy.str_(PLANTED),
]
PLACES = [
    lambda leaf: leaf,
    lambda leaf: {"trip": [{"deep": (1, [leaf])}]},
    lambda leaf: {"n": Decimal(1), 7: {"x": leaf}},
    lambda leaf: kept.Box(leaf),
    lambda leaf: kept.Customer.model_construct(name=leaf, address=None),
    lambda leaf: kept.Customer.model_construct(name="x", address=None, extra=leaf),
    lambda leaf: [kept.Leg("a", leaf)],
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("leaf", DISGUISES, ids=lambda leaf: type(leaf).__name__)
def test_c52_a_planted_secret_is_refused_in_params_and_masked_in_results(leaf: Any, place: Any) -> None:
    value = place(leaf)
    with pytest.raises(SecretInParamsError) as refused:
        encode(value, secrets=PATTERN)
    assert not PATTERN.is_in(str(refused.value))
    text, masked = encode_masked(value, PATTERN)
    assert len(masked) == 1
    assert_nothing_planted_is_in(text)
    assert_nothing_planted_is_in(repr(masked))
    assert MASK in repr(decode(text))


def assert_nothing_planted_is_in(text: str) -> None:
    everything = [text, text.encode().decode("unicode_escape")]
    for found in re.findall(r"[A-Za-z0-9+/]{8,}", text):
        everything.append(base64.b64decode(found[: len(found) // 4 * 4]).decode("latin-1"))
    for each in everything:
        for form in (PLANTED, PLANTED.encode().decode("latin-1"), quote(PLANTED), b64(PLANTED), "S3cr3t"):
            assert form not in each


@pytest.mark.parametrize("key", [PLANTED, f"to {PLANTED}", PLANTED.encode(), (1, PLANTED)])
def test_a_secret_in_a_key_is_found_and_its_path_does_not_tell_it(key: Any) -> None:
    for value in ({key: 1}, {"trip": {key: {"n": 1}}}):
        with pytest.raises(SecretInParamsError) as refused:
            encode(value, secrets=PATTERN)
        assert "S3cr3t" not in str(refused.value)
        text, masked = encode_masked(value, PATTERN)
        assert "S3cr3t" not in text + str(masked)


@pytest.mark.parametrize("before", ["", "a", "ab"])
def test_both_alphabets_of_base64_are_known(before: str) -> None:
    secret = "~~>>??>>~~"
    pattern = SecretPattern([secret])
    for encode64 in (base64.standard_b64encode, base64.urlsafe_b64encode):
        assert pattern.find({"h": encode64(f"{before}{secret}".encode()).decode()}) == "value['h']"
    assert base64.urlsafe_b64encode(secret.encode()) != base64.standard_b64encode(secret.encode())


def test_the_path_leads_to_the_secret() -> None:
    with pytest.raises(SecretInParamsError) as refused:
        encode({"trip": {"dates": [0, {"to": PLANTED}]}}, secrets=PATTERN)
    assert refused.value.path == "params.trip['dates'][1]['to']"


def test_two_masked_keys_do_not_become_one_entry() -> None:
    value = {f"{PLANTED}1": "a", f"{PLANTED}2": "b", "***": "c"}
    text, masked = encode_masked(value, PATTERN)
    assert sorted(decode(text).values()) == ["a", "b", "c"]
    assert len(masked) == 2


def test_only_the_leaf_with_the_secret_is_masked() -> None:
    value = {
        "id": "b-1",
        "echo": [f"password={PLANTED}", 7],
        "price": kept.Money(Decimal("1.50")),
        "n": (1, {2}),
    }
    text, masked = encode_masked(value, PATTERN)
    assert decode(text) == {**value, "echo": [MASK, 7]}
    assert masked == ["result['echo'][0]"]


def test_a_result_without_a_secret_is_stored_as_it_is() -> None:
    value = {"password": "not a known one", "token": 3}
    assert encode_masked(value, PATTERN) == (encode(value), [])
    assert encode_masked(value, None) == (encode(value), [])


def test_a_number_is_a_secret_only_as_a_whole() -> None:
    pins = SecretPattern(["123456", "987.25"])
    for value in (123456, Decimal("987.25"), 987.25):
        with pytest.raises(SecretInParamsError):
            encode({"pin": value}, secrets=pins)
    assert encode({"order": 91234567}, secrets=pins) == '{"order":91234567}'
    with pytest.raises(SecretInParamsError):
        encode({"order": "91234567"}, secrets=pins)


def test_an_id_that_is_known_as_a_secret_is_found() -> None:
    key = uuid.uuid4()
    with pytest.raises(SecretInParamsError):
        encode({"key": key}, secrets=SecretPattern([str(key)]))


def test_a_connection_extra_is_found_as_the_dict_it_stands_for_and_by_its_sensitive_parts() -> None:
    extra = (
        '{"region": "eu-west-1", "api_key": "k-123456", "nested": {"private_key": ["line one", "line two"]}}'
    )
    pattern = SecretPattern([extra])
    for value in (extra, json.loads(extra), "k-123456", "x line two"):
        with pytest.raises(SecretInParamsError):
            encode({"a": [value]}, secrets=pattern)
    for value in ("eu-west-1", {"region": "eu-west-1"}):
        assert decode(encode({"a": [value]}, secrets=pattern)) == {"a": [value]}
    harmless = SecretPattern(['{"region": "eu-west-1"}'])
    text, masked = encode_masked({"conf": {"region": "eu-west-1"}, "id": 7}, harmless)
    assert decode(text) == {"conf": MASK, "id": 7}
    assert masked == ["result['conf']"]


def test_a_reference_to_a_secret_is_stored_even_if_it_is_called_like_one() -> None:
    value = {"login": Secret(PLANTED)}
    assert decode(encode(value, secrets=PATTERN)) == value
    assert PATTERN.find(value) is None


def test_an_object_that_cannot_live_masked_is_masked_whole() -> None:
    value = {kept.Picky(f"{PLANTED}-")}
    text, masked = encode_masked([value], PATTERN)
    assert "S3cr3t" not in text
    assert masked
    assert decode(text) == MASK


def test_a_refusal_for_another_reason_does_not_tell_the_secret_either() -> None:
    for value in ({PLANTED: print}, {"x": {PLANTED: print}}, kept.RaisesWhenCompared(PLANTED)):
        with pytest.raises(ParamsNotKeptError) as refused:
            encode(value, secrets=PATTERN)
        assert "S3cr3t" not in str(refused.value)
        with pytest.raises(ValueNotKeptError) as lost:
            encode_masked(value, PATTERN)
        assert "S3cr3t" not in str(lost.value)


def planted_somewhere(value: Any, leaf: Any, draw: Any) -> Any:
    """The value with a leaf put into one of its containers, at a random depth."""
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        at = draw(st.integers(0, len(value)))
        if at < len(value) and draw(st.booleans()):
            return type(value)([*value[:at], planted_somewhere(value[at], leaf, draw), *value[at + 1 :]])
        return type(value)([*value[:at], leaf, *value[at:]])
    if isinstance(value, dict):
        key = draw(st.sampled_from([*value, "planted"]))
        return {**value, key: planted_somewhere(value[key], leaf, draw) if key in value else leaf}
    return [value, leaf]


@settings(max_examples=150, deadline=None)
@given(values, st.sampled_from(DISGUISES), st.data())
def test_a_secret_is_found_wherever_it_is_planted(value: Any, leaf: Any, data: Any) -> None:
    planted = planted_somewhere(value, leaf, data.draw)
    assert PATTERN.find(planted) is not None
    with pytest.raises(SecretInParamsError):
        encode(planted, secrets=PATTERN)
    text, masked = encode_masked(planted, PATTERN)
    assert masked
    assert "S3cr3t" not in text


@settings(max_examples=100, deadline=None)
@given(values)
def test_where_nothing_is_planted_nothing_is_found(value: Any) -> None:
    assert PATTERN.find(value) is None
    assert encode(value, secrets=PATTERN) == encode(value)


# -- find -------------------------------------------------------------------------------------------------------------


def test_find_looks_into_values_that_cannot_be_kept_too() -> None:
    class Odd:
        def __str__(self) -> str:
            return PLANTED

    assert PATTERN.find({"a": [Odd()]}, "x") == "x['a'][0]"
    assert PATTERN.find({"a": kept.Holder(PLANTED)}, "x") == "x['a'].lock"
    assert PATTERN.find({"a": kept.Address(street=PLANTED)}, "x") == "x['a'].street"
    assert PATTERN.find({PLANTED: 1}, "x") == "x['***']"
    assert PATTERN.find({"a": 1, "b": [None, True, 2.5]}) is None


def test_find_ends_at_a_value_that_contains_itself() -> None:
    value: list[Any] = []
    value.extend([value, {"me": value}])
    assert PATTERN.find(value) is None
    value.append(PLANTED)
    assert PATTERN.find(value, "x") == "x[2]"


# -- which values are secrets -----------------------------------------------------------------------------------------


def test_short_values_and_airflow_are_no_secrets_as_in_airflow() -> None:
    assert not SecretPattern(["", "abcd", "airflow", "Airflow"])
    assert SecretPattern(["abcde"])
    assert SecretPattern(["abcd"], min_length=3)
    assert SecretPattern(["abcd"]).find(["abcd"]) is None


def test_a_pattern_of_nothing_finds_and_scrubs_nothing() -> None:
    nothing = SecretPattern([])
    assert nothing.find({"a": "b"}) is None
    assert nothing.scrub("anything at all") == "anything at all"
    assert encode({"a": "b"}, secrets=nothing) == '{"a":"b"}'


def test_a_pattern_does_not_show_its_secrets() -> None:
    assert repr(SecretPattern(["hunter2"])) == "<SecretPattern of 1 values>"


def test_the_pattern_is_built_again_only_when_the_set_has_changed() -> None:
    learned = {"first-secret"}
    known = KnownSecrets(lambda: learned)
    pattern = known.pattern()
    assert known.pattern() is pattern
    learned.add("second-secret")
    assert known.pattern() is not pattern
    assert known.pattern().find("second-secret") == "value"
    learned.clear()
    assert not known.pattern()


def test_the_patterns_of_airflows_masker_are_understood() -> None:
    script = (
        "import json, sys\n"
        "from airflow.sdk._shared.secrets_masker import _secrets_masker\n"
        "from airflow.sdk.log import mask_secret\n"
        "for secret in json.loads(sys.argv[1]): mask_secret(secret)\n"
        "print(json.dumps(sorted(_secrets_masker().patterns)))\n"
    )
    secrets = [
        PLANTED,
        "a b\nc#d",
        "p(.*)|[x]{2}\\d",
        "-----BEGIN KEY-----\nabc\n-----END KEY-----",
        "abcd",
        "airflow",
    ]
    ran = subprocess.run(
        [sys.executable, "-c", script, json.dumps(secrets)],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    patterns = json.loads(ran.stdout.splitlines()[-1])
    assert len(patterns) >= 4  # Airflow adds its own configuration
    known = KnownSecrets(lambda: patterns, escaped=True)
    for secret in secrets[:4]:
        assert known.pattern().find({"x": f"see {secret}."}) == "value['x']"
    assert known.pattern().find(["abcd", "airflow"]) is None


# -- scrubbing error texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disguise", [each for each in DISGUISES if isinstance(each, str)])
def test_an_error_text_is_scrubbed_of_every_disguise(disguise: str) -> None:
    scrubbed = PATTERN.scrub(f"401 for {disguise} at 12:00")
    assert_nothing_planted_is_in(scrubbed)
    assert scrubbed.startswith("401 for ")
    assert MASK in scrubbed
    assert scrubbed.endswith(" at 12:00")


def test_a_scrubbed_text_holds_no_rest_of_the_base64_around_a_secret() -> None:
    assert PATTERN.scrub(f"Basic {b64('user:' + PLANTED + '!!')} sent") == "Basic *** sent"


def test_a_secret_within_a_longer_secret_leaves_no_rest() -> None:
    pattern = SecretPattern(["hunter2", "hunter2-and-more"])
    assert pattern.scrub("<hunter2-and-more> <hunter2>") == "<***> <***>"


def test_a_text_without_secrets_is_left_alone() -> None:
    assert PATTERN.scrub("nothing to see: 50% of [x]") == "nothing to see: 50% of [x]"
    assert KnownSecrets(lambda: [PLANTED]).scrub(f"<{PLANTED}>") == "<***>"


def test_a_stored_error_text_is_one_that_postgres_takes() -> None:
    known = KnownSecrets(lambda: [PLANTED])
    assert known.scrub(f"a\x00b \ud800 {PLANTED}\n\x1b[0m") == "a\\x00b \\ud800 ***\n\\x1b[0m"


def test_a_long_text_is_scrubbed_in_linear_time() -> None:
    noise = b64("x" * 1_000_000)
    assert PATTERN.scrub(f"{noise} {b64(PLANTED)} {noise}") == f"{noise} {MASK} {noise}"


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_values_under_sensitive_names_are_not_shown_but_stored() -> None:
    value = {
        "password": "x",
        "apiKey": "x",
        "Authorization": ["Bearer x", {"inner": "x", "n": 1}],
        "my-access token": b"x",
        "user": "ada",
        "usage": {"total_tokens": 12},
        "nested": [{"db_passwd": ("x",)}],
    }
    assert mask_for_display(value) == {
        "password": MASK,
        "apiKey": MASK,
        "Authorization": [MASK, {"inner": MASK, "n": 1}],
        "my-access token": MASK,
        "user": "ada",
        "usage": {"total_tokens": 12},
        "nested": [{"db_passwd": (MASK,)}],
    }
    assert decode(encode(value, secrets=PATTERN)) == value


def test_names_may_be_given() -> None:
    assert mask_for_display({"iban": "x", "password": "y"}, names=["iban"]) == {"iban": MASK, "password": "y"}
    assert is_sensitive_name("X-Iban-No", ["iban"])
    assert not is_sensitive_name(7)


def test_our_default_names_are_airflows() -> None:
    script = "from airflow.sdk._shared.secrets_masker import DEFAULT_SENSITIVE_FIELDS as d; print(*sorted(d))"
    ran = subprocess.run(
        [sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, check=True
    )
    theirs = ran.stdout.splitlines()[-1].split()
    assert [name for name in theirs if not is_sensitive_name(name)] == []
    assert sorted(SENSITIVE_NAMES - set(theirs)) == []


def test_objects_are_shown_as_their_fields() -> None:
    value = [
        kept.Box({"token": "x"}),
        kept.Address(street="A"),
        kept.Leg("a", "b"),
        Secret("bank"),
        kept.Status.BOOKED,
    ]
    assert mask_for_display(value) == [
        {"item": {"token": MASK}},
        {"street": "A", "floor": None},
        {"start": "a", "end": "b", "minutes": 0},
        "Secret('bank', field='password')",
        "booked",
    ]


def test_known_secrets_are_not_shown_wherever_they_stand() -> None:
    value = {"note": f"it is {PLANTED}!", "raw": PLANTED.encode(), f"k{PLANTED}": 1}
    assert mask_for_display(value, secrets=PATTERN) == {"note": "it is ***!", "raw": MASK, "k***": 1}


def test_what_is_shown_does_not_control_the_terminal_and_is_utf8() -> None:
    shown = mask_for_display({"a": "\x1b[2Jx\x00\n\ttab é😀\x9b", "b": "\ud800"})
    assert shown == {"a": "\\x1b[2Jx\\x00\n\ttab é😀\\x9b", "b": "\\ud800"}
    json.dumps(shown, ensure_ascii=False).encode()


def test_what_contains_itself_is_shown_up_to_a_depth() -> None:
    value: list[Any] = ["x"]
    value.append(value)
    assert MASK in repr(mask_for_display(value))
