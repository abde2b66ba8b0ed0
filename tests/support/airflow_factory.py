"""Airflows for tests, with new databases for each and what they have in common made once."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.airflow import RunningAirflow
from tests.support.airflow_setup import migrate_metadata
from tests.support.postgres import PostgresServer

_METADATA_TEMPLATE = "airflow_template"
_STORE_TEMPLATE = "airflow_saga_store_template"
_MIGRATE_STORE = "import sys; from airflow_saga.store.migrate import upgrade; upgrade(sys.argv[1])"


class AirflowFactory:
    """Makes Airflows out of one installation; the migrated databases are made once and copied.

    :param python: the interpreter of an environment with Airflow and the product in it.
    :param server: where each Airflow's metadata lives, and its store unless another server is given.
    :param homes: a directory for the home directories.
    :param dags: the DAG files of an Airflow that is not given others.
    """

    def __init__(self, python: Path, server: PostgresServer, homes: Path, dags: Iterable[Path] = ()) -> None:
        self._python = python
        self._server = server
        self._homes = homes
        self._dags = tuple(dags)
        self._migrated_stores: set[str] = set()
        server.create_database(_METADATA_TEMPLATE)
        migrate_metadata(python, homes / "migrate", server.url_of(_METADATA_TEMPLATE))

    def create(
        self,
        *,
        dags: Iterable[Path] | None = None,
        env: Mapping[str, str] | None = None,
        store_server: PostgresServer | None = None,
        store_in_metadata: bool = False,
    ) -> RunningAirflow:
        """An Airflow with new, migrated databases, not started yet.

        :param store_server: a server for the store alone, to be killed or stopped without Airflow's own.
        :param store_in_metadata: Airflow knows the store by a connection in its metadata, not from the environment.
        """
        name = f"airflow_{uuid.uuid4().hex[:8]}"
        return RunningAirflow(
            self._python,
            self._homes / name,
            metadata_url=self._server.create_database(name, template=_METADATA_TEMPLATE),
            store_url=self._new_store(store_server or self._server, f"{name}_store"),
            store_in_metadata=store_in_metadata,
            dags=self._dags if dags is None else dags,
            env=env,
        )

    def _new_store(self, server: PostgresServer, name: str) -> str:
        template = server.url_of(_STORE_TEMPLATE)
        if template not in self._migrated_stores:
            server.create_database(_STORE_TEMPLATE)
            # By the installed wheel, so that what its migrations need is proven to be in it.
            subprocess.run(
                [str(self._python), "-c", _MIGRATE_STORE, template], check=True, cwd=self._homes, timeout=120
            )
            self._migrated_stores.add(template)
        return server.create_database(name, template=_STORE_TEMPLATE)


class FreshAirflows:
    """Starts Airflows for one test, with the arguments of :meth:`AirflowFactory.create`; they end with the test."""

    def __init__(self, factory: AirflowFactory) -> None:
        self._factory = factory
        self._stack = ExitStack()
        self.started: list[RunningAirflow] = []

    def __call__(self, **arguments: Any) -> RunningAirflow:
        airflow = self._factory.create(**arguments)
        self.started.append(airflow)
        return self._stack.enter_context(airflow)

    def close(self) -> None:
        self._stack.close()
