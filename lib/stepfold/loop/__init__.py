"""The fold: steps over batches, what is shown to hooks, and what writers keep of it."""
