from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from airflow_saga.core.errors import SecretNotResolvedError
from airflow_saga.core.secret import Secret, set_secret_resolver


@pytest.fixture
def vault() -> Iterator[dict[tuple[str, str], str]]:
    kept: dict[tuple[str, str], str] = {("bank", "password"): "hunter2-hunter2"}
    set_secret_resolver(lambda conn_id, field: kept.get((conn_id, field)))
    yield kept
    set_secret_resolver(None)


def test_a_secret_is_its_place_and_shows_nothing_else(vault: dict[tuple[str, str], str]) -> None:
    secret = Secret("bank")
    secret.reveal()
    assert "hunter2" not in f"{secret!r} {secret} {secret!s}"
    assert repr(secret) == "Secret('bank', field='password')"
    assert secret == Secret("bank", field="password")
    assert len({secret, Secret("bank"), Secret("bank", "login"), Secret("shop")}) == 3


def test_c52_a_secret_rotated_between_call_and_undo_is_read_anew(vault: dict[tuple[str, str], str]) -> None:
    secret = Secret("bank")
    assert secret.reveal() == "hunter2-hunter2"
    vault["bank", "password"] = "rotated-since"
    assert secret.reveal() == "rotated-since"


def test_nothing_of_the_value_travels_with_a_copy(vault: dict[tuple[str, str], str]) -> None:
    secret = Secret("bank")
    secret.reveal()
    assert b"hunter2" not in pickle.dumps(secret)
    assert copy.deepcopy(secret) == secret


def test_a_secret_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Secret("bank").conn_id = "other"  # type: ignore[misc]


@pytest.mark.parametrize("field", ["password", "login", "host", "schema", "port", "extra", "extra.api_key"])
def test_each_field_is_asked_for_by_its_name(vault: dict[tuple[str, str], str], field: str) -> None:
    vault["bank", field] = f"the {field}"
    assert Secret("bank", field=field).reveal() == f"the {field}"


def test_both_spellings_of_a_key_in_the_extra_are_one_secret(vault: dict[tuple[str, str], str]) -> None:
    vault["bank", "extra.api_key"] = "abc"
    assert Secret("bank", "extra__api_key") == Secret("bank", "extra.api_key")
    assert Secret("bank", "extra__api_key").reveal() == "abc"


@pytest.mark.parametrize("field", ["passwort", "", "extra.", "extra__", "Password"])
def test_a_field_that_no_connection_has_is_refused_when_the_secret_is_made(field: str) -> None:
    with pytest.raises(ValueError, match="password, login, host, schema, port, extra"):
        Secret("bank", field=field)


def test_a_secret_without_a_connection_is_refused() -> None:
    with pytest.raises(ValueError, match="name the connection"):
        Secret("")
    with pytest.raises(TypeError, match="names"):
        Secret(7)  # type: ignore[arg-type]


def test_a_missing_field_is_named(vault: dict[tuple[str, str], str]) -> None:
    with pytest.raises(SecretNotResolvedError, match="'shop' has no login"):
        Secret("shop", "login").reveal()


def test_where_nothing_resolves_secrets_the_error_says_so() -> None:
    with pytest.raises(SecretNotResolvedError, match="set_secret_resolver"):
        Secret("bank").reveal()


def test_an_error_of_the_resolver_comes_through() -> None:
    def broken(conn_id: str, field: str) -> str:
        raise ConnectionError("the secrets backend is away")

    set_secret_resolver(broken)
    try:
        with pytest.raises(ConnectionError, match="away"):
            Secret("bank").reveal()
    finally:
        set_secret_resolver(None)
