"""A router's index."""
