"""Operators: steps of a saga, and the tasks of the generated compensation DAG."""
