"""``@task.saga``."""
