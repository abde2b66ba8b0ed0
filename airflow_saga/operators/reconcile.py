"""The task of the reconciler DAG."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseOperator

from airflow_saga import __version__
from airflow_saga.operators.notices import tell_untold
from airflow_saga.platform import SupervisorPlatform
from airflow_saga.runtime.reconcile import Reconciler
from airflow_saga.settings import Settings, store_address
from airflow_saga.store import migrate
from airflow_saga.store.runs import RunVerbs
from airflow_saga.telemetry import listen_in


class ReconcileOperator(BaseOperator):
    """One pass over every open saga of the store: tells it how runs ended, sweeps lost steps, starts undos.

    Safe to run at any time and twice at once. An Airflow retry is not needed: the next run of the DAG is one.

    :param notifiers: told, after all else, what only this sees; what fails there changes nothing.
    """

    ui_color = "#e7f0ea"

    def __init__(self, *, notifiers: Sequence[Any] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.notifiers = list(notifiers)

    def execute(self, context: Any) -> str:
        settings = Settings.load()
        listen_in()
        connection = store_address().open_within(settings.store_outage_seconds)
        try:
            migrate.check(connection)
            report = Reconciler(connection, SupervisorPlatform(), settings.limits()).run_once()
            RunVerbs(connection).note_component("reconciler", socket.gethostname(), __version__, None)
            tell_untold(connection, self.notifiers, context, start_alert_seconds=settings.start_alert_seconds)
        finally:
            connection.close()
        self.log.info("%s", report)
        return str(report)
