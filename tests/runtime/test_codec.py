from __future__ import annotations

import collections
import functools
import io
import json
import os
import subprocess
import sys
import threading
import types
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy
import psycopg
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_saga.core.errors import (
    ParamsNotKeptError,
    ValueNotKeptError,
    ValueNotReadableError,
    ValueTooLargeError,
)
from airflow_saga.core.secret import Secret
from airflow_saga.runtime.codec import (
    MAX_VALUE_BYTES,
    decode,
    encode,
    encode_masked,
    fingerprint,
    is_plainly,
    readable,
)
from airflow_saga.runtime.kinds import READERS
from tests.runtime import kept_classes as kept
from tests.runtime.values import EXAMPLES, PARIS, same, tag_like, values

ROOT = Path(__file__).resolve().parents[2]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
few = settings(max_examples=150, deadline=None)


# -- what comes back --------------------------------------------------------------------------------------------------


@few
@given(values)
def test_every_kept_value_comes_back_the_same_at_every_depth(value: object) -> None:
    text = encode(value)
    assert text.isascii()
    assert same(decode(text), value)


@settings(max_examples=200, deadline=None)
@given(tag_like)
def test_data_that_looks_like_a_tag_stays_data(value: object) -> None:
    assert same(decode(encode(value)), value)


@few
@given(JSON_VALUES)
def test_plain_json_is_stored_as_the_json_it_is(value: object) -> None:
    text = encode({"value": value})
    assert same(decode(text), {"value": value})
    if '"!"' not in text:
        assert json.loads(text) == {"value": value}


@pytest.mark.parametrize("value", EXAMPLES, ids=repr)
def test_each_example_comes_back_the_same_alone_and_inside(value: object) -> None:
    for placed in (value, [value], {"a": (value,)}, {1: {"x": value}}):
        assert same(decode(encode(placed)), placed)


def test_a_stored_tag_given_as_data_is_not_read_as_one() -> None:
    for value in EXAMPLES:
        tree = json.loads(encode(value))
        assert same(decode(encode({"data": tree})), {"data": tree})


def test_c47_nul_lone_surrogates_and_invalid_utf8_are_stored_in_postgres_unchanged(database_url: str) -> None:
    value = {
        "t": "a\x00b",
        "s": "\ud800",
        "pair": "\ud83d\ude00",
        "one": "😀",
        "b": b"\xff\x00",
        "\x00k": ["\udfff"],
    }
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TEMPORARY TABLE kept (value text NOT NULL)")
        connection.execute("INSERT INTO kept VALUES (%s)", [encode(value)])
        row = connection.execute("SELECT value FROM kept").fetchone()
    assert row is not None
    assert same(decode(row[0]), value)


def test_c48_typed_values_come_back_with_type_and_value() -> None:
    paris = PARIS
    value = {
        "amount": Decimal("12345678901234567.89"),
        "when": paris,
        "id": UUID("6b1e7c9e-4d4c-4d0b-9f7b-2b1a8d3e5f60"),
        "n": 2**70,
        "nan": float("nan"),
        "cabin": kept.Cabin.BUSINESS,
        "price": kept.Money(Decimal("1.50")),
        "address": kept.Address(street="Rua Augusta"),
        "legs": (kept.Leg("LIS", "CDG"), {1, 2}),
    }
    back = decode(encode(value))
    assert same(back, value)
    assert back["when"].utcoffset() == timedelta(hours=1)
    assert back["when"].fold == 1


def test_the_order_of_a_dict_is_kept() -> None:
    for value in ({"b": 1, "a": 2}, {2: "b", 1: "a"}, {"!": 1, "a": 0}):
        assert list(decode(encode(value)).items()) == list(value.items())


def test_a_pair_of_lone_surrogates_is_not_the_character_they_would_form() -> None:
    for value in (
        "\ud83d\ude00",
        {"\ud83d\ude00": 1, "😀": 2},
        [Decimal(1), {"deep": ["\ud83d\ude00", "😀"]}],
    ):
        assert same(decode(encode(value)), value)


def test_two_nan_keys_stay_two() -> None:
    back = decode(encode({float("nan"): 1, float("nan"): 2}))
    assert list(back.values()) == [1, 2]


def test_a_huge_int_is_readable_where_python_limits_digits() -> None:
    script = (
        "import sys; from airflow_saga.runtime.codec import decode; print(hex(decode(sys.stdin.read())[0]))"
    )
    value = 7**9000
    env = {**os.environ, "PYTHONINTMAXSTRDIGITS": "640"}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=env,
        input=encode([value]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == hex(value)


# -- classes ----------------------------------------------------------------------------------------------------------


def object_values() -> list[Any]:
    passenger = kept.Passenger("Ada", 36)
    boxed: kept.Box[int] = kept.Box[int](1)
    customer = kept.Customer(
        name="Ada",
        address={"street": "A"},  # type: ignore[arg-type]
        born="1815-12-10T00:00:00+01:00",  # type: ignore[arg-type]
        page="https://example.org/ä?x=1",  # type: ignore[arg-type]
        nickname={"deep": (1,)},  # type: ignore[call-arg]
    )
    customer._visits = 3
    return [
        passenger,
        kept.Trip(
            [passenger],
            kept.Money(Decimal("9.90")),
            {kept.Seat(1, "A"): "window"},
            datetime(2026, 1, 2, tzinfo=UTC),
        ),
        kept.Outer.Inner(1),
        boxed,
        customer,
        kept.IntPair(left=1, right=2),
        kept.Names(["a"]),
        kept.Checked(3),
        kept.Leg("a", "b", 3),
        kept.Route("a", "b"),
        kept.Weekday.TUESDAY,
        kept.Extras.MEAL | kept.Extras.BAG,
    ]


@pytest.mark.parametrize("value", object_values(), ids=lambda value: type(value).__name__)
def test_objects_are_kept_by_class_and_state_and_nothing_of_theirs_is_called(value: Any) -> None:
    kept.calls.clear()
    back = decode(encode({"it": [value]}))["it"][0]
    assert kept.calls == []
    assert type(back) is type(value)
    assert back == value
    assert same(back, value)


def test_a_pydantic_object_keeps_what_was_set_and_what_is_private() -> None:
    customer = object_values()[4]
    back = decode(encode(customer))
    assert back.model_fields_set == customer.model_fields_set
    assert back._visits == 3
    assert back.model_extra == {"nickname": {"deep": (1,)}}
    assert back.born.utcoffset() == timedelta(hours=1)


def test_what_a_property_has_cached_is_not_part_of_the_value() -> None:
    passenger = kept.Passenger("Ada", 36)
    assert passenger.initial is passenger.initial
    back = decode(encode(passenger))
    assert back == passenger
    assert "initial" not in vars(back)


def test_a_field_that_was_never_set_stays_unset() -> None:
    back = decode(encode(kept.Unfinished(1)))
    assert back.done == 1
    assert not hasattr(back, "to_do")


def test_values_are_readable_in_a_fresh_process_with_another_hash_seed() -> None:
    script = (
        "import sys, json; from airflow_saga.runtime.codec import decode, encode, fingerprint\n"
        "for line in sys.stdin:\n"
        "    text = json.loads(line); print(json.dumps([encode(decode(text)), fingerprint('book', 1, text)]))\n"
        "from tests.runtime.kept_classes import calls; assert calls == [], calls"
    )
    texts = [encode(value) for value in [*EXAMPLES, *object_values(), {"tags": {"a", "b", "c", "d"}}]]
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            input="".join(json.dumps(text) + "\n" for text in texts),
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        answers = [json.loads(line) for line in ran.stdout.splitlines()]
        assert answers == [[text, fingerprint("book", 1, text)] for text in texts]


def module_of_dag_file(
    monkeypatch: pytest.MonkeyPatch, path_hash: str, stem: str = "book_trip"
) -> types.ModuleType:
    name = f"unusual_prefix_{path_hash * 40}_{stem}"
    module = types.ModuleType(name)
    source = "import dataclasses\n@dataclasses.dataclass\nclass Order:\n    n: int\n"
    monkeypatch.setitem(sys.modules, name, module)
    exec(source, module.__dict__)
    return module


def test_a_class_of_a_dag_file_is_found_in_another_version_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = module_of_dag_file(monkeypatch, "a")
    text = encode({"order": forward.Order(1)})
    monkeypatch.delitem(sys.modules, forward.__name__)
    undo = module_of_dag_file(monkeypatch, "b")
    module_of_dag_file(monkeypatch, "c", stem="other_book_trip")
    assert decode(text)["order"] == undo.Order(1)
    assert encode({"order": undo.Order(1)}) == text


def test_an_object_of_a_dag_file_that_was_loaded_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    older = module_of_dag_file(monkeypatch, "a")
    module_of_dag_file(monkeypatch, "b")
    with pytest.raises(ParamsNotKeptError, match="loaded twice"):
        encode({"order": older.Order(1)})


def stored(value: object, **changes: str) -> str:
    text = encode(value)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (stored(kept.Money(Decimal(1)), Money="Cash"), "no class Cash in module tests.runtime.kept_classes"),
        (stored(kept.Money(Decimal(1)), kept_classes="gone_classes"), "gone_classes"),
        (
            stored(kept.Money(Decimal(1)), currency="valuta"),
            "had valuta, now it has currency; was a field renamed",
        ),
        (stored(kept.Seat(1, "A"), letter="place"), "had place, now it has letter"),
        (stored(kept.Address(street="A"), floor="level"), "had level, now it has floor"),
        (encode(kept.Seat(1, "A")).replace('["letter","A"],', ""), "new field letter without a default"),
        (
            encode(kept.Address(street="A")).replace('["street","A"],', ""),
            "new field street without a default",
        ),
        (encode(kept.Seat(1, "A")).replace("]]}", '],["gone",1]]}'), "no field gone"),
        (stored(kept.Leg("a", "b"), minutes="hours"), "had the fields start, end, hours"),
        (stored(kept.Cabin.ECONOMY, ECONOMY="FIRST"), "has no member FIRST"),
        (stored(kept.Money(Decimal(1)), Money="Address"), "is not a dataclass"),
        (stored(kept.Money(Decimal(1)), Money="act"), "no class act"),
    ],
)
def test_c51_a_class_that_has_changed_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueNotReadableError, match=message):
        decode(text)


def test_a_class_that_has_grown_a_field_with_a_default_is_still_read() -> None:
    text = encode(kept.Money(Decimal(1))).replace(',["currency","EUR"]', "")
    assert decode(text) == kept.Money(Decimal(1))
    text = encode(kept.Address(street="A")).replace(',["floor",null]', "")
    assert decode(text) == kept.Address(street="A")


def test_what_a_class_has_dropped_since_is_still_there_for_the_compensation() -> None:
    for value in (kept.Money(Decimal(1)), kept.Address(street="A")):
        text = encode(value).replace('"v":[', '"v":[["old_name","x"],')
        assert decode(text).__dict__["old_name"] == "x"


# -- a poisoned row ---------------------------------------------------------------------------------------------------


def tagged(tag: str, **members: object) -> str:
    return json.dumps({"!": tag, **members})


@pytest.mark.parametrize(
    "text",
    [
        tagged("dataclass", c="tests.runtime.kept_classes:Plain", v=[]),
        tagged("dataclass", c="tests.runtime.kept_classes:act", v=[]),
        tagged("dataclass", c="tests.runtime.kept_classes:Closes", v=[["x", 1]]),
        tagged("dataclass", c="os:system", v=[["command", "true"]]),
        tagged("dataclass", c="subprocess:Popen", v=[["args", "true"]]),
        tagged("dataclass", c="tests.runtime.kept_classes:Failure", v=[["code", 1]]),
        tagged("pydantic", c="tests.runtime.kept_classes:Money", v=[], s=[]),
        tagged("pydantic", c="subprocess:Popen", v=[], s=[]),
        tagged("enum", c="tests.runtime.kept_classes:Plain", v="x"),
        tagged("enum", c="tests.runtime.kept_classes:Cabin", v=3),
        tagged("enum", c="tests.runtime.kept_classes:Weekday", v=["MONDAY"]),
        tagged("namedtuple", c="builtins:tuple", v=[]),
        tagged("namedtuple", c="tests.runtime.kept_classes:Money", v=[["amount", 1]]),
        tagged("url", c="tests.runtime.kept_classes:Address", v="https://example.org"),
        tagged("dataclass", c="antigravity:x", v=[]),
        tagged("dataclass", c="this:x", v=[]),
        tagged("dataclass", c="tests.runtime.__main__:x", v=[]),
        tagged("dataclass", c="../evil:x", v=[]),
        tagged("dataclass", c=["os"], v=[]),
        tagged("dataclass", v=[]),
        tagged("numpy", t="|O", v="AAAAAAAAAAA="),
        tagged("numpy", t="|V8", v="AAAAAAAAAAA="),
        tagged("numpy", t="<i8", v="AAAAAAAAAAA=", s=[10**12]),
        tagged("path", c="open", v="/etc/passwd"),
        tagged("ip", c="system", v="x"),
        tagged("bytes", v="not base64"),
        tagged("decimal", v="one"),
        tagged("decimal", v=[0, [1], 0]),
        tagged("datetime", v="2026-01-01", z=["zone", "../../etc/passwd"]),
        tagged("datetime", v="2026-01-01", z=["exec", "1"]),
        tagged("set", v=[[]]),
        tagged("dict", v=[[{}, 1]]),
        tagged("dict", v=7),
        tagged("eval", v="1"),
        tagged("__import__", v="os"),
        '{"!": ["tuple"], "v": []}',
        '{"!": null}',
        "not json",
        "",
        "1" * 5000,
    ],
)
def test_a_poisoned_row_is_refused_and_runs_nothing(text: str) -> None:
    kept.calls.clear()
    before = set(sys.modules)
    with pytest.raises(ValueNotReadableError):
        decode(text)
    assert kept.calls == []
    assert not {"antigravity", "this", "tests.runtime.__main__"} & (set(sys.modules) - before)


def test_a_poisoned_row_cannot_start_a_program_by_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "saga_program").mkdir()
    (tmp_path / "saga_program" / "__init__.py").touch()
    (tmp_path / "saga_program" / "__main__.py").write_text("raise SystemExit('the program ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueNotReadableError, match=r"no module saga_program\.__main__ to import"):
        decode(tagged("dataclass", c="saga_program.__main__:X", v=[]))


def test_a_class_that_a_body_imported_late_is_imported_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "saga_late.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Late:\n    x: int\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert decode(tagged("dataclass", c="saga_late:Late", v=[["x", 1]])).x == 1
    finally:
        sys.modules.pop("saga_late", None)


def test_a_module_that_fails_when_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "saga_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueNotReadableError, match="saga_broken:Late cannot be read: ZeroDivisionError"):
        decode(tagged("dataclass", c="saga_broken:Late", v=[]))


# -- what is refused --------------------------------------------------------------------------------------------------


class Zone(tzinfo):
    def utcoffset(self, dt: datetime | None) -> timedelta:
        return timedelta(hours=1)


class Text(str):
    __slots__ = ()


class Number(int):
    pass


async def coroutine() -> None: ...


def local_class() -> object:
    import dataclasses

    @dataclasses.dataclass
    class Local:
        x: int

    return Local(1)


def made_on_the_fly() -> object:
    return kept.Pair[bytes](left=b"a", right=b"b")


def with_an_attribute() -> kept.Route:
    route = kept.Route("a", "b")
    route.note = "x"  # type: ignore[attr-defined]
    return route


REFUSED: list[tuple[Any, str]] = [
    (lambda: 1, "a function is not a value"),
    (print, "a function is not a value"),
    (functools.partial(print), "a function is not a value"),
    ((n for n in "ab"), "pass a list"),
    (iter([1]), "pass a list"),
    (map(str, [1]), "pass a list"),
    (io.StringIO("x"), "open file or stream"),
    (kept.Plain(), "does not keep objects of tests.runtime.kept_classes.Plain"),
    (kept.Plain, "pass its name"),
    (sys, "a module is not a value"),
    (collections.OrderedDict(a=1), "pass a plain dict"),
    (collections.defaultdict(list), "pass a plain dict"),
    (collections.Counter("a"), "pass a plain dict"),
    (collections.deque([1]), "collections.deque"),
    (Text("a"), "pass a plain str"),
    (Number(1), "pass a plain int"),
    ({Text("a"): 1}, "pass a plain str"),
    (memoryview(b"a"), "pass bytes"),
    (object(), "does not keep objects of object"),
    (threading.Lock(), "does not keep objects"),
    (ValueError("x"), "does not keep objects of ValueError"),
    (datetime(2026, 1, 1, tzinfo=Zone()), "use zoneinfo.ZoneInfo"),
    (local_class(), "defined inside a function"),
    (kept.ByIdentity(1), "compares by identity"),
    (kept.NeverEqual(1), "says that it is not equal"),
    (kept.RaisesWhenCompared("x"), "cannot be compared"),
    (kept.Failure(1), "cannot be read"),
    (pydantic.SecretStr("x"), r"pass Secret\('<conn_id>'\)"),
    (with_an_attribute(), "attributes besides the fields"),
    (made_on_the_fly(), "made on the fly"),
    (numpy.array([object()]), r"pass .tolist\(\)"),
    (numpy.array([(1, 2)], dtype=[("a", int), ("b", int)]), r"pass .tolist\(\)"),
    (numpy.ma.masked_array([1]), "does not keep objects of numpy.ma"),
]


@pytest.mark.parametrize(("value", "reason"), REFUSED, ids=lambda part: type(part).__name__)
def test_what_would_not_come_back_equal_is_refused_with_path_and_reason(value: object, reason: str) -> None:
    with pytest.raises(ParamsNotKeptError, match=reason):
        encode(value)
    with pytest.raises(ParamsNotKeptError, match=reason) as refused:
        encode({"trip": {"dates": [1, (2, value)]}})
    assert refused.value.path.startswith("params.trip") or refused.value.path == "params"
    with pytest.raises(ValueNotKeptError, match=reason) as lost:
        encode_masked([value], None)
    assert not isinstance(lost.value, ParamsNotKeptError)


def test_a_coroutine_that_was_not_awaited_is_named() -> None:
    waiting = coroutine()
    with pytest.raises(ParamsNotKeptError, match="was not awaited"):
        encode({"x": waiting})
    waiting.close()


def test_a_class_with_a_destructor_is_refused() -> None:
    with pytest.raises(ParamsNotKeptError, match="__del__"):
        encode(kept.Closes(1))


def test_a_kind_that_is_read_wrongly_is_caught_when_the_value_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(READERS, "decimal", lambda tree: Decimal(tree["v"]).normalize())
    assert decode(encode(Decimal("1.5"))) == Decimal("1.5")
    with pytest.raises(ParamsNotKeptError, match="comes back changed"):
        encode(Decimal("1.50"))
    monkeypatch.setitem(READERS, "decimal", lambda tree: 1 / 0)
    with pytest.raises(ParamsNotKeptError, match="could be written, but not be read back"):
        encode(Decimal("1.5"))


@pytest.mark.parametrize(
    ("value", "where", "path"),
    [
        ({"trip": {"dates": [0, 1, print]}}, "params", "params.trip['dates'][2]"),
        ({"not a name": print}, "params", "params['not a name']"),
        ({"trip": {1: {None: print}}}, "params", "params.trip[1][None]"),
        ({"trip": {(1, 2): print}}, "params", "params.trip[tuple]"),
        ({"x": kept.Holder(threading.Lock())}, "params", "params.x.lock"),
        ({"x": {"k" * 100: print}}, "params", f"params.x['{'k' * 37}...']"),
        ({"x": [print]}, "result", "result['x'][0]"),
        ((kept.Leg("a", "b", print),), "result", "result[0].minutes"),  # type: ignore[arg-type]
        ({"x": kept.Names.model_construct(root=print)}, "output", "output['x'].root"),
    ],
)
def test_the_path_leads_to_the_part_that_is_not_kept(value: object, where: str, path: str) -> None:
    with pytest.raises(ValueNotKeptError) as refused:
        encode(value, where=where)
    assert refused.value.path == path
    assert str(refused.value).startswith(f"{path}: ")


def containing_itself() -> list[object]:
    simple: list[Any] = []
    simple.append(simple)
    twice: list[Any] = []
    twice.extend([twice, twice])
    mapped: dict[str, Any] = {}
    mapped["me"] = [mapped]
    through: list[Any] = [1]
    through.append((through,))
    trip = kept.Box[Any](None)
    trip.item = trip
    return [simple, twice, mapped, through, trip]


@pytest.mark.parametrize("number", range(5))
def test_a_value_that_contains_itself_is_refused(number: int) -> None:
    with pytest.raises(ParamsNotKeptError, match="contains itself"):
        encode({"x": containing_itself()[number]})


def nested(levels: int, around: Any) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = around(value)
    return value


@pytest.mark.parametrize(
    "around",
    [lambda value: [value], lambda value: (value,), lambda value: {1: value}, kept.Box],
    ids=["list", "tuple", "dict", "dataclass"],
)
def test_nesting_is_bounded_well_before_python_gives_up(around: Any) -> None:
    assert same(decode(encode(nested(90, around))), nested(90, around))
    for levels in (120, 5000):
        with pytest.raises(ParamsNotKeptError, match="nested deeper than 100"):
            encode(nested(levels, around))


def test_one_part_that_stands_in_many_places_is_refused_when_it_is_too_much() -> None:
    value: Any = ["x"]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(ParamsNotKeptError, match="max_value_bytes"):
        encode({"x": value}, max_bytes=100_000)
    with pytest.raises(ValueTooLargeError):
        encode_masked({"x": value, "y": Decimal(1)}, None, max_bytes=100_000)


def test_c50_five_megabytes_are_kept_and_sixty_four_are_refused_once_with_both_sizes() -> None:
    five = {"rows": ["x" * 1000] * 5000}
    assert decode(encode_masked(five, None)[0]) == five
    with pytest.raises(ValueTooLargeError) as refused:
        encode_masked("x" * 64 * 1024 * 1024, None)
    assert refused.value.limit_bytes == MAX_VALUE_BYTES == 8 * 1024 * 1024
    assert refused.value.size_bytes > 64 * 1024 * 1024
    with pytest.raises(ValueTooLargeError):
        encode_masked(b"x" * 8 * 1024 * 1024, None)
    with pytest.raises(ParamsNotKeptError, match="8388608"):
        encode({"blob": "x" * MAX_VALUE_BYTES})


def test_the_limit_counts_the_bytes_of_the_text() -> None:
    text = encode(["é", Decimal(1)])
    assert encode(["é", Decimal(1)], max_bytes=len(text)) == text
    with pytest.raises(ParamsNotKeptError, match=f"{len(text)} bytes are more than the {len(text) - 1}"):
        encode(["é", Decimal(1)], max_bytes=len(text) - 1)


def test_a_dict_that_another_thread_changes_meanwhile_is_kept_whole_or_refused() -> None:
    shared: dict[str, Any] = {"n": [Decimal(1)]}
    over = threading.Event()

    def grow() -> None:
        number = 0
        while not over.is_set():
            number += 1
            shared[f"k{number % 50}"] = number
            shared.pop(f"k{(number + 25) % 50}", None)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(300):
            try:
                assert decode(encode(shared))["n"] == [Decimal(1)]
            except ParamsNotKeptError:
                continue
    finally:
        over.set()
        thread.join()


# -- fingerprints -----------------------------------------------------------------------------------------------------


def fingerprint_of(value: object) -> str:
    text = encode(value)
    mark = fingerprint("book", 1, text)
    assert fingerprint("book", 1, text, value) == mark
    return mark


def shuffled(value: Any) -> Any:
    """The same value made in another order."""
    if type(value) is dict:
        return {key: shuffled(item) for key, item in reversed(list(value.items()))}
    if type(value) in (list, tuple):
        return type(value)(map(shuffled, value))
    if type(value) in (set, frozenset):
        return type(value)(reversed(list(value)))
    return value


@few
@given(values)
def test_equal_values_have_equal_fingerprints_whatever_their_order(value: object) -> None:
    assert fingerprint_of(shuffled(value)) == fingerprint_of(value)
    assert fingerprint_of(decode(encode(value))) == fingerprint_of(value)


@few
@given(JSON_VALUES, JSON_VALUES)
def test_unequal_values_have_unequal_fingerprints(one: object, other: object) -> None:
    if not same(shuffled(one), other) and one != other:
        assert fingerprint_of(one) != fingerprint_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Decimal("1.50"), Decimal("1.5")),
        (Decimal("100"), Decimal("1E+2")),
        (Decimal("-0.00"), Decimal(0)),
        (Decimal("1" * 60 + ".0"), Decimal("1" * 60)),
        (-0.0, 0.0),
        ([{"x": -0.0}], [{"x": 0.0}]),
        (complex(0, -0.0), 0j),
        (range(0, 5, 2), range(0, 6, 2)),
        (range(0), range(3, 3)),
        (range(1, 2, 7), range(1, 2)),
        ({1: "a", 2: "b"}, {2: "b", 1: "a"}),
        ({"!": 1, "a": 2}, {"a": 2, "!": 1}),
        (float("nan"), -float("nan")),
        (Secret("bank", "extra__key"), Secret("bank", "extra.key")),
    ],
    ids=str,
)
def test_equal_values_that_are_written_differently_have_one_fingerprint(one: object, other: object) -> None:
    assert fingerprint_of(one) == fingerprint_of(other)
    assert fingerprint_of({"a": [one]}) == fingerprint_of({"a": [other]})


def test_the_order_in_which_a_model_got_its_extras_plays_no_part() -> None:
    one = kept.Customer.model_construct(name="x", address=None, a=1, b=2)
    other = kept.Customer.model_construct(address=None, name="x", b=2, a=1)
    assert one == other
    assert fingerprint_of(one) == fingerprint_of(other)


def test_other_types_values_names_and_versions_have_other_fingerprints() -> None:
    different = [
        1,
        1.0,
        True,
        "1",
        Decimal(1),
        b"1",
        [1],
        (1,),
        {1},
        frozenset({1}),
        {"1": 1},
        {1: 1},
        None,
        1j,
    ]
    different += [Secret("a"), Secret("b"), Secret("a", "login"), "1.0", [[1]], [1, 1], kept.Weekday.MONDAY]
    different += [
        datetime(2026, 1, 1),  # noqa: DTZ001
        datetime(2026, 1, 1, tzinfo=UTC),
        kept.Seat(1, "A"),
        {"row": 1, "letter": "A"},
    ]
    prints = [fingerprint_of(value) for value in different]
    assert len(set(prints)) == len(prints)
    text = encode({"a": 1})
    assert (
        len(
            {
                fingerprint("a", 1, text),
                fingerprint("a", 2, text),
                fingerprint("b", 1, text),
                fingerprint('a":1', 1, text),
            }
        )
        == 4
    )
    assert all(len(each) == 32 and int(each, 16) >= 0 for each in prints)


def test_a_fingerprint_is_the_same_in_every_release() -> None:
    assert fingerprint("book_flight", 1, encode({"trip": {"to": "LIS", "n": 2}})) == PINNED_PLAIN
    assert fingerprint("book_flight", 1, encode({"trip": (Decimal("1.50"), {2: "x"})})) == PINNED_TAGGED


PINNED_PLAIN = "c085de792a496974ac42eb87e303a418"
PINNED_TAGGED = "491a0ca278eecf8c99af92c79b4ac223"


# -- for people -------------------------------------------------------------------------------------------------------


@few
@given(values)
def test_what_is_shown_of_a_stored_value_is_plain_json(value: object) -> None:
    json.dumps(readable(encode(value)))


def test_a_stored_value_is_readable_without_its_classes() -> None:
    value = {
        "price": kept.Money(Decimal("9.90")),
        "when": PARIS,
        "address": kept.Address(street="A"),
        "raw": b"12345",
        "leg": kept.Leg("a", "b"),
        "by": {1: "one"},
        "wait": timedelta(hours=1),
        "secret": Secret("bank"),
        "pair": "\ud83d\ude00",
    }
    assert readable(encode(value).replace("kept_classes", "gone")) == {
        "price": {"amount": "9.90", "currency": "EUR"},
        "when": "2026-10-25T02:30:00 Europe/Paris",
        "address": {"street": "A", "floor": None},
        "raw": "<bytes, 5 bytes>",
        "leg": {"start": "a", "end": "b", "minutes": 0},
        "by": {"1": "one"},
        "wait": "1:00:00",
        "secret": "Secret('bank', field='password')",
        "pair": "\ud83d\ude00",
    }


def test_a_damaged_row_cannot_be_shown_and_says_so() -> None:
    for text in ("{", tagged("timedelta", v="x"), tagged("dict", v=3)):
        with pytest.raises(ValueNotReadableError):
            readable(text)


@pytest.mark.parametrize(
    "value", [{"n": 1, "trip": {"to": "LIS", "guests": ["a", "b"], "at": 1.5, "x": None}}, [], "é"]
)
def test_a_stored_text_says_plainly_the_value_it_was_made_of(value: Any) -> None:
    assert is_plainly(encode(value), value)


@pytest.mark.parametrize(
    ("stored", "value"),
    [
        ([1, 2], (1, 2)),
        ({"n": 1}, {"n": True}),
        ({"n": 1}, {"n": 1.0}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (kept.Status.BOOKED.value, kept.Status.BOOKED),
        ({"n": 1}, {"n": {1}}),
        ("x", b"x"),
        ({"n": 1}, {1: "n"}),
    ],
)
def test_a_stored_text_does_not_plainly_say_another_value(stored: Any, value: Any) -> None:
    assert not is_plainly(encode(stored), value)


def test_no_two_different_values_are_plainly_the_same() -> None:
    kept_values = [(encode(value), value) for value in EXAMPLES]
    for text, value in kept_values:
        for _, other in kept_values:
            assert not is_plainly(text, other) or same(value, other)
