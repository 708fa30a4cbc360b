"""Hooks: functions that see the events of a run."""
