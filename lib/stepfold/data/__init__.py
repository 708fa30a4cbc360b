"""Input pipelines: sources, batching, mixing, packing and prefetching."""
