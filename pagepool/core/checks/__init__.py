"""Checks of a pool against its holders."""
