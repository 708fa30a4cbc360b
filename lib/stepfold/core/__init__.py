"""Train states and steps, and their parts: losses, gradients, precision, averages."""
