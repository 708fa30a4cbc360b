"""What a step costs, read before it runs."""
