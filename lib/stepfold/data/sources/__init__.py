"""Data sources, one kind per module."""
