"""What Airflow asks every provider about itself: the decorator, the commands and the options of `[saga]`.

Airflow calls this while it finds its providers, in every one of its processes and before it is itself fully imported:
so nothing here may import Airflow, and every name is a string. This is the one home of the options' defaults.
"""

from __future__ import annotations

from typing import Any

_FIRST_VERSION = "0.1.0"


def _option(type_: str, default: str, description: str, *, example: str | None = None) -> dict[str, Any]:
    return {
        "description": description,
        "version_added": _FIRST_VERSION,
        "type": type_,
        "example": example,
        "default": default,
    }


_OPTIONS: dict[str, dict[str, Any]] = {
    "conn_id": _option(
        "string",
        "saga_default",
        "The Airflow connection to the Postgres database that holds the sagas. Workers, triggerer, scheduler and "
        "API server all open it.",
    ),
    "lease_seconds": _option(
        "float",
        "15",
        "How long a step counts as alive, in seconds, after the last time it was heard of. A step whose lease ran "
        "out is fenced off: it can begin nothing more, and its pending actions are in doubt.",
    ),
    "heartbeat_seconds": _option(
        "float",
        "1",
        "How often, in seconds, a running step renews its lease and looks for a cancel that no notification told it "
        "of. Well below lease_seconds.",
    ),
    "flush_ms": _option(
        "integer",
        "500",
        "How long, in milliseconds, the results of read-only actions and checkpoints may wait to be written "
        "together. Outcomes of actions with an effect never wait for it.",
    ),
    "checkpoint_every": _option(
        "integer",
        "100",
        "How many checkpoints of a step may wait to be written together; the newest one is the one that counts. "
        "They never wait longer than flush_ms, and never for the next action to begin.",
    ),
    "stop_grace_seconds": _option(
        "float",
        "30",
        "How long, in seconds, the body of a step may go on after a cancel while none of its actions is running, "
        "before its process is ended: a hung body cannot hold a cancel.",
    ),
    "wait_in_process_seconds": _option(
        "float",
        "10",
        "How long, in seconds, a cleared step waits in its own process for an undo to settle before it gives its "
        "worker slot back and is rescheduled.",
    ),
    "cancel_deadline_seconds": _option(
        "float",
        "3600",
        "How long, in seconds, a cancel may take in all. What then still stands is named, and the saga ends as "
        "PARTIALLY_CANCELLED. Never less than the longest running timeout, its settling time and a lease.",
    ),
    "store_outage_seconds": _option(
        "float",
        "60",
        "How long, in seconds, a running step keeps trying to reach the store to write an outcome before it gives "
        "up and the action is in doubt.",
    ),
    "mass_undo_threshold": _option(
        "integer",
        "20",
        "How many sagas may lose their lease within 60 seconds before this counts as an outage and not as so many "
        "cancels: automatic undo is then held and a person is asked.",
    ),
    "max_value_bytes": _option(
        "integer",
        "8388608",
        "The largest parameter, result or checkpoint that is kept, in bytes of its encoded form (8 MiB).",
    ),
    "retention_days": _option(
        "integer",
        "90",
        "For how many days `airflow saga prune` keeps sagas that are settled. Those with something still standing "
        "are kept until it is resolved.",
    ),
    "undo_deadline_seconds": _option(
        "float",
        "86400",
        "How long, in seconds, a compensation that answers `Later` may take in all (24 hours), unless its action "
        "says otherwise.",
    ),
    "start_alert_seconds": _option(
        "float",
        "300",
        "How long, in seconds, an undo may be asked for without its compensation DAG having started, before it is "
        "reported as stuck.",
    ),
}


def get_provider_info() -> dict[str, Any]:
    """Describe this provider in the form of Airflow's `provider_info.schema.json`."""
    return {
        "package-name": "airflow-saga",
        "name": "Saga",
        "description": "The Saga pattern for DAG runs: graceful cancel, a compensation DAG, honest end states.",
        "task-decorators": [{"name": "saga", "class-name": "airflow_saga.decorators.saga.saga_task"}],
        "cli": ["airflow_saga.cli.definition.get_saga_cli_commands"],
        "config": {
            "saga": {
                "description": "Sagas: where they are kept and when to lose patience.",
                "options": _OPTIONS,
            }
        },
    }
