"""What is kept of a run: writers of metrics, by clu's method names."""
