"""Shared parts of the commands: options, sizes, memory checks, progress, and the forms of their results."""
