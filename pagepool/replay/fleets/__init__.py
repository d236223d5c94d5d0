"""Replicas behind a router, and `pagepool fleet`."""
