"""Agents in a saga: see :class:`SagaCapability`. Needs the extra ``ai``."""

from __future__ import annotations

from airflow_saga.ai.capability import SagaCapability
from airflow_saga.ai.history import last_rounds, paired
from airflow_saga.ai.tools import ToolAction, action_key

__all__ = ["SagaCapability", "ToolAction", "action_key", "last_rounds", "paired"]
