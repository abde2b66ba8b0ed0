"""Alembic's entry: runs the migrations on the connection that ``migrate.py`` hands over."""

from __future__ import annotations

from alembic import context

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    version_table="alembic_version",
    version_table_schema="airflow_saga",
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
