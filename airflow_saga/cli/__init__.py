"""The verbs of the product as commands: ``airflow saga …``."""
