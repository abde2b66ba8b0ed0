"""Rows: what somebody has changed since is left alone, and each value goes back as it came."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from airflow_saga.capsules import rows
from airflow_saga.capsules.rows import delete_row, insert_row
from airflow_saga.core.errors import ActionDeclarationError, CompensationRejected, NotApplied
from tests.capsules.conftest import Shop, record_of
from tests.capsules.trials import add_thing, drop_thing, set_price
from tests.runtime.lab import Lab

ODD = insert_row("odd_row", conn_id="shop", table='sh%p."odd"'.replace('"', ""), key='od%d "n"')
DROP_ALL_KINDS = delete_row("drop_all_kinds", conn_id="shop", table="kinds")


def chair(shop: Shop) -> None:
    shop.ask("INSERT INTO things (name, price) VALUES ('chair', 5)")


def undo(action: Any, key: str, **params: Any) -> None:
    action.compensation(record_of(action.name, params, key))


def test_an_undo_leaves_a_row_alone_that_somebody_has_changed_since(lab: Lab, shop: Shop) -> None:
    chair(shop)
    lab.step(lambda saga: set_price({"id": 1}, {"price": 9}))
    shop.ask("UPDATE things SET name = 'armchair'")
    assert lab.undo().saga.state == "PARTIALLY_CANCELLED"
    assert shop.things() == [(1, "armchair", Decimal("9.00"))]
    (row,) = lab.actions()
    assert (row.state, row.undo_failures) == ("COMPENSATION_FAILED", 1)
    assert "somebody has changed it" in str(row.error)


def test_an_undo_of_a_delete_does_not_overwrite_a_row_that_took_its_place(shop: Shop) -> None:
    chair(shop)
    drop_thing.fn({"name": "chair"}, key="k")
    shop.ask("INSERT INTO things (name, price) VALUES ('chair', 77)")
    with pytest.raises(CompensationRejected):
        undo(drop_thing, "k", where={"name": "chair"})
    assert [price for _, _, price in shop.things()] == [Decimal("77.00")]


def test_an_undo_of_an_insert_that_somebody_has_deleted_is_rejected(shop: Shop) -> None:
    add_thing.fn({"name": "table"}, key="k")
    shop.ask("DELETE FROM things")
    with pytest.raises(CompensationRejected):
        undo(add_thing, "k", values={"name": "table"})


def test_a_rejected_undo_can_be_tried_again_when_the_row_is_as_it_was(shop: Shop) -> None:
    chair(shop)
    set_price.fn({"id": 1}, {"price": 9}, key="k")
    shop.ask("UPDATE things SET price = 10")
    with pytest.raises(CompensationRejected):
        undo(set_price, "k", where={"id": 1}, values={"price": 9})
    shop.ask("UPDATE things SET price = 9")
    undo(set_price, "k", where={"id": 1}, values={"price": 9})
    assert shop.things() == [(1, "chair", Decimal("5.00"))]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: set_price.fn({"id": 99}, {"price": 1}, key="k"), "no row id=99"),
        (lambda: set_price.fn({"name": "chair"}, {"price": 1}, key="k"), "told apart by id, not by name"),
        (lambda: set_price.fn({"id": 1}, {"id": 2}, key="k"), "not changed by an update"),
        (lambda: set_price.fn({"id": 1}, {"colour": "red"}, key="k"), "does not exist"),
        (lambda: add_thing.fn({"name": "chair"}, key="k"), "UniqueViolation"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(shop: Shop, call: Any, why: str) -> None:
    chair(shop)
    with pytest.raises(NotApplied, match=why):
        call()
    assert shop.things() == [(1, "chair", Decimal("5.00"))]
    assert shop.receipts() == 0


def test_every_kind_of_value_goes_back_as_it_came(shop: Shop) -> None:
    shop.ask(
        """CREATE TABLE kinds AS SELECT 1 AS id, 1.50::numeric AS n, 0.1::float8 AS f, 'NaN'::float8 AS nan,
        '2030-01-02 03:04:05.678901+02'::timestamptz AS at, '2030-01-02 03:04:05'::timestamp AS naive,
        date '2030-01-02' AS day, '{"b": [1, {"a": 1.50}]}'::json AS j, '[1.10, null]'::jsonb AS jb,
        '{1,NULL,3}'::int[] AS numbers, '\\x00ff'::bytea AS bytes, gen_random_uuid() AS u, true AS yes,
        interval '3 days 4 hours' AS span, NULL::text AS nothing, '{"q"}'::text[] AS words"""
    )
    before = shop.ask("SELECT kinds::text FROM kinds")
    DROP_ALL_KINDS.fn({"id": 1}, key="k")
    assert shop.ask("SELECT 1 FROM kinds") == []
    undo(DROP_ALL_KINDS, "k", where={"id": 1})
    assert shop.ask("SELECT kinds::text FROM kinds") == before


def test_names_are_quoted(shop: Shop) -> None:
    shop.ask('CREATE SCHEMA "sh%p"')
    shop.ask('CREATE TABLE "sh%p".odd ("od%d ""n""" int PRIMARY KEY, "select" text)')
    values = {'od%d "n"': 3, "select": "100%"}
    assert ODD.fn(values, key="k")["after"] == values
    undo(ODD, "k", values=values)
    assert shop.ask('SELECT count(*) FROM "sh%p".odd') == [(0,)]


def test_two_capsules_of_one_name_in_one_file_are_refused_and_the_same_one_again_is_not() -> None:
    rows.insert_row("twice", conn_id="shop", table="things")
    rows.insert_row("twice", conn_id="shop", table="things")
    with pytest.raises(ActionDeclarationError, match="declared twice"):
        rows.insert_row("twice", conn_id="other", table="things")
