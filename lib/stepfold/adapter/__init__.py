"""A trainer to wear: arguments, outputs and the class that holds them together."""
