"""airflow_saga: stop an AI agent on Airflow, and undo what it did.

The public names. Loaded on first use, so that importing the core, the store or the runtime loads no Airflow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from airflow_saga.runtime.statements import set_databases

__version__ = "0.1.0"

if TYPE_CHECKING:
    from airflow_saga.ai import SagaCapability, ToolAction
    from airflow_saga.core.actions import NON_COMPENSABLE, READ_ONLY, Action
    from airflow_saga.core.declare import action
    from airflow_saga.core.errors import (
        CompensationRejected,
        InDoubtError,
        NotApplied,
        SagaCancelledError,
        SagaDivergedError,
        SagaError,
        Unavailable,
    )
    from airflow_saga.core.policies import Retry
    from airflow_saga.core.records import ActionRecord, Applied, Later, Unknown
    from airflow_saga.core.secret import Secret
    from airflow_saga.dags import SagaDAG, compensation_dag, reconciler_dag
    from airflow_saga.decorators.saga import saga_task
    from airflow_saga.operators.agent import SagaAgentOperator, SagaLLMOperator
    from airflow_saga.operators.compensable import compensable
    from airflow_saga.operators.saga import SagaOperator
    from airflow_saga.operators.sql import SagaSQLOperator
    from airflow_saga.runtime.rounds import last_rounds
    from airflow_saga.runtime.saga import Saga

_HOMES = {
    "Action": "core.actions",
    "NON_COMPENSABLE": "core.actions",
    "READ_ONLY": "core.actions",
    "action": "core.declare",
    "CompensationRejected": "core.errors",
    "InDoubtError": "core.errors",
    "NotApplied": "core.errors",
    "SagaCancelledError": "core.errors",
    "SagaError": "core.errors",
    "Unavailable": "core.errors",
    "Retry": "core.policies",
    "ActionRecord": "core.records",
    "Applied": "core.records",
    "Later": "core.records",
    "Unknown": "core.records",
    "Secret": "core.secret",
    "SagaDAG": "dags",
    "compensable": "operators.compensable",
    "compensation_dag": "dags",
    "reconciler_dag": "dags",
    "saga_task": "decorators.saga",
    "SagaAgentOperator": "operators.agent",
    "SagaCapability": "ai",
    "SagaLLMOperator": "operators.agent",
    "SagaOperator": "operators.saga",
    "ToolAction": "ai",
    "SagaSQLOperator": "operators.sql",
    "Saga": "runtime.saga",
    "SagaDivergedError": "core.errors",
    "last_rounds": "runtime.rounds",
}

__all__ = [
    "NON_COMPENSABLE",
    "READ_ONLY",
    "Action",
    "ActionRecord",
    "Applied",
    "CompensationRejected",
    "InDoubtError",
    "Later",
    "NotApplied",
    "Retry",
    "Saga",
    "SagaAgentOperator",
    "SagaCancelledError",
    "SagaCapability",
    "SagaDAG",
    "SagaDivergedError",
    "SagaError",
    "SagaLLMOperator",
    "SagaOperator",
    "SagaSQLOperator",
    "Secret",
    "ToolAction",
    "Unavailable",
    "Unknown",
    "action",
    "compensable",
    "compensation_dag",
    "last_rounds",
    "reconciler_dag",
    "saga_task",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def _databases() -> Any:
    return import_module(f"{__name__}.capsules.databases")


set_databases(_databases)
