"""What the DAGs of the end-to-end tests share: their actions, and a way to tell each step what to do."""
