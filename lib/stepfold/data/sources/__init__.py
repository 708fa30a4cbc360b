"""Where examples come from: one kind of source a file."""
