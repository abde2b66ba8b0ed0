"""The log: one Postgres schema, every statement that touches it, one verb per transaction. No Airflow here."""
