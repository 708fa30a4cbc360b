"""A run as a page: what was kept of it, read back, drawn and put into words."""
