"""Whole answers as a terminal or a program reads them: tables, JSON, YAML, and what goes to standard error."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from airflow_saga.telling.display import plain


def data_text(data: Any, output: str) -> str:
    """As JSON or YAML, with the types they have: numbers stay numbers."""
    if output == "yaml":
        from airflow.utils import yaml

        return str(yaml.dump(plain(data), sort_keys=False, allow_unicode=True)).rstrip("\n")
    return json.dumps(plain(data), ensure_ascii=False, indent=2)


def table_text(rows: Sequence[Mapping[str, Any]], nothing: str) -> str:
    """Airflow's own table, but with texts as they are."""
    if not rows:
        return nothing
    from airflow.cli.simple_table import AirflowConsole, SimpleTable
    from rich.text import Text

    table = SimpleTable(caption=None)
    table.show_header = True
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row.values()))
    printed = io.StringIO()
    AirflowConsole(file=printed).print(table)
    return "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines())


def complain(message: str) -> None:
    """On standard error, where neither a table nor JSON is disturbed."""
    print(message, file=sys.stderr)
