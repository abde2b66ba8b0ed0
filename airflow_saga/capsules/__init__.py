"""Undo capsules: ready-made actions, each with what undoes it and what finds out whether it took effect.

Each module has factories that are called at the top level of a DAG file, with a name for the log and the Airflow
connection to use, and give an :class:`airflow_saga.Action`.
"""
