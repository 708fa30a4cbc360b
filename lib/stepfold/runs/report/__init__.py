"""The report of a run: a page of its metrics, times and events."""
