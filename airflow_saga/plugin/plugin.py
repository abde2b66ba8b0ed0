"""The plugin as Airflow finds it by its entry point. It is loaded in every process of Airflow, each task's too."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

from airflow_saga.plugin.listener import SagaListener, api_server_loaded


class SagaPlugin(AirflowPlugin):
    """Tells the saga store how runs begin and end, and that somebody marked one failed."""

    name = "saga"
    listeners = [SagaListener()]  # noqa: RUF012 - Airflow's own way

    @classmethod
    def on_load(cls, *args: Any, **kwargs: Any) -> None:
        api_server_loaded()
