"""Private, undocumented and unstable parts of other packages, and what replaces them."""
