"""The arguments of a training run: fields in groups, read and held against each other when built."""
