"""Rows of host memory."""
