"""Adapter for vLLM's KV-cache manager and block hashes."""
