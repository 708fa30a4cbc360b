"""The report of a run: an HTML page drawn from its files."""
