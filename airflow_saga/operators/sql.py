"""``SagaSQLOperator``: one SQL statement as a step of the saga."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException

from airflow_saga.core.actions import Marker
from airflow_saga.core.identity import check_task_id
from airflow_saga.operators.step import SagaStep


class SagaSQLOperator(SagaStep, BaseOperator):
    """Run one SQL statement exactly once, and undo it by another one exactly once.

    The statement and its receipt are one transaction of the database (see :meth:`airflow_saga.Saga.sql`), so whatever
    is killed in between, nobody has to guess. The task returns the rows of a statement that RETURNs rows, else how many
    it changed.

    :param conn_id: the connection to the database, templated. It needs the table of receipts: ``airflow saga db migrate
        --receipts --conn-id CONN``.
    :param sql: one statement, templated; or the name of a ``.sql`` file.
    :param parameters: of the statement, templated; by name where the undo uses them.
    :param compensate: the SQL that undoes it, templated, with the named parameters and what the statement RETURNed; or
        ``NON_COMPENSABLE``, or ``READ_ONLY``.
    :raises AirflowException: at parse, if ``compensate`` is none of these.
    :raises NotApplied: the statement failed, and was rolled back; after its last try an Airflow retry fails at once.
    """

    template_fields: Sequence[str] = ("conn_id", "sql", "parameters", "compensate")
    template_ext: Sequence[str] = (".sql",)
    template_fields_renderers = {"sql": "sql", "parameters": "json", "compensate": "sql"}  # noqa: RUF012 - Airflow's own way
    ui_color = "#e7f0ea"

    def __init__(
        self,
        *,
        conn_id: str,
        sql: str,
        compensate: str | Marker,
        parameters: Mapping[str, Any] | Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_task_id(self.task_id)
        if not isinstance(compensate, Marker) and not compensate:
            raise AirflowException(
                f"{self.task_id}: compensate={compensate!r}: give the SQL that undoes the statement, or "
                f"NON_COMPENSABLE, or READ_ONLY"
            )
        self.conn_id = conn_id
        self.sql = sql
        self.parameters = parameters
        self.compensate = compensate

    def execute(self, context: Any) -> Any:
        return self.run_step(
            context,
            lambda saga: saga.sql(self.conn_id, self.sql, self.parameters, compensate=self.compensate),
        )
