"""The plugin as Airflow finds it by its entry point. It is loaded in every process of Airflow, each task's too."""

from __future__ import annotations

from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

from airflow_saga.plugin.listener import SagaListener, api_server_loaded

PREFIX = "/saga"


class SagaPlugin(AirflowPlugin):
    """Tells the saga store how runs begin and end and that somebody marked one failed; shows sagas in Airflow's UI."""

    name = "saga"
    listeners = [SagaListener()]  # noqa: RUF012 - Airflow's own way

    @cached_property
    def fastapi_apps(self) -> list[dict[str, Any]]:
        """Asked for by the API server only: loading FastAPI would cost each task seconds (measured on 3.3.2)."""
        from airflow_saga.plugin.web.app import make_app

        return [{"app": make_app(), "url_prefix": PREFIX, "name": "Saga"}]

    @cached_property
    def global_operator_extra_links(self) -> list[Any]:
        """On every task; those of other DAGs get none."""
        from airflow_saga.plugin.link import SagaLink

        return [SagaLink()]

    @cached_property
    def external_views(self) -> list[dict[str, Any]]:
        """The tabs. Airflow shows them on each run, also where there is no saga: the page says so then."""
        root = _root()
        run = f"{root}/dags/{{DAG_ID}}/runs/{{RUN_ID}}"
        step = f"{run}?task_id={{TASK_ID}}&map_index={{MAP_INDEX}}"
        return [
            _view("Sagas", f"{root}/", "nav", "sagas", category="browse"),
            _view("Saga", f"{root}/dags/{{DAG_ID}}", "dag", "saga-dag"),
            _view("Saga", run, "dag_run", "saga-run"),
            _view("Saga", step, "task_instance", "saga-step"),
        ]

    @cached_property
    def react_apps(self) -> list[dict[str, Any]]:
        """What the home page shows; Airflow finds the component by this name."""
        bundle = f"{_root()}/static/widget.js"
        return [
            {
                "name": "SagasThatWait",
                "bundle_url": bundle,
                "destination": "dashboard",
                "url_route": "sagas-that-wait",
            }
        ]

    @classmethod
    def on_load(cls, *args: Any, **kwargs: Any) -> None:
        api_server_loaded()


def _root() -> str:
    """Where the app is, also behind a proxy that gives Airflow a part of a site."""
    return urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/") + PREFIX


def _view(name: str, href: str, destination: str, route: str, **more: str) -> dict[str, Any]:
    return {"name": name, "href": href, "destination": destination, "url_route": route, **more}
