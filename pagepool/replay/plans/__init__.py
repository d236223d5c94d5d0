"""Hit rates by pool size, and `pagepool plan`."""
