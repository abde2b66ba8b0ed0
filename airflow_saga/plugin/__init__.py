"""What Airflow loads of us into each of its processes: the plugin and its listener. Importing it has to stay light."""
