"""What is shown of a run, and what stops it: functions of an event."""
