"""The fold: steps over batches, and what a person wants to see and keep of it."""
