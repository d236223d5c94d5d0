"""Waiting requests."""
