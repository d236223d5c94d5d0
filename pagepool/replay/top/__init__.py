"""A picture of a pool, and `pagepool top`."""
