"""Traces: reading, recording and generating the requests of a simulation."""
