"""Writers of metrics, with the method names of clu."""
