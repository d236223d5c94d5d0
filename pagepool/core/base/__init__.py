"""The base of every room: the platform, memory, locks, digests and limits."""
