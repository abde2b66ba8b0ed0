"""What runs inside a process of Airflow, without Airflow: steps, the journal, the codec, the undo."""
