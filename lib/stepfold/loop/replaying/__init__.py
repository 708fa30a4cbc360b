"""Going back to the step in which a run went wrong, and looking for what did it."""
