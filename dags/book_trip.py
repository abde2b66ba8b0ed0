"""Book a trip: a flight, then hotel and car in one step, then pay.

Each call to the travel service is an action with its compensation. Mark the run failed in the middle, and the generated
DAG `book_trip__compensation` cancels what was booked, newest first.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import task
from support import travel

from airflow_saga import READ_ONLY, ActionRecord, Applied, NotApplied, Saga, SagaDAG, SagaOperator, action

PATIENCE = timedelta(seconds=10)


def cancel_flight(record: ActionRecord) -> None:
    travel.cancel_flight(record.result["id"], idempotency_key=record.undo_key)


def find_flight(record: ActionRecord) -> Applied | NotApplied:
    """Ask the service what became of a booking whose answer was lost."""
    found = travel.find_flight(record.key)
    return Applied(found) if found else NotApplied()


@action(compensate=cancel_flight, verify=find_flight, timeout=PATIENCE)
def book_flight(trip: dict, *, key: str) -> dict:
    return travel.book_flight(trip, idempotency_key=key)


def cancel_hotel(record: ActionRecord) -> None:
    travel.cancel_hotel(record.result["id"], idempotency_key=record.undo_key)


def find_hotel(record: ActionRecord) -> Applied | NotApplied:
    found = travel.find_hotel(record.key)
    return Applied(found) if found else NotApplied()


@action(compensate=cancel_hotel, verify=find_hotel, timeout=PATIENCE)
def book_hotel(trip: dict, *, key: str) -> dict:
    return travel.book_hotel(trip, idempotency_key=key)


def cancel_car(record: ActionRecord) -> None:
    travel.cancel_car(record.result["id"], idempotency_key=record.undo_key)


def find_car(record: ActionRecord) -> Applied | NotApplied:
    found = travel.find_car(record.key)
    return Applied(found) if found else NotApplied()


@action(compensate=cancel_car, verify=find_car, timeout=PATIENCE)
def book_car(trip: dict, *, key: str) -> dict:
    return travel.book_car(trip, idempotency_key=key)


def refund(record: ActionRecord) -> None:
    travel.refund(record.result["id"], idempotency_key=record.undo_key)


@action(compensate=refund, idempotent=True)
def charge(trip: dict, amount: str, *, key: str) -> dict:
    return travel.charge(trip, amount, idempotency_key=key)


@action(compensate=READ_ONLY)
def weather(trip: dict) -> str:
    return "sunny" if trip.get("id") else "unknown"


with SagaDAG(
    "book_trip",
    schedule=None,
    params={"trip": {"id": "demo", "to": "LIS"}},
    render_template_as_native_obj=True,
    tags=["demo"],
) as dag:
    flight = SagaOperator(
        task_id="flight", python_callable=book_flight, op_kwargs={"trip": "{{ params.trip }}"}
    )

    @task.saga(retries=1)
    def stay(saga: Saga, params: dict) -> dict:
        hotel = book_hotel(params["trip"])
        saga.checkpoint({"hotel": hotel["id"]})
        car = book_car(params["trip"])
        return {"hotel": hotel["id"], "car": car["id"], "weather": weather(params["trip"])}

    @task.saga
    def pay(params: dict) -> dict:
        return charge(params["trip"], "420.00")

    flight >> stay() >> pay()
