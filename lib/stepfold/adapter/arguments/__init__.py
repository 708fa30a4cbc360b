"""The arguments of a run: fields in groups, read and held against each other when built."""
