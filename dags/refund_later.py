"""A payment whose refund settles later, and a message that cannot be unsent: an undo that ends with something standing.

The last step always fails, so the run is undone by its policy. The refund is asked for, reported as under way, and
asked about again when it is due; the message is named and put before a person.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import task
from support import travel

from airflow_saga import NON_COMPENSABLE, ActionRecord, Later, SagaDAG, action

ASK_AGAIN = timedelta(seconds=5)


def refund(record: ActionRecord) -> Later | None:
    """Ask for the refund once; after that only ask how it is doing."""
    token = record.later_token
    if token is None:
        token = travel.refund(record.result["id"], idempotency_key=record.undo_key).get("token")
        return Later(token, after=ASK_AGAIN) if token else None
    return None if travel.refund_status(token) == "settled" else Later(token, after=ASK_AGAIN)


@action(compensate=refund, idempotent=True)
def charge(trip: dict, amount: str, *, key: str) -> dict:
    return travel.charge(trip, amount, idempotency_key=key)


@action(compensate=NON_COMPENSABLE)
def tell_traveller(trip: dict, to: str, text: str, *, key: str) -> dict:
    return travel.send_message(trip, to, text, idempotency_key=key)


with SagaDAG(
    "refund_later", schedule=None, params={"trip": {"id": "refund-demo", "to": "OPO"}}, tags=["demo"]
) as dag:

    @task.saga
    def pay(params: dict) -> dict:
        return charge(params["trip"], "99.00")

    @task.saga
    def announce(params: dict) -> None:
        tell_traveller(params["trip"], "traveller@example.org", "Your trip is booked.")

    @task.saga
    def find_out_too_late() -> None:
        raise RuntimeError("the airline is on strike")

    pay() >> announce() >> find_out_too_late()
