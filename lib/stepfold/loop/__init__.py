"""Training: the loop, metrics, hooks, writers, the report and replay."""
