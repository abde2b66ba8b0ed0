"""The link "Saga" on a task, while it runs too: what an operator itself links to is kept only when its task is over."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink

from airflow_saga.plugin.events import SAGA_TAG


class SagaLink(BaseOperatorLink):
    """Leads from a task of a saga DAG to the tab of its step."""

    name = "Saga"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Empty, so that no link is shown, for tasks of other DAGs."""
        dag = operator.get_dag()
        if dag is None or SAGA_TAG not in dag.tags:
            return ""
        if ti_key.map_index >= 0:
            return tab_of(ti_key.dag_id, ti_key.run_id)
        run = _page_of(ti_key.dag_id, ti_key.run_id)
        return f"{run}/tasks/{quote(ti_key.task_id, safe='')}/plugin/saga-step"


def tab_of(dag_id: str, run_id: str) -> str:
    """The path of a run's tab, below where Airflow is."""
    return f"{_page_of(dag_id, run_id)}/plugin/saga-run"


def _page_of(dag_id: str, run_id: str) -> str:
    return f"/dags/{quote(dag_id, safe='')}/runs/{quote(run_id, safe='')}"
