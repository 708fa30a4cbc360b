"""Find out what went wrong in a run: where two runs part."""
