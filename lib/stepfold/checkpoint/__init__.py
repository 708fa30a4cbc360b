"""What survives: checkpoints that are checked when they are read, and parameters for others."""
