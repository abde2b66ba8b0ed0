"""Reads ``queries.sql``: each statement under its name, as an attribute of :data:`Q`."""

from __future__ import annotations

import re
from importlib.resources import files

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


class Queries:
    """The statements by name; an unknown name is an AttributeError at once."""

    def __init__(self, script: str) -> None:
        parts = _NAME.split(script)[1:]
        for name, body in zip(parts[::2], parts[1::2], strict=True):
            lines = [line for line in body.splitlines() if not line.startswith("--")]
            setattr(self, name, "\n".join(lines).strip().rstrip(";").encode())

    def __getattr__(self, name: str) -> bytes:
        raise AttributeError(f"queries.sql has no statement named {name!r}")


Q = Queries(files("airflow_saga.store").joinpath("queries.sql").read_text(encoding="utf-8"))
