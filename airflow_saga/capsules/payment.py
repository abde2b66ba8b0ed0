"""A charge by card, in Stripe's protocol; its undo refunds what was charged, to the cent.

.. code-block:: python

    charge = card_charge("charge", conn_id="stripe")

    charge(amount=4200, currency="eur", source="tok_visa")       # in the smallest unit: 42.00 EUR

The service stores the answer to each Idempotency-Key, also a 500, and gives it again for ever. So a key that has got a
500 once is spent: behind a stored 500, and only if no charge carries our mark, the next try goes by the next key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from airflow_saga.capsules import web
from airflow_saga.capsules.declare import declare, seconds_for_network
from airflow_saga.core.actions import Action
from airflow_saga.core.errors import CompensationRejected, NotApplied
from airflow_saga.core.records import ActionRecord, Applied, Later, ProbeAnswer

MARK = "saga_key"
"""Metadata of a charge: the key of the action that made it."""
MOST_KEYS = 5
MOST_PAGES = 50
PAGE = 100
_CHARGED = ("succeeded", "pending")


@dataclass(frozen=True)
class CardCharge:
    """Which account is charged; see :func:`card_charge`."""

    conn_id: str
    timeout_seconds: float
    ask_again_after: timedelta

    def charge(self, params: dict[str, Any], key: str) -> dict[str, Any]:
        form = {name: str(value) for name, value in params.items() if value is not None}
        with self._service() as service:
            form[f"metadata[{MARK}]"] = key
            for each in _keys(key):
                answer = _post(service, "/v1/charges", form, each)
                if not _is_stored_failure(answer):
                    break
                if (found := self._find(service, key)) is not None:
                    return _told(found)
            web.refuse_or_doubt(answer, "the charge")
            return _told(answer.json)

    def verify(self, record: ActionRecord) -> ProbeAnswer:
        with self._service() as service:
            found = self._find(service, record.key)
        if found is None or found["amount_refunded"] >= found["amount"]:
            return NotApplied()
        return Applied(_told(found))

    def undo(self, record: ActionRecord) -> Later | None:
        name = f"the payment service of connection {self.conn_id!r}"
        with web.waiting_for(name), self._service() as service:
            if record.later_token is not None:
                refund = self._read(service, f"/v1/refunds/{record.later_token}", name)
            else:
                charge = self._charge_of(service, record, name)
                left = 0 if charge is None else charge["amount"] - charge["amount_refunded"]
                if charge is None or left <= 0:
                    return None
                refund = self._refund(service, charge["id"], left, record)
            if refund["status"] in ("pending", "requires_action"):
                return Later(refund["id"], after=self.ask_again_after)
            if refund["status"] in ("failed", "canceled"):
                raise CompensationRejected(
                    f"the refund {refund['id']} of {record.name} (key {record.key}) is {refund['status']}; pay it back "
                    f"another way"
                )
            return None

    def _charge_of(self, service: web.Service, record: ActionRecord, name: str) -> dict[str, Any] | None:
        """As it is now; found by its mark where the call's result was lost. One call makes one charge, so what is left
        of it is what is to go back."""
        if not record.result:
            return self._find(service, record.key)
        return self._read(service, f"/v1/charges/{record.result['id']}", name)

    def _refund(
        self, service: web.Service, charge_id: str, amount: int, record: ActionRecord
    ) -> dict[str, Any]:
        form = {"charge": charge_id, "amount": str(amount), f"metadata[{MARK}]": record.undo_key}
        for each in _keys(record.undo_key):
            answer = _post(service, "/v1/refunds", form, each)
            if not _is_stored_failure(answer):
                break
        if not answer.well and _code(answer) == "charge_disputed":
            raise CompensationRejected(f"the charge {charge_id} is disputed, so it cannot be refunded")
        web.reject_or_retry(answer, f"the refund of {charge_id}", f"connection {self.conn_id!r}")
        return dict(answer.json)

    # -- the protocol -------------------------------------------------------------------------------------------------

    def _service(self) -> Any:
        return web.opened(self.conn_id, self.timeout_seconds, token_login=True)

    def _find(self, service: web.Service, key: str) -> dict[str, Any] | None:
        """The charge that carries the mark; the newest are looked at first, ``MOST_PAGES`` of them."""
        after: dict[str, str] = {}
        for _ in range(MOST_PAGES):
            page = self._read(service, "/v1/charges", "", params={"limit": str(PAGE), **after})
            for charge in page["data"]:
                if charge["metadata"].get(MARK) == key and charge["status"] in _CHARGED:
                    return dict(charge)
            if not page["has_more"] or not page["data"]:
                return None
            after = {"starting_after": page["data"][-1]["id"]}
        raise web.AnswerError(f"more than {MOST_PAGES * PAGE} charges, and none of them has {MARK}={key}")

    def _read(self, service: web.Service, path: str, name: str, **request: Any) -> dict[str, Any]:
        answer = service.ask("GET", path, **request)
        if name:
            web.reject_or_retry(answer, f"GET {path}", name)
        elif not answer.well:
            raise web.AnswerError(f"GET {path} was answered with {answer.status}: {web.excerpt(answer)}")
        return dict(answer.json)


def _post(service: web.Service, path: str, form: dict[str, str], key: str) -> web.Answer:
    return service.act("POST", path, data=form, headers={"Idempotency-Key": key})


def _is_stored_failure(answer: web.Answer) -> bool:
    """A 500 of a request that has ended: what it did can be seen by now, and its key gives nothing else any more."""
    return answer.status >= 500 and answer.headers.get("idempotent-replayed") == "true"


def _keys(key: str) -> Iterator[str]:
    yield key
    for number in range(2, MOST_KEYS + 1):
        yield f"{key}-{number}"


def _told(charge: dict[str, Any]) -> dict[str, Any]:
    return {name: charge[name] for name in ("id", "amount", "currency", "status")}


def _code(answer: web.Answer) -> str | None:
    error = answer.json.get("error")
    return error.get("code") if isinstance(error, dict) else None


def card_charge(
    name: str,
    *,
    conn_id: str,
    timeout: timedelta | None = None,
    ask_again_after: timedelta = timedelta(hours=1),
    **options: Any,
) -> Action[Any, Any]:
    """An action ``charge(amount, currency, source=None, customer=None, description=None)``.

    It gives ``{"id", "amount", "currency", "status"}``. The undo refunds what is left of exactly that amount.

    :param conn_id: an Airflow HTTP connection to the service; its password is the secret API key.
    :param timeout: of one call, with all that is in it; default 10 s.
    :param ask_again_after: when a refund that is pending is asked after.
    :param options: as of :func:`airflow_saga.action`.
    """
    account = CardCharge(conn_id, seconds_for_network(timeout), ask_again_after)

    def charge(
        amount: int,
        currency: str,
        source: str | None = None,
        customer: str | None = None,
        description: str | None = None,
        *,
        key: str,
    ) -> dict[str, Any]:
        params = {"amount": amount, "currency": currency, "source": source, "customer": customer}
        return account.charge({**params, "description": description}, key)

    if timeout is not None:
        options["timeout"] = timeout
    return declare(charge, name, account, compensate=account.undo, verify=account.verify, **options)
