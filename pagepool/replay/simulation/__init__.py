"""A simulated scheduler on one pool, and `pagepool replay`."""
