"""On the path of an Airflow this hides every plugin that comes with a package: the product without its listener."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def _hide_plugins(metadata: Any) -> None:
    entry_points = metadata.Distribution.entry_points.fget

    def without_plugins(distribution: Any) -> Any:
        return metadata.EntryPoints(e for e in entry_points(distribution) if e.group != "airflow.plugins")

    metadata.Distribution.entry_points = property(without_plugins)


# Airflow reads with the second before Python 3.12.
for _name in ("importlib.metadata", "importlib_metadata"):
    try:
        _hide_plugins(import_module(_name))
    except ModuleNotFoundError:
        continue
