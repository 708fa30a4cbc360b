"""Rerun the step in which a metric became NaN or inf, and find the cause."""
